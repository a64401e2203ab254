"""`edgellm compare`: two models on the same text, prompts and tasks, in one table.

Usually a model and a smaller version of it. Perplexity alone hides what people notice: answers that
go another way, JSON that no longer parses, sums that come out wrong, loops.
"""

from __future__ import annotations

import importlib.resources
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgellm.chat_tokens import render_tokens
from edgellm.conversation import template_of
from edgellm.evaluation import tasks
from edgellm.evaluation.divergence import Divergence, check_vocabularies, divergence
from edgellm.evaluation.tasks import Task
from edgellm.evaluation.text import Text
from edgellm.llm import LLM
from edgellm.memory import bill
from edgellm.sampling_params import SamplingParams
from edgellm.sequence import Completion

Say = Callable[[str], None]
_PREFILL, _DECODE, _ROUNDS = 128, 32, 3  # tokens, and how often, of the speeds


@dataclass(frozen=True)
class Answer:
    """What both said to a prompt, and the number of tokens before they part."""

    prompt: str
    texts: tuple[str, str]
    same_tokens: int
    is_same: bool

    def as_dict(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "answers": list(self.texts),
                "same_tokens": self.same_tokens, "same": self.is_same}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One of the two: what was measured of it alone. Speeds in tokens/s, memory in bytes;
    ``rates``: the share of tasks that came out right, by kind."""

    path: str
    file_bytes: int
    memory_bytes: int
    prefill_speed: float
    decode_speed: float
    repetition: float
    valid_json: float | None  # of the JSON tasks, whether right or not
    rates: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Everything that the command shows."""

    sides: tuple[Side, Side]
    divergence: Divergence | None
    answers: list[Answer]
    n_tasks: int  # of each kind

    def as_dict(self) -> dict[str, Any]:
        return {
            "models": [vars(side) for side in self.sides],
            "text": self.divergence.as_dict() if self.divergence else None,
            "prompts": [answer.as_dict() for answer in self.answers],
            "tasks_of_each_kind": self.n_tasks,
        }


def shipped_prompts() -> list[str]:
    """A hundred short prompts on many subjects."""
    file = importlib.resources.files("edgellm.evaluation") / "prompts.txt"
    return file.read_text(encoding="utf-8").splitlines()


def compare(a: LLM, b: LLM, text: Text | None, prompts: Sequence[str], n_tasks: int,
            max_tokens: int, say: Say = lambda line: None) -> Comparison:  # fmt: skip
    """EdgeLLMError for different vocabularies."""
    check_vocabularies(a, b)
    found = None
    if text is not None:
        n_chunks = text.n_chunks
        found = divergence(a, b, text, lambda done: say(f"text: {done}/{n_chunks} chunks"))
    made = tasks.make(n_tasks) if n_tasks else []
    outcomes = []
    for llm in (a, b):
        say(f"{llm.path}: {len(prompts)} prompts, {len(made)} tasks")
        outcomes.append(_Outcome(llm, prompts, made, max_tokens))
    answers = [
        _answer(prompt, *pair)
        for prompt, *pair in zip(prompts, outcomes[0].answers, outcomes[1].answers, strict=True)
    ]
    say("speed")
    speeds = _speeds(a, b)
    sides = outcomes[0].side(made, speeds[0]), outcomes[1].side(made, speeds[1])
    return Comparison(sides, found, answers, n_tasks)


class _Outcome:
    """What one model answers, greedily, and how fast."""

    def __init__(self, llm: LLM, prompts: Sequence[str], made: list[Task], max_tokens: int) -> None:
        self.llm = llm
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        asked = [_tokens(llm, prompt) for prompt in (*prompts, *(task.prompt for task in made))]
        done: list[Completion] = llm.generate(asked, params) if asked else []
        self.answers, self.task_answers = done[: len(prompts)], done[len(prompts) :]

    def side(self, made: list[Task], speeds: tuple[float, float]) -> Side:
        by_kind: dict[str, list[bool]] = {}
        for task, answer in zip(made, self.task_answers, strict=True):
            by_kind.setdefault(task.kind, []).append(task.is_right(answer.text))
        valid = [
            tasks.find_json(answer.text) is not None
            for task, answer in zip(made, self.task_answers, strict=True)
            if task.kind == "json"
        ]
        repeated = [tasks.repetition(answer.tokens) for answer in self.answers]
        llm = self.llm
        return Side(
            path=llm.path, file_bytes=llm.gguf.n_bytes,
            memory_bytes=bill(llm.gguf, llm.n_ctx, llm.type_k, llm.type_v).total,
            prefill_speed=speeds[0], decode_speed=speeds[1],
            repetition=sum(repeated) / len(repeated) if repeated else 0.0,
            valid_json=sum(valid) / len(valid) if valid else None,
            rates={kind: sum(right) / len(right) for kind, right in by_kind.items()},
        )  # fmt: skip


def _tokens(llm: LLM, prompt: str) -> list[int]:
    """As a chat where the model has a template, as text to go on with elsewhere."""
    if llm.chat_template is None:
        return llm.tokenize(prompt, add_special=True)
    messages = [{"role": "user", "content": prompt}]
    return render_tokens(llm.tokenizer, template_of(llm, None), messages)


def _answer(prompt: str, a: Completion, b: Completion) -> Answer:
    pairs = zip(a.tokens, b.tokens, strict=False)
    same = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.tokens), len(b.tokens)))
    return Answer(prompt, (a.text, b.text), same, a.tokens == b.tokens)


def _speeds(*llms: LLM) -> list[tuple[float, float]]:
    """Prefill and decode of each alone, tokens/s: medians of rounds in turns."""
    found: list[list[tuple[float, float]]] = [[] for _ in llms]
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=_DECODE, temperature=0, ignore_eos=True)
    for _ in range(_ROUNDS):
        prompt = rng.integers(0, llms[0].n_vocab, _PREFILL).tolist()  # nobody has read it before
        for llm, speeds in zip(llms, found, strict=True):
            timings = llm.generate(prompt, params).timings
            speeds.append((timings["prompt_per_second"], timings["predicted_per_second"]))
    return [
        (statistics.median(p for p, _ in speeds), statistics.median(d for _, d in speeds))
        for speeds in found
    ]
