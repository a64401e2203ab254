"""What speculation brings: the same requests with and without it, in turns, in one process.

    python benchmarks/speculative.py edit MODEL              # return a file with one change
    python benchmarks/speculative.py code MODEL --draft DRAFT --first 0 --last 10
    python benchmarks/speculative.py prose MODEL
    python benchmarks/speculative.py batch MODEL             # 8 at once

Greedy. Speeds are of generated tokens, from the first to the last; tokens must be the same. Code is
continued from the middle of modules of Python's library, as an editor would ask for it.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import statistics
from dataclasses import replace
from typing import Any

from edgellm import LLM, SamplingParams
from edgellm.chat_tokens import render_tokens
from edgellm.conversation import template_of
from edgellm.request_options import RequestOptions
from edgellm.speculative.options import SpeculationOptions

MODULES = (
    "textwrap", "shlex", "heapq", "bisect", "string", "queue", "sched", "fnmatch", "glob",
    "linecache", "calendar", "colorsys", "configparser", "csv", "difflib", "filecmp", "fractions",
    "gettext", "netrc", "statistics",
)  # fmt: skip
TOPICS = (
    "why the sky is blue", "a walk through an old town", "how bread is made", "the life of bees",
    "a storm at sea", "the first railway", "how to learn a language", "a lighthouse keeper",
    "the taste of coffee", "what friendship means", "a winter morning", "the history of paper",
    "a garden in spring", "how clouds form", "a letter to a distant friend", "the silence of snow",
    "why people travel", "an old violin", "the moon landing", "a market day",
)  # fmt: skip
EDIT = (
    "Return the whole file below with one change: the function `capwords` gets a docstring of one "
    "line that says 'Capitalise words.' Answer with the file alone.\n\n```python\n{}\n```"
)
WITH, WITHOUT = RequestOptions(), RequestOptions(speculate=False)


def source(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


def chat(llm: LLM, text: str) -> list[int]:
    template = template_of(llm, None)
    return render_tokens(llm.tokenizer, template, [{"role": "user", "content": text}])


def edit(llm: LLM) -> list[tuple[str, list[int]]]:
    """A file of some 500 tokens."""
    lines = source("string").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("whitespace ="))
    return [("edit", chat(llm, EDIT.format("\n".join(lines[begin : begin + 62]))))]


def code(llm: LLM) -> list[tuple[str, list[int]]]:
    """A module up to the middle of one of its lines: some 500 tokens of it."""
    found = []
    for module in MODULES:
        text = source(module)
        middle = text.index("\n", len(text) // 2) + 1
        found.append((module, llm.tokenize(text[:middle])[-500:]))
    return found


def prose(llm: LLM) -> list[tuple[str, list[int]]]:
    return [(t, chat(llm, f"Write a page of plain prose about {t}.")) for t in TOPICS]


def speed(llm: LLM, tokens: list[int], params: SamplingParams, options: RequestOptions) -> Any:
    done = llm.generate(tokens, params, options)
    return done.timings["predicted_per_second"], done


def compare(
    llm: LLM, prompts: list[tuple[str, list[int]]], params: SamplingParams, rounds: int
) -> None:
    """One row for each prompt: medians of both, and of the ratios of each round."""
    ratios, n_tokens, n_drafted, n_accepted = [], 0, 0, 0
    for name, tokens in prompts:
        llm.generate(tokens, replace(params, max_tokens=1), WITHOUT)  # the prompt is read
        plain, fast = [], []
        for i in range(rounds):
            pair: dict[bool, Any] = {}
            for guesses in (True, False) if i % 2 else (False, True):
                pair[guesses] = speed(llm, tokens, params, WITH if guesses else WITHOUT)
            assert pair[True][1].tokens == pair[False][1].tokens, name
            plain.append(pair[False][0])
            fast.append(pair[True][0])
        done = pair[True][1]
        ratio = statistics.median(f / p for f, p in zip(fast, plain, strict=True))
        ratios.append(ratio)
        n_tokens += len(done.tokens)
        n_drafted += int(done.timings["draft_n"])
        n_accepted += int(done.timings["draft_n_accepted"])
        print(
            f"{name:30} {len(done.tokens):5} tokens  {statistics.median(plain):7.1f} "
            f"{statistics.median(fast):7.1f} tokens/s  {ratio:5.2f} x  drafts "
            f"{done.timings['draft_n_accepted']:.0f}/{done.timings['draft_n']:.0f}",
            flush=True,
        )
    print(
        f"mean {statistics.mean(ratios):.3f} x, least {min(ratios):.3f} x; "
        f"{n_accepted}/{n_drafted} drafted tokens accepted in {n_tokens}"
    )
    print(llm.metrics.speculation.report())


def together(llm: LLM, params: SamplingParams, rounds: int) -> None:
    """Eight requests at once: four that continue code, four that write prose."""
    tokens = [t for _, t in code(llm)[:4] + prose(llm)[:4]]
    llm.generate(tokens, replace(params, max_tokens=1), replace(WITHOUT, priority="batch"))
    ratios = []
    for i in range(rounds):
        seconds: dict[bool, float] = {}
        for guesses in (True, False) if i % 2 else (False, True):
            before = llm.metrics.e2e_request_latency.sum
            options = RequestOptions(priority="batch", speculate=guesses)
            llm.generate(tokens, params, options)
            seconds[guesses] = (llm.metrics.e2e_request_latency.sum - before) / len(tokens)
        ratios.append(seconds[False] / seconds[True])
        print(f"without {seconds[False]:.2f} s, with {seconds[True]:.2f} s: {ratios[-1]:.3f} x")
    print(f"median {statistics.median(ratios):.3f} x")
    print(llm.metrics.speculation.report())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["edit", "code", "prose", "batch"])
    parser.add_argument("model")
    parser.add_argument("--draft", help="a draft model; else lookup alone")
    parser.add_argument("--first", type=int, default=0, help="prompt to begin with")
    parser.add_argument("--last", type=int, default=20, help="prompt to end before")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("-n", type=int, default=96, help="tokens of each answer")
    given = parser.parse_args()
    options = SpeculationOptions("auto", model=given.draft)
    # an edited file ends where it ends
    params = SamplingParams(max_tokens=given.n, temperature=0, ignore_eos=given.what != "edit")
    n_seqs = 8 if given.what == "batch" else 1
    with LLM(given.model, n_ctx=2048, max_num_seqs=n_seqs, speculation=options) as llm:
        if given.what == "batch":
            together(llm, params, given.rounds)
            return
        prompts = {"edit": edit, "code": code, "prose": prose}[given.what](llm)
        llm.generate(prompts[0][1], replace(params, max_tokens=8), WITHOUT)  # pages and caches
        compare(llm, prompts[given.first : given.last], params, given.rounds)


if __name__ == "__main__":
    main()
