"""What structured output costs: the share of a token's time that goes to its mask.

    python benchmarks/structured.py model.gguf

Each form is generated with the mask timed; "mask" is everything that constrained sampling adds to a
token: computing the mask, gathering the allowed ids, and telling the grammar the token. "engine" is
the time of a whole token, mask included. The last column has to stay below 5 %.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from edgellm import LLM, SamplingParams
from edgellm.structured import Matcher

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "kind": {"enum": ["alpha", "beta", "gamma"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": PERSON},
    "any JSON": {"json_schema": {"type": "object"}},
    "regex": {"regex": "([A-Z][a-z]{2,10} ){2,40}[0-9]{4}-[0-9]{2}-[0-9]{2}"},
    "Lark": {"grammar": 'start: (word " ")+ "."\nword: /[a-z]{1,9}/ | "(" word ")"'},
}


class Timed:
    """Matcher whose two methods are timed."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def wrap(self, method: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self.seconds += time.perf_counter() - begun
                self.calls += method.__name__ == "allowed"

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("-n", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("-t", type=int, default=None, help="threads")
    parser.add_argument("-r", type=int, default=5, help="answers of each form")
    given = parser.parse_args()
    with LLM(given.model, n_ctx=1024, n_threads=given.t, max_num_seqs=1) as llm:
        prompt = llm.tokenize("A person as JSON:")
        begun = time.perf_counter()
        llm.generate(prompt, SamplingParams(max_tokens=1, regex="a"))
        print(f"vocabulary of {llm.n_vocab}, first use {time.perf_counter() - begun:.2f} s")
        print(f"{'form':10} {'tokens':>6} {'mask us':>8} {'token us':>9} {'share':>6}")
        for name, form in FORMS.items():
            params = SamplingParams(max_tokens=given.n, temperature=1, **form)
            llm.generate(prompt, replace(params, seed=0))
            mask, spent, tokens = Timed(), 0.0, 0
            original = Matcher.allowed, Matcher.accept
            Matcher.allowed, Matcher.accept = map(mask.wrap, original)  # type: ignore[method-assign]
            try:
                for seed in range(given.r):
                    found = llm.generate(prompt, replace(params, seed=seed))
                    # the first token comes with the prompt: its mask counts, its time does not
                    spent += found.timings["predicted_ms"] / 1e3
                    tokens += max(0, len(found.tokens) - 1)
            finally:
                Matcher.allowed, Matcher.accept = original  # type: ignore[method-assign]
            token = 1e6 * spent / max(1, tokens)
            each = 1e6 * mask.seconds / max(1, mask.calls)
            print(f"{name:10} {tokens:6} {each:8.1f} {token:9.0f} {100 * each / token:5.1f}%")


if __name__ == "__main__":
    main()
