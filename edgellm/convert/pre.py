"""Which `tokenizer.ggml.pre` a byte-pair tokenizer.json has: found by its expressions themselves.

The steps of its pre-tokenizer are written as the list of regular expressions that they are, and
compared with those of edgellm/pretokenizer.py, letter by letter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgellm.convert.errors import ConvertError
from edgellm.pretokenizer import FAMILIES, GPT2, PRE

# Of several names for the same expressions, the one that files usually have.
_USUAL = ("gpt-2", "llama-bpe", "dbrx", "qwen2", "gpt-4o", "tekken", "starcoder", "deepseek-v3")
# Definitions that pretokenizer.py spells otherwise, with the same pieces.
_SAME: dict[tuple[str, ...], str] = {
    (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"): "falcon",
}


def pre_name(path: Path, tokenizer: dict[str, Any]) -> str:
    """The name; ConvertError with the expressions where there is none."""
    ignore_merges = bool(tokenizer["model"].get("ignore_merges", False))
    expressions = _expressions(path, tokenizer.get("pre_tokenizer"))
    family = _SAME.get(expressions) or next(
        (name for name, known in FAMILIES.items() if known == expressions and name != "default"),
        None,
    )
    names = [
        name
        for name, pre in PRE.items()
        if pre.family == family and pre.ignore_merges == ignore_merges
        and not pre.escaped_spaces
    ]  # fmt: skip
    if not names:
        merges = " with ignore_merges" if ignore_merges else ""
        raise ConvertError(
            f"{path}: its pre-tokenizer{merges} has no name in GGUF: {' , '.join(expressions)}"
        )
    return next((name for name in _USUAL if name in names), names[0])


def _expressions(path: Path, definition: Any) -> tuple[str, ...]:
    steps = definition.get("pretokenizers", [definition]) if isinstance(definition, dict) else []
    found: list[str] = []
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel":
            if step.get("add_prefix_space"):
                raise ConvertError(
                    f"{path}: its pre-tokenizer adds a space before a text, which GGUF cannot say."
                )
            if step.get("use_regex", True):
                found.append(GPT2)
        elif kind == "Digits":
            found.append(r"\p{N}" if step.get("individual_digits") else r"\p{N}+")
        elif kind == "Split" and (expression := _split(step)) is not None:
            found.append(expression)
        elif kind == "Punctuation" and step.get("behavior") == "Contiguous":
            found.append(r"[\p{P}\$\+<=>\^~\|`]+")
        else:
            raise ConvertError(f"{path}: its pre-tokenizer has a step that GGUF cannot say: {step}")
    if not any(step.get("type") == "ByteLevel" for step in steps):
        raise ConvertError(
            f"{path}: its pre-tokenizer does not spell bytes as letters (ByteLevel)."
        )
    return tuple(found)


def _split(step: dict[str, Any]) -> str | None:
    """The expression whose matches become pieces, and what lies between them too."""
    pattern = step.get("pattern")
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    how = (step.get("behavior"), bool(step.get("invert", False)))
    # An expression that matches all of a text leaves nothing to remove.
    fits = how == ("Isolated", False) or how == ("Removed", True) or how == ("Isolated", True)
    return expression if fits and isinstance(expression, str) else None
