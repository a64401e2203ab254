"""What happens beside each other while a model loads: its tokenizer, and words about progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from edgellm.quant.gguf import GGUF
from edgellm.tokenizer import Tokenizer

_BAR = 30  # characters


def tokenizer_in_background(gguf: GGUF) -> Future[Tokenizer]:
    """The tokenizer is built while weights are read."""

    def build() -> Tokenizer:
        tokenizer = Tokenizer.from_gguf(gguf)
        if tokenizer.has_text:
            tokenizer.encode("")  # builds what is built on first use
        return tokenizer

    pool = ThreadPoolExecutor(1, "edgellm-tokenizer")
    future = pool.submit(build)
    pool.shutdown(wait=False)
    return future


def weights_progress(say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Progress of reading weights as a bar: from the second second on, four times a second."""
    due = time.perf_counter() + 1.0

    def progress(done: int, total: int) -> None:
        nonlocal due
        if time.perf_counter() > due:
            due = time.perf_counter() + 0.25
            share = done / max(1, total)
            bar = "#" * round(_BAR * share)
            say(f"loading weights [{bar:.<{_BAR}}] {100 * share:.0f} %")

    return progress


def compile_progress(say: Callable[[str], None]) -> Callable[[str], None]:
    """How many kernels had to be compiled so far, at most once a second."""
    number, due = 0, 0.0

    def progress(name: str) -> None:
        nonlocal number, due
        number += 1
        if time.perf_counter() > due:
            due = time.perf_counter() + 1.0
            say(f"compiling kernels for this CPU, kept for the next start: {number} ({name})")

    return progress
