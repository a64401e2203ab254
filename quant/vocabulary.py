"""Checks of a file's vocabulary, so that a tokenizer can rely on its shape.

A file without `tokenizer.ggml.tokens` has no vocabulary, which is allowed.
"""

import re
from typing import Any

import numpy as np

from edgellm.quant.header import ARRAY, STRING, Entry, GGUFError

MAX_TOKEN = 16_384  # bytes; the longest in real vocabularies are runs of a few hundred spaces
MAX_MERGES = 1 << 21  # the largest real list has 515 k
MAX_TEMPLATE = 256 << 10  # bytes
BYTE = 6  # token type
PREFIX = "tokenizer.ggml."
BYTE_TEXT = re.compile(rb"<0x[0-9A-F]{2}>")


def check_vocabulary(path: str, metadata: dict[str, Any], entries: dict[str, Entry]) -> None:
    """GGUFError where the vocabulary, the merges or a chat template break a rule."""

    def refuse(key: str, reason: str) -> GGUFError:
        return GGUFError(path, entries[key].offset, f"metadata key {key}", reason)

    for key, entry in entries.items():
        if key.startswith("tokenizer.chat_template") and entry.value_type == STRING:
            if len(metadata[key].encode(errors="replace")) > MAX_TEMPLATE:
                raise refuse(key, f"is longer than {MAX_TEMPLATE >> 10} KiB")
    for name in ("tokens", "merges"):
        key = PREFIX + name
        if key in entries and entries[key][:2] != (ARRAY, STRING):
            raise refuse(key, "must be an array of strings")
    merges = PREFIX + "merges"
    if merges in metadata and len(metadata[merges]) > MAX_MERGES:
        raise refuse(merges, f"has more than {MAX_MERGES} entries")

    key = PREFIX + "tokens"
    if key not in metadata:
        return
    tokens: list[bytes] = metadata[key]
    if max(map(len, tokens), default=0) > MAX_TOKEN:
        raise refuse(key, f"has a token of more than {MAX_TOKEN} bytes")
    for name, dtypes, what in (
        ("scores", ("<f4",), "32-bit floats"),
        ("token_type", ("<i4", "<u4"), "32-bit integers"),
    ):
        key = PREFIX + name
        if key not in metadata:
            continue
        values = metadata[key]
        if not isinstance(values, np.ndarray) or values.dtype not in dtypes:
            raise refuse(key, f"must be an array of {what}")
        if len(values) != len(tokens):
            raise refuse(key, f"has {len(values)} entries for {len(tokens)} tokens")
    if key not in metadata or not tokens:
        return
    types = metadata[key]
    if types.min() < 0 or types.max() > BYTE:
        raise refuse(key, f"has types from {types.min()} to {types.max()}; 0 to 6 are known")
    seen = set()
    for index in np.flatnonzero(types == BYTE).tolist():
        text = tokens[index]
        if not BYTE_TEXT.fullmatch(text) or text in seen:
            reason = f"calls token {index} a byte, but its text is not one of <0x00> to <0xFF>"
            raise refuse(key, f"{reason}, each once")
        seen.add(text)
