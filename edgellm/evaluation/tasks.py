"""Small tasks with known answers, made from a seed: what quantizing damages before perplexity says.

Chains of arithmetic, what a piece of Python prints, and JSON to a description. Nothing that a model
writes is executed: the code is ours, and so is its answer.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

N_GRAM = 4  # tokens; of what counts as said again


@dataclass(frozen=True)
class Task:
    """``is_right`` judges an answer's text."""

    kind: str  # "arithmetic", "code" or "json"
    prompt: str
    answer: str
    is_right: Callable[[str], bool]


def make(n_each: int, seed: int = 1) -> list[Task]:
    """n_each tasks of each kind."""
    rng = random.Random(seed)
    return [make_one(rng) for make_one in (arithmetic, code, json_object) for _ in range(n_each)]


def arithmetic(rng: random.Random) -> Task:
    """Three steps from a small number, each of which needs the one before."""
    value = rng.randint(2, 20)
    steps = [f"Start with {value}."]
    for _ in range(3):
        n = rng.randint(2, 9)
        word, value = rng.choice(
            [(f"Add {n}", value + n), (f"Subtract {n}", value - n), (f"Multiply by {n}", value * n)]
        )
        steps.append(f"{word}.")
    prompt = f"{' '.join(steps)} What is the result? End with the number."
    return Task("arithmetic", prompt, str(value), lambda text: last_number(text) == value)


def code(rng: random.Random) -> Task:
    """What a short loop, slice or comprehension prints."""
    a, b, c = rng.randint(2, 6), rng.randint(2, 5), rng.randint(1, 9)
    word = "".join(rng.sample("abcdefgh", 5))
    source, printed = rng.choice(
        [
            (f"x = {c}\nfor i in range({a}):\n    x += {b}\nprint(x)", str(c + a * b)),
            (f"print({word!r}[::-1])", word[::-1]),
            (f"print(len({word!r}) * {b})", str(len(word) * b)),
            (f"print(sum(i * {b} for i in range({a})))", str(b * sum(range(a)))),
            (f"print([i + {c} for i in range({b})][-1])", str(b - 1 + c)),
        ]
    )
    prompt = f"What does this Python program print?\n\n{source}\n\nAnswer with the output alone."
    return Task("code", prompt, printed, lambda text: printed in re.findall(r"-?\w+", text)[-3:])


def json_object(rng: random.Random) -> Task:
    """An object with given keys and values, with no grammar to force it."""
    name = rng.choice(["Ada", "Bo", "Chen", "Dora", "Emil", "Fay"])
    city = rng.choice(["Oslo", "Lima", "Kyoto", "Accra", "Quito", "Turin"])
    age = rng.randint(18, 80)
    wanted = {"name": name, "age": age, "city": city}
    prompt = (
        f"{name} is {age} years old and lives in {city}. Write this as one JSON object with the "
        'keys "name", "age" and "city". Answer with the JSON alone.'
    )
    return Task("json", prompt, json.dumps(wanted), lambda text: find_json(text) == wanted)


def last_number(text: str) -> float | None:
    """The last number of a text, thousands separated or not."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(found[-1].replace(",", "")) if found else None


def find_json(text: str) -> Any:
    """The value a text consists of, alone or in a fence; None where it is no JSON, or nested
    deeper than Python reads: a loop of brackets."""
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", text, re.DOTALL)
    try:
        return json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return None


def repetition(tokens: Sequence[int]) -> float:
    """The share of a text's runs of four tokens that were there before; 0 for none."""
    grams = [tuple(tokens[i : i + N_GRAM]) for i in range(len(tokens) - N_GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
