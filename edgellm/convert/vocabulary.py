"""Tokens of a Hugging Face directory in the order of their ids, whatever the file they stand in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.convert.errors import ConvertError
from edgellm.vocabulary import Kind

_MARK = "▁".encode()  # of a space
ADDED_SCORE = -1000.0  # of tokens that no merge makes


@dataclass
class Tokens:
    """A vocabulary in the making; ``model`` as in tokenizer.ggml.model."""

    path: Path
    model: str
    texts: list[bytes]
    kinds: list[int]
    scores: list[float] | None = None
    more: dict[str, Any] = field(default_factory=dict)  # keys of tokenizer.ggml.*

    def add(self, token: int, text: str, special: bool) -> None:
        """An added token: beyond those of the model, or one of them set apart."""
        if not 0 <= token < 1 << 24:
            raise ConvertError(f"{self.path}: an added token has the id {token}.")
        self.pad(token + 1)
        kind = Kind.CONTROL if special else Kind.USER_DEFINED
        data = text.encode()
        if self.texts[token] == data and self.kinds[token] in (Kind.UNKNOWN, Kind.BYTE):
            return
        self.texts[token], self.kinds[token] = data, int(kind)
        if self.scores is not None:
            self.scores[token] = ADDED_SCORE

    def pad(self, n: int) -> None:
        """At least n tokens: ids that mean nothing, up to the rows of the model's table."""
        for token in range(len(self.texts), n):
            self.texts.append(f"[PAD{token}]".encode())
            self.kinds.append(int(Kind.UNUSED))
            if self.scores is not None:
                self.scores.append(ADDED_SCORE)

    def id_of(self, text: str) -> int | None:
        try:
            return self.texts.index(text.encode())
        except ValueError:
            return None

    def metadata(self) -> dict[str, Any]:
        """tokenizer.ggml.*, without special ids."""
        keys: dict[str, Any] = {
            "model": self.model,
            **({"pre": self.more["pre"]} if "pre" in self.more else {}),
            "tokens": self._written_texts(),
            "token_type": np.array(self.kinds, np.int32),
        }
        if self.scores is not None:
            keys["scores"] = np.array(self.scores, np.float32)
        keys |= self.more
        return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}

    def _written_texts(self) -> list[bytes]:
        """Tokens that users have defined are looked for in a text before its spaces are marked, so
        in models that mark them they stand with spaces."""
        if self.scores is None:
            return self.texts
        return [
            text.replace(_MARK, b" ") if kind == Kind.USER_DEFINED else text
            for text, kind in zip(self.texts, self.kinds, strict=True)
        ]


def by_id(path: Path, vocabulary: dict[str, int]) -> tuple[list[bytes], list[int]]:
    """Texts and kinds of text -> id; holes are unused."""
    ids = list(vocabulary.values())
    if not ids or not all(isinstance(i, int) and 0 <= i < 1 << 24 for i in ids):
        raise ConvertError(f"{path}: model.vocab must give every token an id.")
    texts = [f"[PAD{token}]".encode() for token in range(max(ids) + 1)]
    kinds = [int(Kind.UNUSED)] * len(texts)
    for text, token in vocabulary.items():
        texts[token], kinds[token] = text.encode(), int(Kind.NORMAL)
    return texts, kinds
