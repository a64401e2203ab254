"""Byte-pair vocabularies of tokenizer.json: over letters for bytes (GPT-2), or over text with marks
for spaces and tokens for single bytes, as SentencePiece models come out in that form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from edgellm.convert.errors import ConvertError
from edgellm.convert.pre import pre_name
from edgellm.convert.vocabulary import ADDED_SCORE, Tokens, by_id
from edgellm.vocabulary import Kind

_BYTE = re.compile(rb"<0x[0-9A-F]{2}>")


def is_byte_level(tokenizer: dict[str, Any]) -> bool:
    """Whether tokens are spelled in letters that stand for bytes."""
    step = tokenizer.get("pre_tokenizer") or {}
    steps = step.get("pretokenizers", [step])
    return any(isinstance(s, dict) and s.get("type") == "ByteLevel" for s in steps)


def byte_level(path: Path, tokenizer: dict[str, Any]) -> Tokens:
    """tokenizer.ggml.model "gpt2"."""
    _check(path, tokenizer)
    normalizer = tokenizer.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":  # runners do without NFC
        raise ConvertError(f"{path}: its normalizer {normalizer.get('type')} has no name in GGUF.")
    texts, kinds = by_id(path, tokenizer["model"]["vocab"])
    merges = [f"{a} {b}" for a, b in _merges(path, tokenizer)]
    more = {"pre": pre_name(path, tokenizer), "merges": merges}
    return Tokens(path, "gpt2", texts, kinds, more=more)


def spaces_marked(path: Path, tokenizer: dict[str, Any]) -> Tokens:
    """tokenizer.ggml.model "llama": its scores are the places of merges, best first, which choose
    the same merges as the list does."""
    _check(path, tokenizer)
    model = tokenizer["model"]
    if not model.get("byte_fallback"):
        raise ConvertError(
            f"{path}: its tokens are neither letters for bytes nor have byte tokens."
        )
    texts, kinds = by_id(path, model["vocab"])
    kinds = [
        int(Kind.BYTE) if _BYTE.fullmatch(text) else kind
        for text, kind in zip(texts, kinds, strict=True)
    ]
    ranks: dict[bytes, int] = {}
    for rank, (left, right) in enumerate(_merges(path, tokenizer)):
        ranks.setdefault((left + right).encode(), rank)
    scores = [-float(ranks[text]) if text in ranks else ADDED_SCORE * 1000 for text in texts]
    unknown = model.get("unk_token")
    if isinstance(unknown, str) and unknown in model["vocab"]:
        kinds[model["vocab"][unknown]] = int(Kind.UNKNOWN)
    return Tokens(path, "llama", texts, kinds, scores, {"add_space_prefix": _has_prefix(tokenizer)})


def _has_prefix(tokenizer: dict[str, Any]) -> bool:
    """Whether a text gets a space before it: by a normalizer, or by Metaspace."""
    normalizer = tokenizer.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    if any(step.get("type") == "Prepend" for step in steps):
        return True
    metaspace = tokenizer.get("pre_tokenizer") or {}
    if metaspace.get("type") != "Metaspace":
        return False
    default = "always" if metaspace.get("add_prefix_space", True) else "never"
    return bool(metaspace.get("prepend_scheme", default) != "never")


def _check(path: Path, tokenizer: dict[str, Any]) -> None:
    model = tokenizer.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if kind != "BPE" or not isinstance(model.get("vocab"), dict):  # type: ignore[union-attr]
        raise ConvertError(f"{path}: its model is {kind}; supported: BPE.")


def _merges(path: Path, tokenizer: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs, best first. Two ways of writing them: "a b" and ["a", "b"]."""
    found = []
    for merge in tokenizer["model"].get("merges") or []:
        pair = merge.split(" ", 1) if isinstance(merge, str) else merge
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(p, str) for p in pair)
        ):
            raise ConvertError(f"{path}: model.merges has {merge!r}; two parts are needed.")
        found.append((pair[0], pair[1]))
    return found
