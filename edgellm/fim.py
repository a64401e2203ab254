"""Filling in the middle: a prompt of what stands before a gap and after it, for models that were
trained on it. The control tokens between the parts are the file's, or known by their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.errors import EdgeLLMError
from edgellm.tokenizer import Tokenizer

_TEXTS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
)
# The second name is that of older files.
_KEYS = (("fim_pre", "prefix"), ("fim_suf", "suffix"), ("fim_mid", "middle"))
_FILE_TEXTS = ("<|file_sep|>", "<file_sep>")


class NoFim(EdgeLLMError):
    """The model has no tokens for it."""


@dataclass(frozen=True)
class Fim:
    """The ids of the marks; ``file`` begins another file, where the model has a mark for that."""

    prefix: int
    suffix: int
    middle: int
    file: int | None = None

    def prompt(
        self,
        tokenizer: Tokenizer,
        before: Sequence[int],
        after: str,
        begun: str = "",
        files: Sequence[tuple[str, str]] = (),
    ) -> list[int]:
        """Token ids of a prompt whose answer stands between ``before`` and ``after``, and begins
        with ``begun``. ``files``: names and texts of others that are worth knowing."""
        found = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
        for name, text in files:
            if self.file is None:
                found += tokenizer.encode(f"{text}\n")
            else:
                found += [self.file, *tokenizer.encode(f"{name}\n{text}\n")]
        if files and self.file is not None:
            found += [self.file]
        rest, start = tokenizer.encode(after), tokenizer.encode(begun)
        return [*found, self.prefix, *before, self.suffix, *rest, self.middle, *start]


def find(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> Fim:
    """The marks of a model. NoFim."""
    ids = [_of_file(metadata, names, tokenizer.n_vocab) for names in _KEYS]
    separator = _of_file(metadata, ("fim_sep",), tokenizer.n_vocab)
    for text in _FILE_TEXTS:
        separator = _of_text(tokenizer, text) if separator is None else separator
    if None in ids:
        candidates = ([_of_text(tokenizer, text) for text in texts] for texts in _TEXTS)
        ids = next((found for found in candidates if None not in found), ids)
    prefix, suffix, middle = ids
    if prefix is None or suffix is None or middle is None:
        raise NoFim("This model was not made to fill in the middle: it has no tokens for it.")
    return Fim(prefix, suffix, middle, separator)


def _of_file(metadata: Mapping[str, Any], names: Sequence[str], n_vocab: int) -> int | None:
    for name in names:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(value, int) and 0 <= value < n_vocab:
            return value
    return None


def _of_text(tokenizer: Tokenizer, text: str) -> int | None:
    """The control token that is written so."""
    if tokenizer.control_spans(text) != [(0, len(text))]:
        return None
    return tokenizer.encode(text, parse_special=True)[0]
