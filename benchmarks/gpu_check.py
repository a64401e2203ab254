"""How fast the CUDA kernels are on this machine's GPU, alone and as a model.

    python benchmarks/gpu_check.py --json out.json

A model of random weights is made on the device in the shape of an 8B llama in Q4_K_M, from one
layer that is packed here: neither a file nor the engine is needed, so any cupy and numpy do. Rates
are against what the same GPU reaches in a copy (bytes read and written) and in a dense float16
product (torch or cupy, whichever has one). Last the same model goes through the engine with all,
half and none of its layers on the GPU ("ngl", see gpu_offload); that needs the engine's numba, and
is skipped with a word without it. `--device emulated --model tiny` tries the script out.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from gpu_model import FREQ_BASE, MODELS, Sizes, matrices_of_layer, random_blocks, type_of

from edgellm.kernels.cuda import operations, pack
from edgellm.kernels.cuda.attention import Seen, Shape, attention, rope_store
from edgellm.kernels.cuda.device import Buffer, Device, open_devices
from edgellm.kernels.cuda.operations import Matrix, Phase, Rows
from edgellm.quant import by_name

CACHE = 256 << 20  # bytes that must pass before a matrix is read again: more than any L2
SAMPLE = 0.2  # seconds a measurement takes at least


class Bench:
    def __init__(self, device: Device, sizes: Sizes, path: Path | None) -> None:
        """``path`` has the figures so far at any time, should the rest be cut off."""
        self.device, self.sizes, self.path = device, sizes, path
        self.rng = np.random.default_rng(0)
        self.rows: list[dict[str, Any]] = []

    # ---- measuring ------------------------------------------------------------------------------

    def seconds(self, work: Callable[[], None], at_least: float = SAMPLE) -> float:
        """Of one call, once everything is compiled: the median of five runs of many."""
        device = self.device
        work()
        device.synchronize()
        if device.kind == "emulated":
            at_least = 0.0
        begin = time.perf_counter()
        work()
        device.synchronize()
        n = max(1, int(at_least / 5 / max(time.perf_counter() - begin, 1e-6)))
        found = []
        for _ in range(5 if at_least else 1):
            begin = time.perf_counter()
            for _ in range(n):
                work()
            device.synchronize()
            found.append((time.perf_counter() - begin) / n)
        return statistics.median(found)

    def report(self, what: str, **figures: Any) -> None:
        self.rows.append({"what": what, **figures})
        if self.path is not None:
            self.path.write_text(json.dumps(self.rows, indent=1))
        text = "  ".join(
            f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in figures.items()
        )
        print(f"{what:<34}{text}")

    # ---- memory ---------------------------------------------------------------------------------

    def put(self, array: Any, kind: type = np.float32) -> Buffer:
        values = np.ascontiguousarray(array, kind)
        buffer = self.device.alloc(values.nbytes)
        self.device.copy_to(buffer, values)
        return buffer

    def floats(self, *shape: int) -> Buffer:
        """Zeroed: memory that was never written may hold NaN."""
        return self.put(np.zeros(shape))

    def packed(self, kind: str, n_in: int, n_out: int) -> np.ndarray[Any, Any]:
        """A random matrix."""
        of = by_name(kind)
        blocks = random_blocks(self.rng, kind, n_in, n_out * (n_in // of.block))
        return pack.pack(of, blocks.reshape(n_out, -1))

    def copies(self, data: np.ndarray[Any, Any], n: int) -> list[Buffer]:
        """The same bytes n times over, copied on the device."""
        first = self.put(data, np.uint8)
        found = [first]
        for _ in range(n - 1):
            found.append(self.device.alloc(first.n_bytes))
            self.device.copy(found[-1], first, first.n_bytes)
        return found

    # ---- the machine ----------------------------------------------------------------------------

    def bandwidth(self) -> float:
        """Bytes a second of a copy on the device, read and written."""
        n = 1 << 30 if self.device.kind == "cuda" else 1 << 20
        a, b = self.device.alloc(n), self.device.alloc(n)
        main = self.device.main
        found = 2 * n / self.seconds(lambda: self.device.copy(a, b, n, main))
        self.device.free(a)
        self.device.free(b)
        self.report("memory", GB_s=found / 1e9)
        return found

    def dense(self) -> float | None:
        """Multiply-adds * 2 a second of a float16 product, or None without a library for it."""
        n = 8192
        try:
            import torch

            a = torch.ones(n, n, dtype=torch.float16, device="cuda")
            work, wait = (lambda: torch.matmul(a, a)), torch.cuda.synchronize
        except (ImportError, RuntimeError, AssertionError):
            try:
                import cupy

                b = cupy.ones((n, n), cupy.float16)
                work, wait = (lambda: b @ b), cupy.cuda.Device().synchronize
                work()
            except Exception as error:  # whatever is missing, the row says so
                self.report("dense float16", skipped=f"neither torch nor cupy multiplies: {error}")
                return None
        for _ in range(3):
            work()
        wait()
        begin = time.perf_counter()
        for _ in range(20):
            work()
        wait()
        found = 20 * 2 * n**3 / (time.perf_counter() - begin)
        self.report("dense float16", TFLOP_s=found / 1e12)
        return found

    # ---- kernels --------------------------------------------------------------------------------

    def matrices(self, bandwidth: float, dense: float | None) -> None:
        """Each type's two kernels on a matrix of the feed-forward's shape."""
        s, device = self.sizes, self.device
        for kind in ("q4_k", "q6_k", "q8_0", "q4_0", "q5_k", "iq4_xs", "mxfp4"):
            data = self.packed(kind, s.n_embd, s.n_ff)
            n = max(1, min(64, CACHE // len(data))) if device.kind == "cuda" else 1
            buffers = self.copies(data, n)
            found = [Matrix(by_name(kind), s.n_embd, s.n_ff, b) for b in buffers]
            figures: dict[str, float] = {}
            for n_rows in (1, 8, s.n_prompt):
                rows = Rows(n_rows, self.put([n_rows], np.int32))
                phase: Phase = "prefill" if n_rows == s.n_prompt else "decode"
                x, out = self.floats(n_rows, s.n_embd), self.floats(n_rows, s.n_ff)
                taken = device.alloc(n_rows * found[0].row_bytes(1))
                operations.quantize(device, x, taken, rows, s.n_embd)
                work = self._each(found, taken, out, rows, phase)
                seconds = self.seconds(work) / len(found)
                if phase == "decode":
                    rate = len(data) / seconds
                    figures |= {
                        f"x{n_rows} GB_s": rate / 1e9,
                        f"x{n_rows} %": 100 * rate / bandwidth,
                    }
                else:
                    rate = 2 * n_rows * s.n_embd * s.n_ff / seconds
                    figures[f"x{n_rows} TFLOP_s"] = rate / 1e12
                    if dense:
                        figures["% dense"] = 100 * rate / dense
                for buffer in (rows.count, x, out, taken):
                    device.free(buffer)
            self.report(f"{kind} {s.n_ff} x {s.n_embd}", **figures)
            for buffer in buffers:
                device.free(buffer)

    def _each(
        self, matrices: list[Matrix], x: Buffer, out: Buffer, rows: Rows, phase: Phase
    ) -> Callable[[], None]:
        def work() -> None:
            for matrix in matrices:
                operations.linear(self.device, matrix, x, out, rows, phase)

        return work

    def launches(self) -> None:
        """What a launch costs the CPU, and a captured one the device."""
        device, n, rows = self.device, 400, Rows(1, self.put([1], np.int32))
        x = self.floats(1, 256)

        def work() -> None:
            for _ in range(n):
                operations.unary(device, "scale", x, x, rows, 256, 1.0)

        alone = self.seconds(work) / n
        with device.capture(device.main) as graph:
            work()
        captured = self.seconds(lambda: graph.launch(device.main)) / n
        self.report("launch", us=alone * 1e6, captured_us=captured * 1e6)

    # ---- a model --------------------------------------------------------------------------------

    def model(self, bandwidth: float, dense: float | None) -> None:
        s, model = self.sizes, Model(self)
        device = self.device
        seconds = self.seconds(lambda: model.step("prefill", s.n_prompt), 1.0)
        rate = 2 * s.n_prompt * model.n_weights / seconds
        share = {"% dense": 100 * rate / dense} if dense else {}
        self.report(f"pp{s.n_prompt}", tok_s=s.n_prompt / seconds, TFLOP_s=rate / 1e12, **share)

        for is_captured in (False, True):
            if is_captured:
                with device.capture(device.main) as graph:
                    model.step("decode", 1)
            begin = 0.0
            for i in range(-1, s.n_generated):  # the first compiles
                if i == 0:
                    device.synchronize()
                    begin = time.perf_counter()
                model.move_to(s.n_prompt + max(i, 0))
                if is_captured:
                    graph.launch(device.main)
                else:
                    model.step("decode", 1)
                model.token()  # the wait of each step
            seconds = (time.perf_counter() - begin) / s.n_generated
            rate = model.n_bytes / seconds
            name = f"tg{s.n_generated}" + (" captured" if is_captured else "")
            self.report(name, tok_s=1 / seconds, GB_s=rate / 1e9, **{"%": 100 * rate / bandwidth})

    # ---- the engine -----------------------------------------------------------------------------

    def engine(self, bandwidth: float, seconds_left: Callable[[], float]) -> None:
        """The model with all, half and none of its layers on the GPU, beside what a CPU needs."""
        if why := why_no_engine():
            self.report("ngl all, half, 0", skipped=why)
            return
        from gpu_offload import offload_rows

        offload_rows(self.report, self.device, self.sizes, bandwidth, seconds_left)


class Model:
    """Launches of a llama's step over random weights."""

    def __init__(self, bench: Bench) -> None:
        b, s = bench, bench.sizes
        self.bench, self.sizes, self.device = bench, s, bench.device
        n_kv = s.n_kv_heads * s.head_dim
        self.layers: list[dict[str, Matrix]] = [{} for _ in range(s.n_layers)]
        self.n_bytes = self.n_weights = 0
        for name, (n_in, n_out) in matrices_of_layer(s).items():
            of = {i: type_of(name, i) for i in range(s.n_layers)}
            for kind in sorted(set(of.values())):
                layers = [i for i, k in of.items() if k == kind]
                buffers = b.copies(b.packed(kind, n_in, n_out), len(layers))
                for i, buffer in zip(layers, buffers, strict=True):
                    self.layers[i][name] = self._counted(Matrix(by_name(kind), n_in, n_out, buffer))
        head = b.put(b.packed("q6_k", s.n_embd, s.n_vocab), np.uint8)
        self.output = self._counted(Matrix(by_name("q6_k"), s.n_embd, s.n_vocab, head))
        self.n_weights -= s.n_embd * s.n_vocab  # of a prompt only the last token's are wanted
        self.shape = Shape(s.n_heads, s.n_kv_heads, s.head_dim, s.head_dim, s.head_dim**-0.5)
        tiles = s.n_ctx // 32
        pools = (self.shape.key_tile_bytes, self.shape.value_tile_bytes)
        self.pools = [
            tuple(b.put(np.zeros(tiles * n), np.uint8) for n in pools) for _ in self.layers
        ]
        self.norm = b.put(np.ones(s.n_embd))
        exponent = np.arange(0, s.head_dim, 2) / s.head_dim
        self.frequencies = b.put(FREQ_BASE**-exponent, np.float64)
        n = s.n_prompt
        self.x, self.y = b.floats(n, s.n_embd), b.floats(n, s.n_embd)
        self.q, self.turned, self.attended = (b.floats(n, s.n_heads * s.head_dim) for _ in range(3))
        self.k, self.v = b.floats(n, n_kv), b.floats(n, n_kv)
        self.gate, self.up = b.floats(n, s.n_ff), b.floats(n, s.n_ff)
        self.taken = self.device.alloc(n * (s.n_ff + s.n_ff // 4 + 16))
        self.angles = b.floats(n, s.head_dim)
        self.logits = b.floats(1, s.n_vocab)
        self.row = self.device.pinned(4 * s.n_vocab).view(np.float32)
        self.counts = {m: b.put([m], np.int32) for m in (1, n)}
        self.positions = {"prefill": b.put(np.arange(n), np.int32), "decode": b.put([n], np.int32)}
        self.table = b.put(np.arange(tiles), np.int32)
        self.sequences = b.put(np.zeros(n), np.int32)
        self.partials = self.device.alloc(self.shape.partial_bytes(1, s.n_ctx))
        self.host = self.device.pinned(4).view(np.int32)
        self.device.copy_to(self.x, b.rng.standard_normal((n, s.n_embd)).astype(np.float32))

    def _counted(self, matrix: Matrix) -> Matrix:
        self.n_bytes += matrix.data.n_bytes
        self.n_weights += matrix.n_in * matrix.n_out
        return matrix

    def move_to(self, position: int) -> None:
        self.host[0] = position
        self.device.copy_to(self.positions["decode"], self.host, self.device.main)

    def token(self) -> int:
        """The step's best token, by the CPU as in the engine: where it waits for the GPU."""
        self.device.copy_from(self.logits, self.row, self.device.main)
        self.device.main.synchronize()
        return int(self.row.argmax())

    def step(self, phase: Phase, n: int) -> None:
        d, s, rows = self.device, self.sizes, Rows(n, self.counts[n])
        positions = self.positions[phase]
        operations.rope_angles(
            d, positions, self.frequencies, self.angles, rows, s.head_dim // 2, 1.0
        )
        seen = Seen(positions, positions, self.table, self.sequences, s.n_ctx // 32)
        added: Buffer | None = None  # what the layer before says, not yet part of x
        for layer, pools in zip(self.layers, self.pools, strict=True):
            self._norm(self.x, added, rows)
            self._attend(layer, pools, seen, rows, phase)
            self._norm(self.x, self.y, rows)
            self._feed_forward(layer, rows, phase)
            added = self.y
        last = 4 * s.n_embd * (n - 1)
        one = Rows(1, self.counts[1])
        self._norm(self.x.at(last), self.y.at(last), one)
        operations.linear(d, self.output, self.taken, self.logits, one, "decode")

    def _norm(self, x: Buffer, y: Buffer | None, rows: Rows) -> None:
        """x += y; its norm, quantized, is what the next matrices take."""
        operations.norm_quantize(
            self.device, x, self.norm, self.taken, rows, self.sizes.n_embd, 1e-5, y=y, total=x
        )

    def _attend(
        self, layer: dict[str, Matrix], pools: Any, seen: Seen, rows: Rows, phase: Phase
    ) -> None:
        d, s = self.device, self.sizes
        for name, out in (("q", self.q), ("k", self.k), ("v", self.v)):
            operations.linear(d, layer[name], self.taken, out, rows, phase)
        rope_store(
            d, self.shape, self.q, self.k, self.v, self.angles, self.turned, *pools,
            seen.positions, rows, s.head_dim // 2, "norm",
        )  # fmt: skip
        attention(
            d, self.shape, self.turned, *pools, self.attended, seen, rows, phase, self.partials,
            s.n_ctx,
        )  # fmt: skip
        operations.quantize(d, self.attended, self.taken, rows, s.n_heads * s.head_dim)
        operations.linear(d, layer["o"], self.taken, self.y, rows, phase)

    def _feed_forward(self, layer: dict[str, Matrix], rows: Rows, phase: Phase) -> None:
        d, s = self.device, self.sizes
        if phase == "decode":
            operations.gated(d, "swiglu", layer["gate"], layer["up"], self.taken, self.gate, rows)
        else:
            operations.linear(d, layer["gate"], self.taken, self.gate, rows, phase)
            operations.linear(d, layer["up"], self.taken, self.up, rows, phase)
            operations.binary(d, "swiglu", self.gate, self.up, self.gate, rows, s.n_ff)
        operations.quantize(d, self.gate, self.taken, rows, s.n_ff)
        operations.linear(d, layer["down"], self.taken, self.y, rows, phase)


def why_no_engine() -> str:
    """What the engine needs and is not here; empty: nothing. It uses private calls of numba's, so
    that other versions than pyproject.toml's are none."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    for needed in project["project"]["dependencies"]:
        name, _, wanted = needed.partition("==")
        name = re.match(r"[\w-]+", name)[0]
        if name not in ("numba", "llvmlite", "psutil"):
            continue
        try:
            found = version(name)
        except PackageNotFoundError:
            return f"{name} is not installed"
        if wanted and not fnmatch(found, wanted):
            return f"{name} is {found}, not {wanted}"
    return ""


def opened(kind: str) -> Device:
    if kind == "emulated":
        from edgellm.kernels.cuda.emulated import EmulatedDevice

        return EmulatedDevice(policy="eager")
    devices, reason = open_devices()
    if not devices:
        sys.exit(reason)
    return devices[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "emulated"), default="cuda")
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument(
        "--seconds", type=float, default=460, help="in all; what would end later is not begun"
    )
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options, started = parser.parse_args(), time.perf_counter()
    device = opened(options.device)
    bench = Bench(device, MODELS[options.model], options.json)
    free, total = device.memory()
    bench.report(
        device.name, GiB=total / 2**30, free_GiB=free / 2**30, cc=".".join(map(str, device.cc))
    )
    bandwidth = bench.bandwidth()
    dense = bench.dense() if device.kind == "cuda" else None
    bench.launches()
    bench.matrices(bandwidth, dense)
    bench.model(bandwidth, dense)
    bench.engine(bandwidth, lambda: options.seconds - (time.perf_counter() - started))


if __name__ == "__main__":
    main()
