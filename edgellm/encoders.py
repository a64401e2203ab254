"""Text to token ids, by library: `tokenizers` merges byte pairs and word pieces, `sentencepiece`
does the rest. Built from GGUF metadata; the libraries are imported when the first one is built.

Special tokens are cut out of the text first, then each stretch between them is encoded by itself.
No object is changed after it is built, so any number of threads may encode at once.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from edgellm.quant.gguf import GGUF, GGUFError
from edgellm.vocabulary import Kind, TokenizerError, Vocabulary, decode_all

# Read by `tokenizers` at every call: for one short text its thread pool costs more than it gives,
# and having used it, the library warns on the terminal after every fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Fragment = Callable[[str], list[int]]
NO_TOKEN = "\0stretch\0"


class Encoder:
    """encode(text, parse_special) -> ids, without BOS or EOS."""

    def __init__(self, vocabulary: Vocabulary, gguf: GGUF) -> None:
        texts = vocabulary.texts()
        index = dict(zip(texts, range(len(texts)), strict=True))  # of equal texts the last counts
        build = {"bpe": _build_bpe, "wpm": _build_wpm, "spm": _build_spm, "ugm": _build_spm}
        try:
            self._fragment = build[vocabulary.algorithm](vocabulary, gguf, texts, index)
        except (TokenizerError, GGUFError):
            raise
        except BaseException as error:
            # The libraries raise plain Exception and RuntimeError, and a panic of Rust, which is
            # no Exception, for merges they did not expect.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            reason = f"its tokenizer is damaged: {error}"
            raise TokenizerError(f"{vocabulary.path}: {reason}") from None
        special = vocabulary.special_tokens(index)
        strip = _stripping(vocabulary, gguf, special, index)
        visible = [token for token, kind in special.items() if kind == Kind.USER_DEFINED]
        # User-defined tokens are cut out always, control tokens only when the caller trusts the
        # text to hold them.
        self._split_all = Splitter(list(special), texts, strip)
        self._split_visible = Splitter(visible, texts, strip)
        self._control = special.keys() - visible

    def encode(self, text: str, parse_special: bool) -> list[int]:
        splitter = self._split_all if parse_special else self._split_visible
        ids: list[int] = []
        for piece in splitter.split(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._fragment(piece)
        return ids

    def control_spans(self, text: str) -> list[tuple[int, int]]:
        """Where the text holds texts of control tokens."""
        cuts = self._split_all.cuts(text)
        return [(start, end) for token, start, end in cuts if token in self._control]

    def encode_markup(self, text: str, literal: Sequence[tuple[int, int]]) -> list[int]:
        """encode(text, parse_special=True), but what touches a ``literal`` span is plain text.

        For a text without control tokens in those spans the ids are exactly the same: nothing but
        such a token is a cut, so no merge is lost at the border of a span.
        """
        shadow = text  # the same length, with what must not be seen blotted out
        while True:
            cuts = list(self._split_all.cuts(shadow))
            touched = [
                (start, end)
                for token, start, end in cuts
                if token in self._control and any(a < end and start < b for a, b in literal)
            ]
            if not touched:
                break
            for start, end in touched:  # another token may come to light beneath: look again
                shadow = shadow[:start] + "\0" * (end - start) + shadow[end:]
        ids: list[int] = []
        stretch = 0  # where the current stretch of text begins
        for token, start, end in [*cuts, (-1, len(text), len(text))]:
            if token is not None and (token in self._control or token == -1):
                if stretch < start:
                    ids += self.encode(text[stretch:start], False)
                if token != -1:
                    ids.append(token)
                stretch = end
        return ids


class Splitter:
    """Cuts special tokens out of text: leftmost, then longest, as `tokenizers` does.

    The library's own machinery without a model: every stretch comes back as one "unknown" token
    with its offsets.
    """

    def __init__(
        self, special: list[int], texts: list[str], strip: dict[int, dict[str, bool]]
    ) -> None:
        self._ids: dict[int | None, int] = {}
        self._splitter: Any = None
        if not special:
            return
        from tokenizers import AddedToken, Tokenizer, models

        splitter = Tokenizer(models.WordLevel({NO_TOKEN: 0}, unk_token=NO_TOKEN))
        added = {
            token: AddedToken(
                texts[token],
                special=True,
                normalized=False,
                single_word=False,
                **strip.get(token, {}),
            )
            for token in special
        }
        splitter.add_special_tokens(list(added.values()))
        self._splitter = splitter
        self._ids = {splitter.token_to_id(texts[token]): token for token in special}

    def split(self, text: str) -> Iterator[int | str]:
        """Yield token ids and the stretches between them, in order; no empty stretches."""
        for token, start, end in self.cuts(text):
            yield text[start:end] if token is None else token

    def cuts(self, text: str) -> Iterator[tuple[int | None, int, int]]:
        """The same with their places: (token id or None, start, end)."""
        if not text:
            return
        if self._splitter is None:
            yield None, 0, len(text)
            return
        found = self._splitter.encode(text, add_special_tokens=False)
        for inner, (start, end) in zip(found.ids, found.offsets, strict=True):
            yield self._ids.get(inner), start, end


def _stripping(
    vocabulary: Vocabulary, gguf: GGUF, special: dict[int, Kind], index: dict[str, int]
) -> dict[int, dict[str, bool]]:
    """Tokens that swallow white space beside them. The files do not say; llama.cpp goes by name."""
    architecture = gguf.string("general.architecture", "")
    name = gguf.string("general.name", "").lower()
    pre = gguf.string("tokenizer.ggml.pre", "")
    if architecture in ("nomic-bert-moe", "jina-bert-v3") or pre in (
        "jina-v2-de",
        "jina-v2-es",
        "jina-v2-code",
    ):
        mask = index.get("<mask>")
        return {} if mask is None else {mask: {"lstrip": True}}
    if "phi-3" in name or "phi3" in name:
        kept = {index.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
        return {token: {"rstrip": True} for token in special if token not in kept}
    return {}


def _fast(tokenizer: Any) -> Fragment:
    """encode_batch_fast leaves the offsets out, which are most of the work: 1.7 x `encode`."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    return encode


def _build_bpe(
    vocabulary: Vocabulary, gguf: GGUF, texts: list[str], index: dict[str, int]
) -> Fragment:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    lines = decode_all(gguf.strings("tokenizer.ggml.merges", []))
    # A merge is two parts with a space between; a part may itself begin with a space.
    merges = [(line[:cut], line[cut + 1 :]) for line in lines if (cut := line.find(" ", 1)) > 0]
    pre = vocabulary.pre

    def model(pairs: list[tuple[str, str]]) -> Any:
        return models.BPE(
            index, pairs, ignore_merges=pre.ignore_merges, byte_fallback=pre.escaped_spaces
        )

    try:
        bpe = model(merges)
    except Exception:  # the library's own class; checking first would cost as much as building
        bpe = model([(a, b) for a, b in merges if a in index and b in index and a + b in index])
    tokenizer = Tokenizer(bpe)
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.expressions
    ]
    if pre.escaped_spaces:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    else:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return _fast(tokenizer)


def _build_wpm(
    vocabulary: Vocabulary, gguf: GGUF, texts: list[str], index: dict[str, int]
) -> Fragment:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    if vocabulary.unknown is None:
        raise TokenizerError(f"{vocabulary.path}: its tokenizer has no unknown token")
    # GGUF marks the beginning of a word, WordPiece its continuation.
    pieces = {}
    for token, text in enumerate(texts):
        if vocabulary.kinds[token] != Kind.NORMAL or token == vocabulary.unknown:
            pieces[text] = token
        else:
            pieces[text[1:] if text.startswith("▁") else "##" + text] = token
    lowercase = gguf.boolean("tokenizer.ggml.normalizer.lowercase", True)
    # BERT gives up on words of more than 100 characters, which also bounds the time they take: the
    # search for pieces is quadratic in a word's length.
    tokenizer = Tokenizer(
        models.WordPiece(pieces, unk_token=texts[vocabulary.unknown], max_input_chars_per_word=100)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=gguf.boolean("tokenizer.ggml.normalizer.strip_accents", lowercase),
        lowercase=lowercase,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _fast(tokenizer)


def _build_spm(
    vocabulary: Vocabulary, gguf: GGUF, texts: list[str], index: dict[str, int]
) -> Fragment:
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2  # its classes appear at run time
    kinds = vocabulary.kinds.tolist()
    unknown = vocabulary.unknown
    if unknown is None:
        unknown = next((i for i, kind in enumerate(kinds) if kind == Kind.UNKNOWN), 0)
    # The library wants exactly one unknown piece (Phi-3 has 53), all 256 bytes or none, no kind 0.
    all_bytes = kinds.count(Kind.BYTE) == 256
    replaced = {Kind.UNDEFINED: Kind.UNUSED, Kind.UNKNOWN: Kind.CONTROL}
    if not all_bytes:
        replaced[Kind.BYTE] = Kind.UNUSED
    kinds = [int(replaced.get(kind, kind)) for kind in kinds]
    kinds[unknown] = int(Kind.UNKNOWN)

    scores = gguf.numbers("tokenizer.ggml.scores", None)
    values = [0.0] * len(texts) if scores is None else scores.tolist()
    proto = messages.ModelProto()
    for token, (text, score, kind) in enumerate(zip(texts, values, kinds, strict=True)):
        # Texts that the library refuses: one that comes again later, one with a NUL.
        if (index[text] != token and token != unknown) or "\0" in text:
            text, kind = f"[REPLACED_{token}]", int(Kind.UNUSED)
        proto.pieces.add(piece=text, score=score, type=kind)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type = 1 if vocabulary.algorithm == "ugm" else 2  # UNIGRAM, BPE
    trainer.vocab_size = len(texts)
    trainer.byte_fallback = all_bytes
    trainer.unk_id, trainer.unk_piece = unknown, texts[unknown]
    trainer.bos_id = -1 if vocabulary.bos is None else vocabulary.bos
    trainer.eos_id = -1 if vocabulary.eos is None else vocabulary.eos
    trainer.pad_id = -1
    normalizer.name = "identity"
    # Every stretch gets the space, also after a special token: so does llama.cpp.
    normalizer.add_dummy_prefix = vocabulary.space_prefix
    normalizer.remove_extra_whitespaces = gguf.boolean(
        "tokenizer.ggml.remove_extra_whitespaces", False
    )
    normalizer.escape_whitespaces = True
    charsmap = gguf.integers("tokenizer.ggml.precompiled_charsmap", None)
    if charsmap is not None:
        normalizer.precompiled_charsmap = charsmap.astype("u1").tobytes()
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())

    def encode(text: str) -> list[int]:
        ids: list[int] = processor.encode(text)
        return ids

    return encode
