"""Pre-tokenizers by their definitions, as models' tokenizer.json have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgellm.convert.errors import ConvertError
from edgellm.convert.pre import pre_name

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2_BYTES = {**BYTES, "use_regex": True}
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = O200K.replace(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")
DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def name_of(definition: Any, ignore_merges: bool = False) -> str:
    tokenizer = {"pre_tokenizer": definition, "model": {"ignore_merges": ignore_merges}}
    return pre_name(Path("tokenizer.json"), tokenizer)


@pytest.mark.parametrize(
    ("definition", "ignore_merges", "name"),
    [
        (GPT2_BYTES, False, "gpt-2"),
        (sequence(split(CL100K), BYTES), True, "llama-bpe"),
        (sequence(split(CL100K, "Removed", True), BYTES), False, "dbrx"),
        (sequence(split(CL100K.replace("{1,3}", "")), BYTES), False, "qwen2"),
        (sequence(split(O200K), BYTES), False, "gpt-4o"),
        (sequence(split(TEKKEN), BYTES), True, "tekken"),
        (sequence({"type": "Digits", "individual_digits": True}, GPT2_BYTES), False, "starcoder"),
        (sequence(split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK_V3), BYTES),
         False, "deepseek-v3"),
    ],
)  # fmt: skip
def test_definitions_of_models_are_known(definition: Any, ignore_merges: bool, name: str) -> None:
    assert name_of(definition, ignore_merges) == name


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        (None, "does not spell bytes as letters"),
        (sequence(split(r"\w+"), BYTES), r"has no name in GGUF: \\w\+"),
        (sequence(split(CL100K, "MergedWithNext"), BYTES), "has a step that GGUF cannot say"),
        ({**GPT2_BYTES, "add_prefix_space": True}, "adds a space before a text"),
        ({"type": "Metaspace"}, "has a step that GGUF cannot say"),
    ],
)
def test_others_are_refused_with_what_they_have(definition: Any, message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        name_of(definition)
