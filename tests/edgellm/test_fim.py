"""Which tokens of a model mark a gap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm.fim import Fim, NoFim, find
from edgellm.tokenizer import Tokenizer


def tokenizer_of(tiny_model: Callable[..., Path], *controls: str) -> Tokenizer:
    return Tokenizer.from_gguf(tiny_model("llama", controls=controls))


def test_marks_by_their_texts(tiny_model: Callable[..., Path]) -> None:
    tokenizer = tokenizer_of(tiny_model, "<fim_middle>", "<fim_suffix>", "<fim_prefix>")
    assert find({}, tokenizer) == Fim(260, 259, 258)


def test_the_file_knows_better(tiny_model: Callable[..., Path]) -> None:
    tokenizer = tokenizer_of(tiny_model, "<a>", "<b>", "<c>", "<|file_sep|>")
    keys = ("fim_pre", "suffix", "fim_mid")
    metadata = {f"tokenizer.ggml.{key}_token_id": 258 + i for i, key in enumerate(keys)}
    assert find(metadata, tokenizer) == Fim(258, 259, 260, 261)
    with pytest.raises(NoFim):  # an id that is none
        find(metadata | {"tokenizer.ggml.fim_pre_token_id": 4000}, tokenizer)


def test_marks_of_different_families_are_none(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(NoFim):
        find({}, tokenizer_of(tiny_model, "<fim_middle>", "<|fim_suffix|>", "<fim_prefix>"))
