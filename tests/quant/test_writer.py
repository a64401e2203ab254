"""What is written is read by gguf-py and by us as it was given; a file is whole or not there."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.quant import by_name
from edgellm.quant.gguf import GGUF, GGUFError
from edgellm.quant.values import encode
from edgellm.quant.writer import NewTensor, Writer

F32, Q8_0 = by_name("f32"), by_name("q8_0")
METADATA = {"general.architecture": encode("llama")}

integers = st.integers(-(1 << 63), (1 << 64) - 1)
floats = st.floats(width=32, allow_nan=False)
texts = st.lists(st.text(max_size=8), max_size=5)
arrays = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=5).map(
    lambda values: np.array(values, np.int32)
)
VALUES = st.one_of(integers, floats, st.booleans(), st.text(max_size=20), texts, arrays)


def read_by_gguf(path: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(path)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(VALUES, max_size=6), rows=st.lists(st.integers(1, 5), max_size=5),
       cut=st.integers(1, 100), alignment=st.sampled_from([8, 32, 64]))  # fmt: skip
def test_any_file(
    tmp_path_factory: Any, values: list[Any], rows: list[int], cut: int, alignment: int
) -> None:
    path = tmp_path_factory.mktemp("written") / "m.gguf"
    metadata = METADATA | {f"key.{i}": encode(value) for i, value in enumerate(values)}
    metadata["general.alignment"] = encode(alignment)
    rng = np.random.default_rng(len(rows))
    data = [rng.standard_normal((n, 32)).astype(np.float32) for n in rows]
    kinds = [Q8_0 if n % 2 else F32 for n in rows]
    tensors = [
        NewTensor(f"t{i}.weight", (32, n), kind)
        for i, (n, kind) in enumerate(zip(rows, kinds, strict=True))
    ]
    stored = [kind.quantize(x) if kind is Q8_0 else x for x, kind in zip(data, kinds, strict=True)]
    with Writer(path, metadata, tensors) as out:
        everything = b"".join(x.tobytes() for x in stored)
        for start in range(0, len(everything), cut):
            out.write(everything[start : start + cut])
    assert os.listdir(path.parent) == ["m.gguf"]

    reader = read_by_gguf(path)
    for i, value in enumerate(values):
        found = reader.fields[f"key.{i}"].contents()
        want = value.tolist() if isinstance(value, np.ndarray) else value
        assert found == want, (found, want)
    for tensor, raw in zip(reader.tensors, stored, strict=True):
        np.testing.assert_array_equal(
            tensor.data.view(np.uint8).ravel(), raw.view(np.uint8).ravel()
        )

    with GGUF(path) as ours:
        assert list(ours.tensors) == [t.name for t in tensors]
        assert ours.encoded_metadata() == metadata  # so copies keep every byte of the metadata


def test_values_of_a_kind() -> None:
    assert encode(1, "uint64")[0] == 10 and len(encode(1, "uint64")) == 12
    with pytest.raises(ValueError, match="300 is no uint8"):
        encode(300, "uint8")
    with pytest.raises(ValueError, match="no arrays of complex"):
        encode(np.zeros(2, np.complex64))


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("mine")
    with pytest.raises(GGUFError, match="exists; use --force"):
        Writer(path, METADATA, [])
    with Writer(path, METADATA, [], force=True):
        assert path.read_text() == "mine"
    with GGUF(path) as model:
        assert model.architecture == "llama"


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    tensor = NewTensor("a", (4,), F32)
    with pytest.raises(KeyError), Writer(tmp_path / "m.gguf", METADATA, [tensor]) as out:
        out.write(np.zeros(2, np.float32))
        raise KeyError
    with pytest.raises(ValueError, match="tensor a was not written whole"):
        with Writer(tmp_path / "m.gguf", METADATA, [tensor]) as out:
            out.write(np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="more than its tensors hold"):
        with Writer(tmp_path / "m.gguf", METADATA, [tensor]) as out:
            out.write(np.zeros(5, np.float32))
    assert not any(tmp_path.iterdir())


def test_two_writers(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with Writer(path, METADATA, []):
        other = f"""
from edgellm.quant.writer import Writer
try:
    Writer({str(path)!r}, {{}}, [])
except ValueError as error:
    print(error)
"""
        said = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
        assert "is being written by another process" in said.stdout
    assert path.exists()


def test_a_disk_that_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read back differs from what was written: no file gets the name."""
    from edgellm.quant import files

    true = files.fill

    def lying(fd: int, out: memoryview, offset: int) -> int:
        n = true(fd, out, offset)
        if n:
            out[n // 2] ^= 1
        return n

    monkeypatch.setattr(files, "fill", lying)
    with pytest.raises(GGUFError, match="read back otherwise"):
        with Writer(tmp_path / "m.gguf", METADATA, []):
            pass
    assert not any(tmp_path.iterdir())


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(GGUFError, match="cannot be written: No space left"):
        Writer(tmp_path / "m.gguf", METADATA, [])
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["missing", ""])
def test_a_bad_target(tmp_path: Path, folder: str) -> None:
    path = tmp_path / folder / "m.gguf" if folder else tmp_path
    with pytest.raises(GGUFError, match="cannot be written|is a directory"):
        Writer(path, METADATA, [])


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    """A pipe here; as root, /dev/null would be gone for all."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    (tmp_path / "link").symlink_to(path)
    for target in (path, tmp_path / "link"):
        with pytest.raises(GGUFError, match="is a device or pipe; give the path of a file"):
            Writer(target, METADATA, [], force=True)
    assert path.is_fifo() and len(list(tmp_path.iterdir())) == 2
