"""A stand-in for edgellm.llm: the command line is tested without an engine.

Importing this module is enough; it takes the engine's place in sys.modules.
"""

import re
import sys
import time
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

ANSWER = ("Red", ", gr", "een", " and \u001b[31mblue", ".")
SEEN: dict[str, Any] = {}
FIRST = 0x200000  # ids of generated tokens, beyond all characters
TEXTS: dict[int, str] = {}


@dataclass
class Piece:
    text: str
    token: int | None
    finish_reason: str | None = None


class Tokenizer:
    """A token a character; two control tokens, which the template writes."""

    bos, eos, add_bos = 0, 1, False
    control = ("<s>", "</s>")

    def token_text(self, token):
        return self.control[token] if token < 2 else chr(token)

    def is_special(self, token):
        return token < 2

    def control_spans(self, text):
        return [match.span() for match in re.finditer("</?s>", text)]

    def encode(self, text, add_special=False, parse_special=False):
        SEEN.update(prompt=text, add_special=add_special, parse_special=parse_special)
        return [ord(character) for character in text]

    def encode_markup(self, text, literal):
        SEEN.update(prompt=text, literal=literal)
        ids, done = [], 0
        for start, end in self.control_spans(text):
            if not any(a < end and start < b for a, b in literal):
                ids += [*map(ord, text[done:start]), self.control.index(text[start:end])]
                done = end
        return ids + [*map(ord, text[done:])]

    def stream(self):
        return SimpleNamespace(push=lambda token: "" if token < 2 else TEXTS.get(token, "?"))


class LLM:
    chat_template: str | None = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    )
    tokenizer = Tokenizer()
    n_ctx = 8192
    notices: list[str] = []
    speculation = None
    adapters: list[str] = []
    metadata = {"general.name": "Fake 1B"}
    context_full = False
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

    context_full, n_dropped = False, 0

    @property
    def max_positions(self):
        return self.n_ctx

    def __init__(
        self, path, n_ctx=None, n_threads=None, max_num_seqs=8, progress=None,
        context_policy="error", cpu_mask=None, type_k="f16", type_v="f16",
        offload=None, speculation=None, **overrides,
    ):  # fmt: skip
        SEEN.update(path=str(path), n_ctx=n_ctx, n_threads=n_threads, cpu_mask=cpu_mask,
                    overrides=overrides, types=(type_k, type_v), offload=offload,
                    speculation=speculation)  # fmt: skip
        if str(path).endswith("damaged.gguf"):
            from edgellm.errors import EdgeLLMError

            raise EdgeLLMError(f"{path} is cut short.")
        if progress:
            progress("compiling kernels 1/2")
        self.path = str(path)

    def __enter__(self):
        return self

    def __exit__(self, *details):
        SEEN["closed"] = True

    def close(self):
        SEEN["closed"] = True

    def tokenize(self, text, add_special=True, parse_special=False):
        return self.tokenizer.encode(text, add_special, parse_special)

    def stream(self, prompt, params):
        SEEN.update(tokens=prompt, params=params)
        SEEN.setdefault("all", []).append(prompt)
        return self.pieces(self.answer(prompt))

    def save_cache(self, path, tokens):
        path.write_text(str(tokens))

    def load_cache(self, path):
        if path.read_text() == "other":
            from edgellm.errors import EdgeLLMError

            raise EdgeLLMError(f"{path} was saved by another model.")

    def answer(self, prompt):
        """The texts of the tokens to come; a test may put its own here."""
        return ANSWER * self.repeat

    def pieces(self, texts):
        for text in texts:
            time.sleep(self.pause)
            token = FIRST + len(TEXTS)
            TEXTS[token] = text
            yield Piece(text, token)
        yield Piece("", None, "stop")


def install() -> None:
    module = ModuleType("edgellm.llm")
    module.LLM = LLM  # type: ignore[attr-defined]
    sys.modules["edgellm.llm"] = module
