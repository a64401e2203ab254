"""Tiny models on emulated GPUs, and what the CPU makes of them.

Tolerance: a device rounds activations to 8 bits by 32 where the CPU may take blocks of 256, 14 bits
or floats, so logits differ by the error of one rounding, 1/254 of the largest of 32 elements, which
adds up over the layers of a model as noise does: some 1 % of the largest logit of these models, of
which 5 % are allowed. In a mixture a token whose experts nearly tie may get others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
import numpy as np
from numpy.typing import NDArray

from edgellm import LLM, SamplingParams
from edgellm.offload import Options

NAMES = ("llama", "llama-moe", "gemma3", "qwen3moe", "gpt-oss", "deepseek2")
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [[int(t) for t in np.arange(3, 3 + n) * 7 % architectures.N_VOCAB] for n in (67, 20, 45)]
Make = Callable[..., Path]
Logits = NDArray[np.float32]


def load(path: Path, n: int | None = None, **options: Any) -> LLM:
    """On all of the memory and, unless asked for, without streaming: what ``auto`` makes of it is a
    matter of the machine's speed."""
    own = {k: options.pop(k) for k in list(options) if k in Options.__dataclass_fields__}
    options = {"n_ctx": 256, "n_threads": 2, "max_num_seqs": 4} | options
    return LLM(
        path,
        n_gpu_layers=n,
        offload=Options(**({"fit_margin": 0, "stream": "off"} | own)),
        **options,
    )


def write(folder: Path, name: str, n_layers: int = 2) -> Path:
    """A model of an architecture, once for each folder."""
    keys: dict[str, Any] = {"block_count": n_layers}
    if n_layers > 2:
        keys["feed_forward_length"] = 256  # weights are more than rows
    if name == "gemma3":
        keys["attention.sliding_window_pattern"] = [True, False] * (n_layers // 2)
    path = folder / f"{name}-{n_layers}.gguf"
    return path if path.exists() else architectures.write(path, name, **keys)


def expected(path: Path) -> tuple[Logits, list[list[int]]]:
    with load(path, 0) as llm:
        return llm.logits(PROMPTS[0]), [c.tokens for c in llm.generate(PROMPTS, GREEDY)]


def is_close(found: Logits, wanted: Logits) -> bool:
    off = np.abs(found - wanted).max(-1)
    return bool(np.quantile(off, 0.9) < 0.05 * np.abs(wanted).max())


def margins(path: Path, prompt: list[int], text: list[int]) -> Logits:
    """By how much the CPU prefers each token of a text to the next best."""
    with load(path, 0) as llm:
        rows = np.sort(llm.logits([*prompt, *text])[len(prompt) - 1 : -1], -1)
        best: Logits = rows[:, -1] - rows[:, -2]
        return best
