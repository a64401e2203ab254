"""A model's vocabulary as its GGUF metadata describes it: token texts, their kinds, special ids.

Some files mark tokens wrongly, so llama.cpp corrects kinds by text, and models rely on it. The same
corrections are made here, with one difference: a token that the file calls NORMAL is never taken
for an end of generation, nor hidden from the output, because of its text. In Qwen2.5 "</s>" is such
a token, and a model that writes HTML would stop in the middle.
"""

import logging
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from edgellm.errors import EdgeLLMError
from edgellm.pretokenizer import PRE, Pre
from edgellm.quant.gguf import GGUF

log = logging.getLogger(__name__)

END_TEXTS = set(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT]"
    " <｜end▁of▁sentence｜> <end_of_utterance> <|return|> <|call|> <|flush|> <|calls|> </s>"
    " <|eom_id|> [EOS] <eos> <turn|> <|tool_response> [e~[".split()
)
# Fill-in-the-middle markers. Padding, repository and file separators end a generation too: what
# follows them would be another file.
FIM_TEXTS = set(
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|>"
    " <|prefix|> <|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF>"
    " <|code_suffix|> <|suffix|> <|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID>"
    " ▁<MID> <|code_middle|> <|middle|>".split()
)
FIM_END_TEXTS = set(
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO>"
    " <reponame> <|file_sep|>".split()
)
CONTROL_TEXTS = END_TEXTS | FIM_TEXTS | FIM_END_TEXTS
# gpt-oss: the reader of a stream needs to see these.
VISIBLE_TEXTS = {"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"}
END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")

# tokenizer.ggml.model -> (algorithm, default bos, eos and unknown ids)
MODELS: dict[str, tuple[str, int | None, int | None, int | None]] = {
    "gpt2": ("bpe", None, None, None),
    "gemma4": ("bpe", None, None, None),
    "llama": ("spm", 1, 2, 0),
    "t5": ("ugm", None, 1, 2),
    "bert": ("wpm", 101, 102, 100),
}


class TokenizerError(EdgeLLMError):
    """The file's tokenizer is of a kind that edgellm does not know, or it has none."""


class Kind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL = (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)  # cut out of text before merging


def decode_all(strings: list[bytes]) -> list[str]:
    """Each as UTF-8, invalid bytes replaced. One call for all where that gives the same: a quarter
    of a million small calls are a good part of a program's start."""
    together = b"\0".join(strings)
    if together.count(b"\0") == len(strings) - 1:
        try:
            return together.decode().split("\0")
        except UnicodeDecodeError:
            pass
    return [string.decode(errors="replace") for string in strings]


class Vocabulary:
    """What the metadata says. Raises TokenizerError for an unknown model or pre.

    tokens: list[bytes], as written; kinds: int32 [n_vocab], corrected. `algorithm` is "none" where
    the file has no tokenizer; then there are no tokens.
    """

    def __init__(self, gguf: GGUF) -> None:
        self.path = gguf.path
        self.n_vocab = 0
        model = gguf.string("tokenizer.ggml.model", "none")
        self.algorithm = "none"
        self.tokens: list[bytes] = []
        self.pre = Pre("gpt2")
        self.bos: int | None = None
        self.eos: int | None = None
        self.unknown: int | None = None
        self.separator: int | None = None
        self.eog: frozenset[int] = frozenset()
        self.add_bos = self.add_eos = self.space_prefix = False
        self.kinds: NDArray[np.int32] = np.zeros(0, np.int32)
        self.end_of_s_is_text = False  # "</s>" is no special token here
        if model in ("none", "no_vocab"):
            return
        if model not in MODELS:
            known = ", ".join(MODELS)
            raise TokenizerError(
                f"{gguf.path}: tokenizer.ggml.model is {model!r}, which is not supported; "
                f"supported: {known}"
            )
        self.algorithm, bos, eos, unknown = MODELS[model]
        self.tokens = gguf.strings("tokenizer.ggml.tokens")
        self.n_vocab = len(self.tokens)
        ones = np.ones(self.n_vocab, np.int64)
        self.kinds = gguf.integers("tokenizer.ggml.token_type", ones).astype(np.int32)
        if self.algorithm == "bpe":
            self.pre = _find_pre(gguf, model)

        self.bos = self._id(gguf, "bos", bos)
        self.eos = self._id(gguf, "eos", eos)
        self.unknown = self._id(gguf, "unknown", unknown)
        if self.algorithm == "wpm":
            self.bos = self._id(gguf, "cls", self.bos)
            # ggml spells the key wrongly; a file that spells it right is not worse for it.
            self.separator = self._id(gguf, "seperator", self._id(gguf, "separator", 102))

        starts = self.algorithm in ("spm", "wpm") or self.pre.add_bos
        self.add_bos = gguf.boolean("tokenizer.ggml.add_bos_token", starts) or model == "gemma4"
        self.add_eos = gguf.boolean("tokenizer.ggml.add_eos_token", self.algorithm == "ugm")
        spaced = self.algorithm in ("spm", "ugm")
        self.space_prefix = spaced and gguf.boolean("tokenizer.ggml.add_space_prefix", True)

        self._correct_kinds(gguf)

    def text(self, token: int) -> str:
        """A token as text; bytes that are not UTF-8 are replaced, an empty one gets a name."""
        return self.tokens[token].decode(errors="replace") or f"[EMPTY_{token}]"

    def texts(self) -> list[str]:
        """text() of every token."""
        texts = decode_all(self.tokens)
        return [text or f"[EMPTY_{token}]" for token, text in enumerate(texts)]

    def _id(self, gguf: GGUF, name: str, default: int | None) -> int | None:
        """A special id; one outside the vocabulary counts as absent: some files have -1."""
        value = gguf.integer(f"tokenizer.ggml.{name}_token_id", default)
        return value if value is not None and 0 <= value < self.n_vocab else None

    def _correct_kinds(self, gguf: GGUF) -> None:
        """Correct `kinds` by text among the tokens that the file itself sets apart, and find the
        ends of generation. Few tokens are set apart, so this is quick."""
        special = {self.text(i): i for i in np.flatnonzero(self.kinds != Kind.NORMAL).tolist()}
        special = {t: i for t, i in special.items() if self.kinds[i] in SPECIAL}
        for text, token in special.items():
            if text in CONTROL_TEXTS:
                self.kinds[token] = Kind.CONTROL
            elif text in VISIBLE_TEXTS:
                self.kinds[token] = Kind.USER_DEFINED
        ends = {special[text] for text in (END_TEXTS | FIM_END_TEXTS) & special.keys()}
        keyed = [self._id(gguf, name, None) for name in END_KEYS]
        ends |= {end for end in (self.eos, *keyed) if end is not None}
        texts = {self.text(token) for token in ends}
        # gpt-oss: <|end|> closes one of several messages of an answer.
        harmony = {"<|return|>", "<|call|>"} <= texts or {"<|calls|>", "<|flush|>"} <= texts
        if harmony and "<|end|>" in special:
            ends.discard(special["<|end|>"])
            self.kinds[special["<|end|>"]] = Kind.USER_DEFINED
        # Gemma 4 and PLaMo: "</s>" is HTML, the end of struck-through text.
        if texts & {"<|tool_response>", "<|plamo:eos|>"}:
            self.end_of_s_is_text = True
            if "</s>" in special:
                ends.discard(special["</s>"])
                self.kinds[special["</s>"]] = Kind.NORMAL
        self.eog = frozenset(ends)

    def special_tokens(self, index: dict[str, int]) -> dict[int, Kind]:
        """id -> kind of every token that is cut out of text, CONTROL ones only on request.

        Here texts alone decide, as in llama.cpp: "</s>" in a rendered prompt is that token.
        index: text -> id of the whole vocabulary.
        """
        special = np.flatnonzero(np.isin(self.kinds, SPECIAL)).tolist()
        found: dict[int, Kind] = {token: Kind(self.kinds[token]) for token in special}
        for text in CONTROL_TEXTS - ({"</s>"} if self.end_of_s_is_text else set()):
            token = index.get(text)
            if token is not None and token not in found:
                found[token] = Kind.CONTROL
        for text in VISIBLE_TEXTS & index.keys():
            found[index[text]] = Kind.USER_DEFINED
        return found


def _find_pre(gguf: GGUF, model: str) -> Pre:
    if model == "gemma4":
        return PRE["gemma4"]
    name = gguf.string("tokenizer.ggml.pre", "default")
    if name == "default":
        log.warning(
            "%s does not say how its tokenizer cuts text (tokenizer.ggml.pre); answers may be "
            "worse than the model could give",
            gguf.path,
        )
    if name not in PRE:
        raise TokenizerError(
            f"{gguf.path}: tokenizer.ggml.pre is {name!r}, which edgellm does not know; "
            "a newer version may"
        )
    return PRE[name]
