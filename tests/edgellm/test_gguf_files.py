"""Files in parts, in one piece and with other metadata hold what they held, by the gguf package."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.errors import EdgeLLMError
from edgellm.gguf_files import merge, n_bytes_of, plan_parts, set_metadata, split
from edgellm.gguf_hash import checksums, differing
from edgellm.quant import by_name
from edgellm.quant.gguf import GGUF, GGUFError
from edgellm.quant.values import encode
from edgellm.quant.writer import NewTensor, Writer


def contents(*paths: str | Path) -> tuple[dict[str, object], dict[str, bytes]]:
    """Metadata without the keys of parts, and tensors, as gguf-py reads them."""
    metadata: dict[str, object] = {}
    tensors: dict[str, bytes] = {}
    for path in paths:
        reader = gguf.GGUFReader(path)
        metadata |= {
            key: field.contents()
            for key, field in reader.fields.items()
            if not key.startswith(("split.", "GGUF."))
        }
        tensors |= {t.name: t.data.tobytes() for t in reader.tensors}
    return metadata, tensors


@pytest.mark.parametrize(
    "how", [{"max_tensors": 5}, {"max_bytes": 60_000}, {"is_first_empty": True}]
)
def test_split_and_merge(tiny_model: Callable[..., Path], tmp_path: Path, how: dict) -> None:  # type: ignore[type-arg]
    path = str(tiny_model("llama"))
    parts = split(path, str(tmp_path / "m"), **{"max_tensors": None} | how)
    names = [name for name, _ in parts]
    assert len(names) > 1 and sorted(tmp_path.iterdir()) == sorted(map(Path, names))
    assert contents(*names) == contents(path)
    for i, name in enumerate(names):
        fields = gguf.GGUFReader(name).fields
        assert fields["split.no"].contents() == i
        assert fields["split.count"].contents() == len(names)
        assert len(fields) == 3 + 3 or i == 0  # only the first one describes the model
    with GGUF(names[-1]) as whole, GGUF(path) as first:
        assert list(whole.tensors) == list(first.tensors)

    out = str(tmp_path / "merged.gguf")
    assert merge(names[-1], out) == len(names)
    assert contents(out) == contents(path)
    with pytest.raises(GGUFError, match="is in one piece already"):
        merge(out, str(tmp_path / "again.gguf"))


def test_a_part_is_not_overwritten_by_the_whole(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    names = [name for name, _ in split(str(tiny_model()), str(tmp_path / "m"), max_tensors=9)]
    before = Path(names[0]).read_bytes()
    with pytest.raises(GGUFError, match="is what is read"):
        merge(names[1], names[0], force=True)
    assert Path(names[0]).read_bytes() == before
    with pytest.raises(GGUFError, match="exists"):
        split(str(tiny_model()), str(tmp_path / "m"), max_tensors=9)


def test_as_many_parts_as_can_be_read(tmp_path: Path) -> None:
    many, none = str(tmp_path / "many.gguf"), str(tmp_path / "none.gguf")
    tensors = [NewTensor(f"t{i}", (1,), by_name("f32")) for i in range(1025)]
    metadata = {"general.architecture": encode("llama")}
    with Writer(many, metadata, tensors) as out:
        out.write(bytes(4 * len(tensors)))
    with pytest.raises(EdgeLLMError, match="1025 parts"):
        split(many, str(tmp_path / "m"), max_tensors=1)
    assert len(split(many, str(tmp_path / "m"), max_tensors=2, dry_run=True)) == 513
    with Writer(none, metadata, []):
        pass
    [(name, held)] = split(none, str(tmp_path / "none"))
    assert held == [] and contents(name) == contents(none)


def test_llama_cpp_opens_the_parts(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    path = str(Path(__file__).parents[1] / "data" / "arch" / "phi3.gguf")
    parts = split(path, str(tmp_path / "m"), max_tensors=7)
    logits = []
    for name in (path, parts[0][0]):
        model = llama_cpp.Llama(name, n_ctx=32, n_threads=1, logits_all=True, verbose=False)
        model.eval([1, 5, 9])
        logits.append(model.scores[:3].copy())
    np.testing.assert_array_equal(*logits)


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    most=st.none() | st.integers(1, 8),
    limit=st.none() | st.integers(1, 200),
    is_first_empty=st.booleans(),
)
def test_any_plan(
    sizes: list[int], most: int | None, limit: int | None, is_first_empty: bool
) -> None:
    tensors = [NewTensor(f"t{i}", (n,), by_name("f32")) for i, n in enumerate(sizes)]
    parts = plan_parts(tensors, most, limit, is_first_empty)
    assert [t for part in parts for t in part] == tensors
    assert (parts[0] == []) == is_first_empty and all(parts[1:])
    for part in parts:
        assert most is None or len(part) <= most
        assert limit is None or len(part) <= 1 or sum(t.n_bytes for t in part) <= limit


def test_metadata(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path, out = str(tiny_model()), tmp_path / "m.gguf"
    values = {"llama.rope.freq_base": 5e5, "general.name": "Müller", "llama.context_length": 64}
    set_metadata(path, str(out), values | {"mine.count": 3}, ["tokenizer.ggml.scores"][:0])
    metadata, tensors = contents(path)
    assert contents(out) == (metadata | values | {"mine.count": 3}, tensors)
    set_metadata(str(out), str(out), {}, ["mine.count"], force=True)  # in place
    assert contents(out) == (metadata | values, tensors)

    before = out.read_bytes()
    for asked, removed, match in (
        ({"llama.context_length": "many"}, [], "is of type uint32; 'many' is not"),
        ({"llama.context_length": -1}, [], "cannot be set: -1 is no uint32"),
        ({"llama.context_length": True}, [], "is of type uint32; True is not"),
        ({"tokenizer.ggml.tokens": "a"}, [], "is of type array"),
        ({"general.alignment": 64}, [], "must stay"),
        ({"tokenizer.chat_template": "x" * (300 << 10)}, [], "m.gguf: .*is longer than 256 KiB"),
        ({}, ["not.there"], "does not exist"),
        ({"mine.count": 1 << 70}, [], "cannot be set: .* is no uint64"),
        ({"mine.text": "\udcff"}, [], "no UTF-8"),
        ({"mine.\udcff": 1}, [], "no UTF-8"),
    ):
        with pytest.raises(GGUFError, match=match):
            set_metadata(str(out), str(out), asked, removed, force=True)
        assert out.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_metadata_of_a_part(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    names = [name for name, _ in split(str(tiny_model()), str(tmp_path / "m"), max_tensors=9)]
    set_metadata(names[0], names[0], {"general.name": "parts"}, force=True)
    with GGUF(names[1]) as model:
        assert model.string("general.name") == "parts"
    assert contents(*names)[1] == contents(tiny_model())[1]
    for path, out, match in (
        (names[1], names[1], f"does not describe the model; what does is {names[0]}"),
        (names[0], str(tmp_path / "x.gguf"), "must end in -00001-of-00003.gguf, or merge"),
    ):
        with pytest.raises(GGUFError, match=match):
            set_metadata(path, out, {"general.name": "parts"}, force=True)


def test_hash(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    import hashlib

    path = str(tiny_model())
    lines = list(checksums(path, ["sha256", "sha1", "uuid"]))
    _, tensors = contents(path)
    by_tensor = {line.tensor: line.digest for line in lines if line.algorithm == "sha256"}
    whole = hashlib.sha256()
    for name, data in tensors.items():
        assert by_tensor[name] == hashlib.sha256(data).hexdigest()
        whole.update(data)
    assert by_tensor[None] == whole.hexdigest()
    assert str(lines[0]).startswith("sha256    ") and str(lines[0]).endswith(f":{lines[0].tensor}")

    manifest = tmp_path / "m.manifest"
    manifest.write_text("".join(f"{line}\n" for line in lines))
    parts = split(path, str(tmp_path / "m"), max_tensors=4)
    assert differing(parts[0][0], str(manifest)) == []
    manifest.write_text(manifest.read_text().replace(path, "blobs/sha256-0"))
    assert differing(path, str(manifest)) == []
    assert differing(str(tiny_model(seed=1)), str(manifest)) != []
    manifest.write_text("nothing")
    with pytest.raises(EdgeLLMError, match="no line is a checksum"):
        differing(path, str(manifest))


@pytest.mark.parametrize(
    ("text", "n"), [("2G", 2 * 10**9), ("4.2g", 4_200_000_000), ("300M", 3 * 10**8), ("12", 12)]
)
def test_sizes(text: str, n: int) -> None:
    assert n_bytes_of(text, "--x") == n


@pytest.mark.parametrize("text", ["", "0", "-1G", "2T", "G", "1e3"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(EdgeLLMError, match="--x takes a size such as"):
        n_bytes_of(text, "--x")
