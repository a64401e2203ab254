"""Tokenizers: small ones made here, GPT-2's from tests/data, and the full vectors where they are.

EDGELLM_VECTORS names the folder that holds `vectors/`; EDGELLM_TEST_MODELS the one with real
models. Without them those tests are skipped.
"""

import json
import lzma
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.pretokenizer import FAMILIES, PRE
from edgellm.quant.gguf import GGUF
from edgellm.tokenizer import BYTE_OF_LETTER, Tokenizer, TokenizerError

DATA = Path(__file__).parents[1] / "data" / "tokenizer"
VECTORS = Path(os.environ.get("EDGELLM_VECTORS", "absent")) / "vectors" / "tokenizer"
MODELS = Path(
    os.environ.get("EDGELLM_TEST_MODELS", Path.home() / ".cache" / "edgellm" / "test-models")
)
needs_vectors = pytest.mark.skipif(not VECTORS.is_dir(), reason="EDGELLM_VECTORS is not set")

LETTER = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
Make = Callable[..., Path]


def letters(text: str) -> str:
    """Text as a byte-level vocabulary spells it."""
    return "".join(LETTER[byte] for byte in text.encode())


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make(model, [(text, kind)], merges=, scores=, **metadata) -> path of a vocabulary file."""

    def build(
        model: str,
        tokens: list[tuple[Any, int]],
        merges: list[str] | None = None,
        scores: list[float] | None = None,
        **metadata: Any,
    ) -> Path:
        path = tmp_path_factory.mktemp("vocabulary") / "v.gguf"
        writer = gguf.GGUFWriter(path, metadata.pop("architecture", "llama"))
        writer.add_tokenizer_model(model)
        if tokens:
            writer.add_token_list([text for text, _ in tokens])
            writer.add_token_types([kind for _, kind in tokens])
        if merges is not None:
            writer.add_token_merges(merges)
        if scores is not None:
            writer.add_token_scores(scores)
        for key, value in metadata.items():
            key = "tokenizer.ggml." + key.replace("__", ".")
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return build


SPECIALS = [
    ("<|im_start|>", CONTROL),
    ("<|im_end|>", CONTROL),
    ("<tool_call>", USER),
    ("</s>", NORMAL),
    ("", NORMAL),
    ("gone", UNUSED),
]
IM_START, IM_END, TOOL_CALL, END_OF_S = 262, 263, 264, 265


def byte_level(make: Make, **metadata: Any) -> Path:
    """256 letters, the merges of "hello", " hell", and special tokens."""
    words = ["he", "ll", "hell", "hello", letters(" h"), "ab"]
    merges = ["h e", "l l", "he ll", "hell o", f"{letters(' ')} h", "a b"]
    tokens = [(LETTER[byte], NORMAL) for byte in range(256)] + [(w, NORMAL) for w in words]
    metadata = {"pre": "qwen2", "eos_token_id": IM_END} | metadata
    return make("gpt2", tokens + SPECIALS, merges, **metadata)


@pytest.fixture(scope="session")
def small(make: Make) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level(make))


# --- byte-level vocabularies -----------------------------------------------------------------


def test_merges_and_special_tokens(small: Tokenizer) -> None:
    hello = 259
    assert small.n_vocab == 268 and small.encode("") == []
    assert small.encode("hello") == [hello]
    assert small.encode("hello hello")[0] == hello
    # User-defined tokens are always cut out, control tokens only on request.
    text = "<|im_start|>hello<tool_call>hello<|im_end|>"
    assert small.encode(text, parse_special=True) == [IM_START, hello, TOOL_CALL, hello, IM_END]
    plain = small.encode(text)
    assert TOOL_CALL in plain and IM_START not in plain and IM_END not in plain
    assert small.decode(plain) == text
    assert small.decode(small.encode(text, parse_special=True)) == "hello<tool_call>hello"
    assert small.decode(small.encode(text, parse_special=True), special=True) == text


def test_pieces(small: Tokenizer) -> None:
    assert small.piece(259) == b"hello" and small.piece(260) == b" h" and small.piece(0) == b"\0"
    assert small.piece(IM_END) == b"" and small.piece(IM_END, special=True) == b"<|im_end|>"
    assert small.piece(TOOL_CALL) == b"<tool_call>"
    assert small.piece(267, special=True) == b""
    assert small.token_text(260) == "Ġh" and small.token_text(266) == "[EMPTY_266]"
    assert small.is_special(IM_END) and not small.is_special(TOOL_CALL)
    for token in (-1, small.n_vocab):
        with pytest.raises(IndexError, match="is not in the vocabulary of 268"):
            small.piece(token)


def test_an_ordinary_token_never_ends_a_generation(small: Tokenizer) -> None:
    """In Qwen2.5 "</s>" is one; a model that writes HTML must be able to go on."""
    assert small.eog == {IM_END} and small.eos == IM_END and small.bos is None
    assert small.encode("</s>", parse_special=True) == [END_OF_S]
    assert small.encode("</s>") != [END_OF_S]
    assert small.decode([END_OF_S]) == "</s>" and not small.is_special(END_OF_S)


def test_ends_of_generation(make: Make) -> None:
    texts = ["<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|start|>", "<|endoftext|>"]
    tokens = [(LETTER[byte], NORMAL) for byte in range(256)] + [(t, CONTROL) for t in texts]
    path = make("gpt2", tokens, [], pre="gpt-4o", eos_token_id=257, eot_token_id=4_000_000_000)
    harmony = Tokenizer.from_gguf(path)
    assert harmony.eog == {257, 258, 261}  # <|end|> closes a message, not the answer
    assert harmony.decode([256, 259, 260, 257]) == "<|end|><|channel|><|start|>"
    assert harmony.encode("<|end|>") == [256]  # user-defined now, so always cut out

    tokens[256:] = [("</s>", USER), ("<|tool_response>", USER), ("<eos>", CONTROL)]
    gemma = Tokenizer.from_gguf(make("gpt2", tokens, [], pre="gpt-2", eos_token_id=258))
    assert gemma.eog == {257, 258}
    assert gemma.encode("</s>", parse_special=True) != [256] and gemma.decode([256]) == "</s>"


def test_bos_and_eos(make: Make) -> None:
    keys = {"bos_token_id": IM_START, "add_bos_token": True, "add_eos_token": True}
    both = Tokenizer.from_gguf(byte_level(make, **keys))
    assert (both.bos, both.eos, both.add_bos, both.add_eos) == (IM_START, IM_END, True, True)
    assert both.encode("hello", add_special=True) == [IM_START, 259, IM_END]
    assert both.encode("", add_special=True) == [IM_START, IM_END]
    assert both.encode("hello") == [259]
    llama = Tokenizer.from_gguf(byte_level(make, pre="llama-bpe", bos_token_id=IM_START))
    assert llama.add_bos and llama.encode("hello", add_special=True) == [IM_START, 259]
    lost = Tokenizer.from_gguf(byte_level(make, pre="llama-bpe", bos_token_id=99_999))
    assert lost.bos is None and not lost.add_bos
    assert lost.encode("hello", add_special=True) == [259]


def test_merges_of_unknown_parts_are_dropped(make: Make) -> None:
    tokens = [(LETTER[byte], NORMAL) for byte in range(256)] + [("ab", NORMAL)]
    path = make("gpt2", tokens, ["x yz", "a b", "a c", "nospace"], pre="gpt-2")
    assert Tokenizer.from_gguf(path).encode("ab") == [256]


def test_lone_surrogates(small: Tokenizer) -> None:
    assert small.decode(small.encode("a\ud83db")) == "a\ufffdb"
    assert small.decode(small.encode("\ud83d\ude00")) == "😀"


@settings(max_examples=300, deadline=None)
@given(text=st.text(), parse=st.booleans())
def test_round_trip(small: Tokenizer, text: str, parse: bool) -> None:
    ids = small.encode(text, parse_special=parse)
    assert small.decode(ids, special=True) == text
    stream = small.stream(special=True)
    assert "".join([*map(stream.push, ids), stream.flush()]) == text


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 267)), special=st.booleans())
def test_stream_is_the_whole_decoded_in_parts(
    small: Tokenizer, ids: list[int], special: bool
) -> None:
    stream = small.stream(special)
    parts = [stream.push(token) for token in ids]
    assert "".join(parts) + stream.flush() == small.decode(ids, special)
    assert "".join(map(stream.push, ids)) + stream.flush() == small.decode(ids, special)


def test_stream_never_shows_half_a_character(small: Tokenizer) -> None:
    stream = small.stream()
    shown = [stream.push(byte) for byte in "é😀".encode()]
    assert shown == ["", "é", "", "", "", "😀"] and stream.flush() == ""
    assert stream.push("😀".encode()[0]) == "" and stream.flush() == "\ufffd"
    assert stream.push(ord("a")) == "a"


def test_many_threads_with_both_flags(make: Make) -> None:
    """Nothing is shared that a call changes; the encoder is built once."""
    tokenizer = Tokenizer.from_gguf(byte_level(make))
    text = "hello<|im_end|>" * 20
    want = {True: [259, IM_END] * 20, False: Tokenizer.from_gguf(byte_level(make)).encode(text)}
    wrong: list[bool] = []

    def work(parse: bool) -> None:
        for _ in range(50):
            if tokenizer.encode(text, parse_special=parse) != want[parse]:
                wrong.append(parse)

    threads = [threading.Thread(target=work, args=(n % 2 == 0,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- other kinds -----------------------------------------------------------------------------


def pieces(*texts: str) -> list[tuple[str, int]]:
    head = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    return head + [(f"<0x{n:02X}>", BYTE) for n in range(256)] + [(t, NORMAL) for t in texts]


def spm(make: Make, **metadata: Any) -> Tokenizer:
    tokens = pieces("▁", "h", "i", "▁h", "▁hi") + [("<mark>", USER)]
    scores = [0.0] * 259 + [-5.0, -6.0, -7.0, -2.0, -1.0, 0.0]
    return Tokenizer.from_gguf(make("llama", tokens, scores=scores, **metadata))


def test_sentencepiece(make: Make) -> None:
    tokenizer = spm(make)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eog) == (1, 2, {2})
    assert tokenizer.encode("hi", add_special=True) == [1, 263]
    assert tokenizer.encode("hié") == [263, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.piece(263) == b" hi" and tokenizer.piece(3 + 10) == b"\n"
    assert tokenizer.decode([1, 263, 263]) == "hi hi"
    stream = tokenizer.stream()
    assert "".join(map(stream.push, [263, 3 + 0xC3, 3 + 0xA9])) == " hié"
    # Each stretch after a special token gets the space as well.
    assert tokenizer.encode("hi<mark>hi</s>hi", parse_special=True) == [263, 264, 263, 2, 263]
    bare = spm(make, add_space_prefix=False)
    assert bare.encode("hi") == [260, 261] and bare.decode([263]) == " hi"


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_sentencepiece_round_trip(make: Make, text: str) -> None:
    tokenizer = _cached_spm(make)
    # U+2581 is how a space is written; SentencePiece cannot tell the two apart.
    want = text.replace("▁", " ")
    assert tokenizer.decode(tokenizer.encode(text)) == want


_kept: dict[str, Tokenizer] = {}


def _cached_spm(make: Make) -> Tokenizer:
    if "spm" not in _kept:
        _kept["spm"] = spm(make)
    return _kept["spm"]


def test_sentencepiece_without_all_bytes_or_with_two_unknowns(make: Make) -> None:
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<pad>", UNKNOWN)]
    tokens += [("<0x0A>", BYTE), ("▁", NORMAL), ("a", NORMAL)]
    tokenizer = Tokenizer.from_gguf(make("llama", tokens, scores=[0.0] * 7))
    assert tokenizer.encode("ab") == [5, 6, 0]


def test_unigram(make: Make) -> None:
    tokens = [("<pad>", CONTROL), ("</s>", CONTROL), ("<unk>", UNKNOWN)]
    tokens += [("▁", NORMAL), ("a", NORMAL), ("b", NORMAL), ("▁ab", NORMAL)]
    scores = [0.0, 0.0, 0.0, -2.0, -3.0, -3.0, -4.0]
    t5 = Tokenizer.from_gguf(make("t5", tokens, scores=scores, remove_extra_whitespaces=True))
    assert t5.encode("ab  a", add_special=True) == [6, 3, 4, 1]
    assert t5.decode([6, 3, 4, 1]) == "ab a"


def test_wordpiece(make: Make) -> None:
    texts = [("[UNK]", CONTROL), ("[CLS]", CONTROL), ("[SEP]", CONTROL), ("▁hello", NORMAL)]
    texts += [("▁he", NORMAL), ("y", NORMAL), ("▁,", NORMAL)]
    ids = {"unknown_token_id": 0, "cls_token_id": 1, "seperator_token_id": 2}
    bert = Tokenizer.from_gguf(make("bert", texts, **ids))
    assert bert.encode("Héllo, hey", add_special=True) == [1, 3, 6, 4, 5, 2]
    assert bert.encode("zzz[SEP]", parse_special=True) == [0, 2]
    cased = Tokenizer.from_gguf(make("bert", texts, normalizer__lowercase=False, **ids))
    assert cased.encode("Hello") == [0]
    start = time.thread_time()
    assert bert.encode("he" * 500_000) == [0]  # BERT's own limit is 100 characters
    assert time.thread_time() - start < 2


def test_escaped_spaces(make: Make) -> None:
    """Gemma 4: byte pairs over text with U+2581, bytes for the rest."""
    tokens = pieces("▁", "h", "i", "hi", "▁hi")
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    gemma = Tokenizer.from_gguf(make("gemma4", tokens, ["h i", "▁ hi"], **ids))
    assert gemma.encode("hi hié", add_special=True) == [1, 262, 263, 3 + 0xC3, 3 + 0xA9]
    assert gemma.decode([1, 262, 263]) == "hi hi"


# Short words from few letters, so that texts repeat, and merges meet them.
WORDS = st.text(st.sampled_from(["a", "b", "Ġ", "▁", " ", "é", "\0", "<", "|"]), max_size=4)


@settings(max_examples=200, deadline=None)
@given(
    model=st.sampled_from(["gpt2", "llama", "bert", "t5", "gemma4"]),
    tokens=st.lists(st.tuples(WORDS, st.sampled_from([0, 1, 1, 1, 2, 3, 4, 5])), min_size=1),
    merges=st.lists(st.builds("{} {}".format, WORDS, WORDS) | WORDS, min_size=1),
    ids=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    score=st.floats(width=32),
    text=WORDS | st.text(),
)
def test_any_vocabulary(
    make: Make,
    model: str,
    tokens: list[tuple[str, int]],
    merges: list[str],
    ids: list[int],
    score: float,
    text: str,
) -> None:
    """A damaged vocabulary is refused by TokenizerError or gives ids within itself."""
    names = ("bos_token_id", "eos_token_id", "unknown_token_id")
    keys = dict(zip(names, ids, strict=True))
    path = make(model, tokens, merges, [score] * len(tokens), pre="gpt-2", **keys)
    try:
        tokenizer = Tokenizer.from_gguf(path)
        got = tokenizer.encode(text, add_special=True, parse_special=True)
    except TokenizerError:
        return
    assert all(0 <= token < tokenizer.n_vocab for token in got)
    tokenizer.decode(got)


def test_no_tokenizer(make: Make) -> None:
    none = Tokenizer.from_gguf(make("none", []))
    assert none.eog == frozenset() and none.bos is None and none.n_vocab == 0
    for use in (
        lambda: none.encode("a"),
        lambda: none.decode([1]),
        lambda: none.token_text(0),
    ):
        with pytest.raises(TokenizerError, match="v.gguf has no tokenizer; give and take token"):
            use()


def test_unknown_kinds(make: Make) -> None:
    with pytest.raises(TokenizerError, match="tokenizer.ggml.model is 'rwkv', .* gpt2, gemma4"):
        Tokenizer.from_gguf(make("rwkv", [("a", NORMAL)]))
    with pytest.raises(TokenizerError, match="tokenizer.ggml.pre is 'novel'"):
        Tokenizer.from_gguf(byte_level(make, pre="novel"))


def test_missing_pre_is_warned_of(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    Tokenizer.from_gguf(byte_level(make, pre="default"))
    assert "tokenizer.ggml.pre" in caplog.text


# --- how text is cut -------------------------------------------------------------------------


def cut(expressions: tuple[str, ...], text: str) -> list[str]:
    from tokenizers import Regex, pre_tokenizers

    steps = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    return [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


@pytest.mark.parametrize("family", FAMILIES)
def test_cutting_loses_nothing(family: str) -> None:
    text = "It's 12345678 \t\n\n naïve Ünïcödé 你好世界 안녕 ½ x=1;\r\n  \u3000--- don'T «é» 3.14 "
    assert "".join(cut(FAMILIES[family], text)) == text


def test_every_pre_has_a_family() -> None:
    assert {pre.family for pre in PRE.values()} == set(FAMILIES)


def test_known_cuts() -> None:
    assert cut(FAMILIES["cl100k"], "It's 12345 ok\n\nx") == [
        "It",
        "'s",
        " ",
        "123",
        "45",
        " ok",
    ] + [
        "\n\n",
        "x",
    ]
    assert cut(FAMILIES["qwen2"], "a 12") == ["a", " ", "1", "2"]
    assert cut(FAMILIES["o200k"], "camelCase") == ["camel", "Case"]
    assert cut(FAMILIES["tiny_aya"], "1234567 12") == ["1", "234", "567", " ", "12"]
    assert cut(FAMILIES["superbpe"], "1234567") == ["1", "234", "567"]


# As the models' authors wrote them; quadratic in the length of a run of digits.
WRITTEN = {
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", FAMILIES["o200k"][0]),
    "afmoe": (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", *FAMILIES["afmoe"][-2:]),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
}


@settings(max_examples=500, deadline=None)
@given(text=st.text(st.sampled_from("0123456789٣½Ⅳ a_é-.,\n'你")))
@pytest.mark.parametrize("family", WRITTEN)
def test_runs_of_digits_are_cut_as_written(family: str, text: str) -> None:
    assert cut(FAMILIES[family], text) == cut(WRITTEN[family], text)


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize("around", ["{}", "a{}b", "_{}_", " {} ", "é{}.{}", "{}-", "{}\n{} {}x"])
def test_long_runs_of_digits_are_cut_as_written(family: str, around: str) -> None:
    for length in (*range(297, 305), *range(598, 604), 899, 900, 901, 1234):
        text = around.replace("{}", ("1234567890" * 130)[:length])
        assert cut(FAMILIES[family], text) == cut(WRITTEN[family], text)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", ["7" * 100_000, "7" * 100_000 + "x", "a" * 100_000, " " * 100_000])
def test_no_family_is_quadratic(family: str, text: str) -> None:
    start = time.thread_time()
    assert "".join(cut(FAMILIES[family], text)) == text
    assert time.thread_time() - start < 3


# --- GPT-2, from tests/data ------------------------------------------------------------------


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("gpt-2") / "gpt-2.gguf"
    path.write_bytes(lzma.decompress((DATA / "gpt-2.gguf.xz").read_bytes()))
    return Tokenizer.from_gguf(path)


def inp_out(stem: Path) -> Iterator[tuple[str, list[int]]]:
    # newline="": the texts contain \r.
    with open(f"{stem}.inp", encoding="utf-8", newline="") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{stem}.out").read_text().split("\n")
    for text, line in zip(texts, lines, strict=False):
        yield text, [int(token) for token in line.split()]


def test_gpt2(gpt2: Tokenizer) -> None:
    rows = list(inp_out(DATA / "gpt-2"))
    assert len(rows) == 47
    for text, ids in rows:
        assert gpt2.encode(text) == ids
        assert gpt2.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_gpt2_round_trip(gpt2: Tokenizer, text: str) -> None:
    assert gpt2.decode(gpt2.encode(text)) == text


def test_gpt2_is_quick(gpt2: Tokenizer) -> None:
    gpt2.encode("x")
    source = Path(__file__).read_text()[:16_000] * 16
    for text in (source, "A" * 250_000):
        start = time.thread_time()
        assert gpt2.decode(gpt2.encode(text)) == text
        assert time.thread_time() - start < 2


# --- full vectors ----------------------------------------------------------------------------


def rows(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def check(tokenizer: Tokenizer, cases: list[dict[str, Any]]) -> None:
    wrong = []
    for row in cases:
        got = tokenizer.encode(
            row["text"], row.get("add_special", False), row.get("parse_special", False)
        )
        if got != row["ids"]:
            wrong.append((row["text"], row["ids"], got))
    assert not wrong, f"{len(wrong)} of {len(cases)}, first: {wrong[0]}"


def vocabularies() -> list[str]:
    return sorted(path.name for path in VECTORS.glob("*.gguf")) or ["absent"]


@needs_vectors
@pytest.mark.parametrize("name", vocabularies())
def test_vectors(name: str) -> None:
    tokenizer = Tokenizer.from_gguf(VECTORS / name)
    check(tokenizer, [dict(text=text, ids=ids) for text, ids in inp_out(VECTORS / name)])
    check(tokenizer, rows(VECTORS / f"{name}.dev.jsonl"))


@needs_vectors
@pytest.mark.real
@pytest.mark.parametrize(
    "model, vectors",
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf", "qwen2.5-coder-0.5b.gguf"),
    ],
)
def test_real_models(model: str, vectors: str) -> None:
    if not (MODELS / model).exists():
        pytest.skip(f"{model} is not in EDGELLM_TEST_MODELS")
    tokenizer = Tokenizer.from_gguf(MODELS / model)
    check(tokenizer, rows(VECTORS / f"{vectors}.dev.jsonl"))
    divergent = rows(VECTORS / "divergences.jsonl")
    check(tokenizer, [row | {"ids": row["ids_hf"]} for row in divergent if row["vocab"] == model])


def with_pre(path: Path, pre: str) -> Tokenizer:
    with GGUF(path) as model:
        model.metadata = {**model.metadata, "tokenizer.ggml.pre": pre}
        return Tokenizer.from_gguf(model)


def by_pre(name: str) -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = {}
    if VECTORS.is_dir():
        for row in rows(VECTORS / name):
            grouped.setdefault(row.get("pre", ""), []).append(row)
    return grouped or {"absent": []}


@needs_vectors
@pytest.mark.slow
@pytest.mark.parametrize("pre", by_pre("pre-families.dev.jsonl"))
def test_families(pre: str) -> None:
    tokenizer = with_pre(VECTORS / "ggml-vocab-qwen2.gguf", pre)
    check(tokenizer, by_pre("pre-families.dev.jsonl")[pre])
    divergent = [row for row in rows(VECTORS / "divergences.jsonl") if row.get("pre") == pre]
    check(tokenizer, [row | {"ids": row["ids_hf"]} for row in divergent])


@needs_vectors
def test_divergences_of_bert() -> None:
    """llama.cpp's word pieces differ from BERT's own definition, which we follow."""
    name = "ggml-vocab-bert-bge.gguf"
    divergent = [row for row in rows(VECTORS / "divergences.jsonl") if row["vocab"] == name]
    assert divergent
    check(
        Tokenizer.from_gguf(VECTORS / name),
        [row | {"ids": row["ids_hf"]} for row in divergent],
    )


@pytest.fixture(scope="session")
def dense(make: Make) -> Path:
    """Every pair of bytes merges, in a random order, so nearly any wrong cut shows."""
    order = list(range(65536))
    random.Random(7).shuffle(order)
    pairs = [(LETTER[k >> 8], LETTER[k & 255]) for k in order]
    tokens = [(LETTER[byte], NORMAL) for byte in range(256)]
    tokens += [(a + b, NORMAL) for a, b in pairs] + [("<|x|>", CONTROL)]
    last = len(tokens) - 1
    merges = [f"{a} {b}" for a, b in pairs]
    return make("gpt2", tokens, merges, pre="qwen2", bos_token_id=last, eos_token_id=last)


@needs_vectors
@pytest.mark.slow
@pytest.mark.parametrize("pre", by_pre("dense-split.dev.jsonl"))
def test_dense(dense: Path, pre: str) -> None:
    cases = [row for row in by_pre("dense-split.dev.jsonl")[pre] if row["agrees_with_llamacpp"]]
    check(with_pre(dense, pre), cases)
