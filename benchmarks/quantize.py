"""`edgellm quantize` beside llama.cpp's quantize: the same file, type and threads, in turns.

python benchmarks/quantize.py MODEL-f16.gguf [TYPE ...] [--threads 2] [--rounds 3]

Whole processes, their start included; needs llama-cpp-python. Each writes a file to a folder of its
own beside the model. Memory is the peak of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from edgellm.quant.recipes import MIXES

OURS = """
import sys
from edgellm.cli.main import run
from edgellm.memory import peak_resident_bytes
code = run(["quantize", *sys.argv[1:5]])
print(peak_resident_bytes())
sys.exit(code)
"""
THEIRS = """
import ctypes, sys
import llama_cpp
from edgellm.memory import peak_resident_bytes
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread = int(sys.argv[3]), int(sys.argv[4])
paths = [path.encode() for path in sys.argv[1:3]]
code = llama_cpp.llama_model_quantize(*paths, ctypes.byref(params))
print(peak_resident_bytes())
sys.exit(code)
"""


def timed(program: str, *arguments: str) -> tuple[float, int]:
    """Seconds, and the most memory in bytes."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True,
                          text=True, check=True)  # fmt: skip
    return time.perf_counter() - start, int(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("types", nargs="*", default=["Q4_K_M", "Q8_0", "Q6_K", "IQ4_XS"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size = os.path.getsize(options.model)
    for mix in options.types:
        ours, theirs, memory = [], [], [0, 0]
        with tempfile.TemporaryDirectory(dir=Path(options.model).parent) as folder:
            for i in range(options.rounds + 1):  # the first reads the file and compiles kernels
                paths = [f"{folder}/{i}-{name}.gguf" for name in ("ours", "theirs")]
                a, memory[0] = timed(OURS, options.model, paths[0], mix, str(options.threads))
                b, memory[1] = timed(THEIRS, options.model, paths[1], str(MIXES[mix].file_type),
                                     str(options.threads))  # fmt: skip
                for path in paths:
                    os.unlink(path)
                if i:
                    ours.append(a)
                    theirs.append(b)
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        row = {"type": mix, "seconds": statistics.median(ours),
               "llama_cpp_seconds": statistics.median(theirs),
               "speed_ratio": statistics.median(ratios), "least": min(ratios),
               "MB_per_second": size / 1e6 / statistics.median(ours),
               "peak_MB": memory[0] / 1e6, "llama_cpp_peak_MB": memory[1] / 1e6}  # fmt: skip
        print(json.dumps({k: v if isinstance(v, str) else round(v, 3) for k, v in row.items()}),
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
