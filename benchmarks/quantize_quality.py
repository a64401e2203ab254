"""Files that `edgellm quantize` writes beside llama.cpp's of the same type: what they are worth.

python benchmarks/quantize_quality.py MODEL-f16.gguf TEXT [TYPE ...] [--chunks 10] [--threads 2]

Perplexity of both files in edgellm and in llama.cpp (512 tokens a chunk, of which the second half
counts), and their mean KL divergence from the source in edgellm. Needs llama-cpp-python.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from edgellm.evaluation.divergence import divergence, log_probabilities
from edgellm.evaluation.text import Text, cut
from edgellm.llm import LLM
from edgellm.quant.gguf import GGUF
from edgellm.quant.recipes import MIXES
from edgellm.quantize import plan, quantize

N_CTX = 512


def in_llama_cpp(path: str, text: Text, n_threads: int) -> float:
    """Perplexity."""
    model = llama_cpp.Llama(path, n_ctx=N_CTX, n_batch=N_CTX, n_threads=n_threads,
                            n_threads_batch=n_threads, logits_all=True, verbose=False)  # fmt: skip
    found: list[NDArray[np.float32]] = []
    for chunk in text.chunks:
        model.reset()
        model.eval(chunk.tolist())
        logs = log_probabilities(model.scores[text.first : N_CTX - 1])
        found.append(-logs[np.arange(len(logs)), chunk[text.first + 1 :]])
    model.close()
    return math.exp(float(np.concatenate(found).mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("types", nargs="*", default=["Q8_0", "Q4_K_M", "Q4_0", "IQ4_NL"])
    parser.add_argument("--chunks", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    words = Path(options.text).read_text(encoding="utf-8")
    for mix in options.types:
        with tempfile.TemporaryDirectory() as folder:
            paths = [f"{folder}/ours.gguf", f"{folder}/theirs.gguf"]
            with GGUF(options.model) as gguf:
                quantize(gguf, paths[0], plan(gguf, mix), MIXES[mix].file_type)
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.nthread = MIXES[mix].file_type, options.threads
            names = [name.encode() for name in (options.model, paths[1])]
            if llama_cpp.llama_model_quantize(*names, ctypes.byref(params)):
                raise SystemExit(f"llama.cpp does not quantize {options.model} to {mix}")
            row: dict[str, object] = {"type": mix}
            for who, path in zip(("ours", "theirs"), paths, strict=True):
                with (
                    LLM(options.model, n_ctx=N_CTX, n_threads=options.threads) as source,
                    LLM(path, n_ctx=N_CTX, n_threads=options.threads) as llm,
                ):
                    text = cut(source, words, N_CTX, options.chunks)
                    found = divergence(source, llm, text)
                row[f"{who}_kl"] = round(found.mean_kl, 5)
                row[f"{who}_ppl"] = round(found.perplexities[1].value, 4)
                row[f"{who}_ppl_llama_cpp"] = round(in_llama_cpp(path, text, options.threads), 4)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
