"""A stand-in for edgellm.llm: the command line is tested without an engine.

Importing this module is enough; it takes the engine's place in sys.modules.
"""

import sys
import time
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

ANSWER = ("Red", ", gr", "een", " and \u001b[31mblue", ".")
SEEN: dict[str, Any] = {}


@dataclass
class Piece:
    text: str
    token: int | None
    finish_reason: str | None = None


class LLM:
    chat_template: str | None = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    )
    tokenizer = SimpleNamespace(bos=0, eos=None, token_text=lambda token: ["<s>", "</s>"][token])
    kernel_stats = {"compiled": 2, "loaded": 5, "seconds": 1.25}
    timings = {
        "prompt_n": 3,
        "prompt_ms": 10.0,
        "prompt_per_second": 300.0,
        "predicted_n": 5,
        "predicted_ms": 50.0,
        "predicted_per_second": 100.0,
        "cache_n": 0,
    }
    pause = 0.0  # seconds between pieces
    repeat = 1

    def __init__(self, path, n_ctx=None, n_threads=None, max_num_seqs=8, progress=None):
        SEEN.update(path=str(path), n_ctx=n_ctx, n_threads=n_threads)
        if str(path).endswith("damaged.gguf"):
            from edgellm.errors import EdgeLLMError

            raise EdgeLLMError(f"{path} is cut short.")
        if progress:
            progress("compiling kernels 1/2")

    def __enter__(self):
        return self

    def __exit__(self, *details):
        SEEN["closed"] = True

    def tokenize(self, text, add_special=True, parse_special=False):
        SEEN.update(prompt=text, add_special=add_special, parse_special=parse_special)
        return [1, 2, 3]

    def stream(self, prompt, params):
        SEEN.update(tokens=prompt, params=params)
        for token, text in enumerate(ANSWER * self.repeat):
            time.sleep(self.pause)
            yield Piece(text, token)
        yield Piece("", None, "stop")


def install() -> None:
    module = ModuleType("edgellm.llm")
    module.LLM = LLM  # type: ignore[attr-defined]
    sys.modules["edgellm.llm"] = module
