"""Text to tokens and back, from GGUF metadata alone.

`Tokenizer` is cheap to make: what only encoding needs is built by the first call of `encode`.
Decoding works on bytes: each token has a piece, and a stream of pieces is UTF-8 that may be cut in
the middle of a character.
"""

import codecs
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Self

from edgellm.encoders import Encoder
from edgellm.quant.gguf import GGUF
from edgellm.vocabulary import Kind, TokenizerError, Vocabulary

__all__ = ["StreamDecoder", "Tokenizer", "TokenizerError"]


def _byte_letters() -> dict[str, int]:
    """The letters that stand for bytes in byte-level vocabularies (GPT-2): a printable byte of
    Latin-1 is itself, the 68 others follow from U+0100 on in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF_LETTER = _byte_letters()


class Tokenizer:
    """Safe to use from many threads. Without a tokenizer in the file (`tokenizer.ggml.model` is
    "none", `has_text` False) everything that concerns text raises TokenizerError, but for streams,
    which are silent, and n_vocab comes from the model.
    """

    def __init__(self, vocabulary: Vocabulary, gguf: GGUF) -> None:
        self._vocabulary = vocabulary
        self._gguf: GGUF | None = gguf  # its metadata, until the encoder is built
        self._lock = threading.Lock()
        self._encoder: Encoder | None = None
        self._pieces: dict[int, bytes] = {}
        self.n_vocab = vocabulary.n_vocab
        if vocabulary.algorithm == "none":
            self.n_vocab = _n_vocab_of_model(gguf)
        self.bos, self.eos, self.eog = vocabulary.bos, vocabulary.eos, vocabulary.eog
        self.add_bos = vocabulary.add_bos and self.bos is not None
        self.add_eos = vocabulary.add_eos and self.eos is not None

    @classmethod
    def from_gguf(cls, source: str | os.PathLike[str] | GGUF) -> Self:
        """The tokenizer of a file or of an open one. Raises GGUFError and TokenizerError."""
        if isinstance(source, GGUF):
            return cls(Vocabulary(source), source)
        with GGUF(source) as gguf:  # its metadata stays readable after it is closed
            return cls(Vocabulary(gguf), gguf)

    def encode(
        self, text: str, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Token ids. add_special: put BOS and EOS where the model wants them. parse_special: let
        the texts of control tokens stand for them (for rendered templates, never for user text).
        Lone surrogates become U+FFFD."""
        ids = self._ready().encode(_valid(text), parse_special)
        if add_special:
            vocabulary = self._vocabulary
            # BERT ends with a separator whatever the file says of EOS.
            end = vocabulary.separator if vocabulary.algorithm == "wpm" else None
            if end is None and self.add_eos:
                end = self.eos
            if self.add_bos and self.bos is not None:
                ids.insert(0, self.bos)
            if end is not None:
                ids.append(end)
        return ids

    def encode_markup(self, text: str, literal: Sequence[tuple[int, int]]) -> list[int]:
        """encode(text, parse_special=True) in which nothing that touches one of the ``literal``
        spans (start, end) is taken for a control token. No BOS or EOS is added."""
        return self._ready().encode_markup(_valid(text), literal)

    def control_spans(self, text: str) -> list[tuple[int, int]]:
        """(start, end) of every text of a control token in the text."""
        return self._ready().control_spans(_valid(text))

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD. special: show
        control tokens. The space that SentencePiece puts before a text is taken off again; use
        `stream` for tokens that continue a text."""
        text = b"".join([self.piece(token, special) for token in ids]).decode(errors="replace")
        return text[1:] if self._vocabulary.space_prefix and text.startswith(" ") else text

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of one token. Control and unknown tokens are empty unless `special`; unused
        ones always. IndexError for an id that is not in the vocabulary."""
        if not special:
            known = self._pieces.get(token)
            if known is None:
                known = self._pieces[token] = self._piece(token, special)
            return known
        return self._piece(token, special)

    @property
    def has_text(self) -> bool:
        """Whether the file has a tokenizer."""
        return self._vocabulary.algorithm != "none"

    def stream(self, special: bool = False) -> "StreamDecoder":
        """A decoder for tokens that arrive one by one."""
        return StreamDecoder(self, special)

    def token_text(self, token: int) -> str:
        """The token as the vocabulary writes it ("Ġthe", "▁the", "<0x0A>")."""
        self._check(token)
        return self._vocabulary.text(token)

    def is_special(self, token: int) -> bool:
        """True for control and unknown tokens, which `decode` hides."""
        self._check(token)
        return int(self._vocabulary.kinds[token]) in (Kind.CONTROL, Kind.UNKNOWN)

    def _piece(self, token: int, special: bool) -> bytes:
        self._check(token)
        vocabulary = self._vocabulary
        kind = int(vocabulary.kinds[token])  # comparing numpy's numbers is slow
        if kind == Kind.UNUSED:
            return b""
        if kind == Kind.BYTE:
            return bytes([int(vocabulary.tokens[token][3:5], 16)])  # <0x0A>, checked by the reader
        text = vocabulary.text(token)
        if kind in (Kind.CONTROL, Kind.UNKNOWN):
            return text.encode() if special else b""
        if kind == Kind.USER_DEFINED:
            return text.encode()
        if vocabulary.algorithm == "bpe" and not vocabulary.pre.escaped_spaces:
            try:
                return bytes([BYTE_OF_LETTER[letter] for letter in text])
            except KeyError:  # some files hold plain text in places (Command R)
                return text.encode()
        return text.replace("▁", " ").encode()

    def _ready(self) -> Encoder:
        encoder = self._encoder
        if encoder is None:
            with self._lock:
                encoder = self._encoder
                if encoder is None:
                    self._need_text()
                    assert self._gguf is not None
                    encoder = self._encoder = Encoder(self._vocabulary, self._gguf)
                    self._gguf = None
        return encoder

    def _check(self, token: int) -> None:
        self._need_text()
        if not 0 <= token < self.n_vocab:
            raise IndexError(f"token {token} is not in the vocabulary of {self.n_vocab}")

    def _need_text(self) -> None:
        if not self.has_text:
            raise TokenizerError(
                f"{self._vocabulary.path} has no tokenizer; give and take token ids"
            )


class StreamDecoder:
    """Tokens in, text out, never half a character: what `push` and `flush` return, joined, is the
    decoded text of all pieces."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token completes, possibly none."""
        if not self._tokenizer.has_text:
            return ""
        return self._decoder.decode(self._tokenizer.piece(token, self._special))

    def flush(self) -> str:
        """What is left of an unfinished character, as U+FFFD; the decoder starts afresh."""
        rest = self._decoder.decode(b"", True)
        self._decoder.reset()
        return rest


def _valid(text: str) -> str:
    """The text without lone surrogates, which JSON can carry and UTF-8 cannot; pairs are joined."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _n_vocab_of_model(gguf: GGUF) -> int:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is not None:
        return embedding.rows
    architecture = gguf.string("general.architecture", "")
    return gguf.integer(f"{architecture}.vocab_size", 0, low=0)
