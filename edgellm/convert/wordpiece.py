"""WordPiece vocabularies (BERT). Hugging Face marks what continues a word with "##", GGUF what
begins one with U+2581."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgellm.convert.errors import ConvertError
from edgellm.convert.vocabulary import Tokens, by_id
from edgellm.vocabulary import Kind

_CONTINUES, _BEGINS = b"##", "▁".encode()


def wordpiece(path: Path, tokenizer: dict[str, Any], n_types: int) -> Tokens:
    """tokenizer.ggml.model "bert". ``n_types``: kinds of sentences that the model tells apart."""
    model, normalizer = tokenizer["model"], tokenizer.get("normalizer") or {}
    if model.get("continuing_subword_prefix", "##") != "##":
        raise ConvertError(f"{path}: continuing_subword_prefix must be ##.")
    kinds = (normalizer.get("type"), (tokenizer.get("pre_tokenizer") or {}).get("type"))
    if kinds != ("BertNormalizer", "BertPreTokenizer"):
        raise ConvertError(
            f"{path}: its normalizer and pre-tokenizer are {kinds[0]} and {kinds[1]}; supported: "
            "those of BERT."
        )
    if not normalizer.get("clean_text", True) or not normalizer.get("handle_chinese_chars", True):
        raise ConvertError(f"{path}: clean_text and handle_chinese_chars must be true.")
    lowercase = bool(normalizer.get("lowercase", True))
    more: dict[str, Any] = {"token_type_count": n_types, "normalizer.lowercase": lowercase}
    if isinstance(accents := normalizer.get("strip_accents"), bool):
        more["normalizer.strip_accents"] = accents
    texts, types = by_id(path, model["vocab"])
    unknown = model["vocab"].get(model.get("unk_token"))
    special = {entry["content"].encode() for entry in tokenizer.get("added_tokens") or []}
    for token, text in enumerate(texts):
        if token == unknown:
            types[token] = int(Kind.UNKNOWN)
        elif types[token] == Kind.NORMAL and text not in special:
            continues = text.startswith(_CONTINUES)
            texts[token] = text.removeprefix(_CONTINUES) if continues else _BEGINS + text
    return Tokens(path, "bert", texts, types, more=more)
