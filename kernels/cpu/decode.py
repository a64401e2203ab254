"""The blocks of a number format as vector code: ``quant``'s decode, traced instead of run by numpy.

``TracedBlock`` implements ``edgellm.quant.block.Block`` over an address, so the text that numpy
executes as the specification also becomes machine code: embedding rows, repacking and the
decode-then-dot kernel of types that have no packed kernel yet all come from it.
"""

from __future__ import annotations

from edgellm.kernels.cpu.store import EmitKernel
from edgellm.kernels.cpu.vector import F32, I8, I16, I32, Emitter, Value
from edgellm.quant.block import QuantType
from edgellm.quant.grids import Grid


class TracedBlock:
    """One block at ``address``; vectors are LLVM values, one lane is a scalar."""

    def __init__(self, e: Emitter, address: Value) -> None:
        self.e, self.address = e, address

    def u8(self, offset: int, n: int = 1) -> Value:
        return self.e.u8(self.address + offset, n)

    def i8(self, offset: int, n: int = 1) -> Value:
        return self.e.load(I8, self.address + offset, n)

    def f16(self, offset: int) -> Value:
        return self.e.load_f16(self.address + offset)

    def bits(self, offset: int, n: int) -> Value:
        lanes = self.u8(offset).splat(8)
        for byte in range(1, n // 8):
            lanes = lanes.shuffle(range(8 * byte + 8), self.u8(offset + byte).splat(8 * byte))
        masks = self.e.constants(I8, [1 << (i % 8) for i in range(n)]).unsigned()
        return self.e.select(
            (lanes & masks).ne(0), self.e.const(1, I8, n), self.e.const(0, I8, n)
        ).unsigned()

    def f32(self, x: Value) -> Value:
        return x.f32()

    def lookup(self, table: tuple[int, ...], codes: Value) -> Value:
        return self.e.lookup(list(table), codes).signed()

    def entries(self, grid: Grid, low: Value, high: Value | None = None) -> Value:
        e, n = self.e, grid.rows.shape[1]
        table = e.constant_table(f"grid_{grid.name}", grid.rows.tobytes())
        numbers = low.unsigned().i64()
        if high is not None:
            numbers = numbers + (high.unsigned().i64() << 8)
        return self.join([e.u8(table + numbers[i] * n, n) for i in range(low.n)])

    def join(self, parts: list[Value]) -> Value:
        joined = parts[0]
        for part in parts[1:]:
            joined = _side_by_side(joined, part)
        return joined

    def half(self, low: Value, high: Value) -> Value:
        spare = self.e.stack(2)
        self.e.store(low, spare)
        self.e.store(high, spare + 1)
        return self.e.load_f16(spare)

    def e8m0_half(self, offset: int) -> Value:
        return exponent_scale(self.e, self.u8(offset))


def _side_by_side(a: Value, b: Value) -> Value:
    """The lanes of a, then those of b."""
    n_a, n_b = a.n, b.n
    wide = max(n_a, n_b, 2)
    order = [*range(n_a), *range(wide, wide + n_b)]
    return _padded(a, wide).shuffle(order, _padded(b, wide))


def _padded(x: Value, n: int) -> Value:
    if x.n == n:
        return x
    return x.splat(n) if x.n == 1 else x.shuffle([min(i, x.n - 1) for i in range(n)])


def exponent_scale(e: Emitter, exponents: Value) -> Value:
    """2 ** (byte - 128) as float32: half of the power of two an e8m0 byte stands for."""
    n, bits = exponents.n, exponents.i32().signed()
    normal = (bits - 1) << 23  # biased exponent byte - 1
    subnormal = e.select(bits.eq(0), e.const(0x00200000, I32, n), e.const(0x00400000, I32, n))
    return e.select(bits < 2, subnormal, normal).bitcast(F32, n)


def decode_block(e: Emitter, quant_type: QuantType, address: Value) -> list[Value]:
    """The float32 chunks of one block, rounded as quant's numpy decode rounds."""
    if quant_type.block == 1:
        return [_widen(e, quant_type, address, 1)]
    return list(quant_type.decode(TracedBlock(e, address)))


def make_decode(quant_type: QuantType) -> EmitKernel:
    """args: blocks, float32, number of blocks. The range counts blocks; of floats, groups of
    ``lanes`` of them, at least one whole, of which the last may begin within the one before."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        source, out, n_blocks = e.arguments(args, 3)
        with e.loop(hi, lo) as i:
            if quant_type.block == 1:
                first = e.minimum(i * e.lanes, n_blocks - e.lanes)
                values = _widen(e, quant_type, source + first * quant_type.bytes, e.lanes)
                e.store(values, out + first * 4)
                return
            at = out + i * (4 * quant_type.block)
            for chunk in decode_block(e, quant_type, source + i * quant_type.bytes):
                e.store(chunk, at)
                at = at + 4 * chunk.n

    return emit


def _widen(e: Emitter, quant_type: QuantType, address: Value, n: int) -> Value:
    """n plain floats as float32."""
    if quant_type.name == "f16":
        return e.load_f16(address, n)
    if quant_type.name == "bf16":
        high = e.load(I16, address, n, signed=False).i32() << 16
        return high.bitcast(F32, n).signed()
    return e.f32(address, n)
