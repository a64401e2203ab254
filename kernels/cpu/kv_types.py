"""How keys and values lie in the cache: what kernels read is what is stored, in its own format.

A block are so many tokens of one key-value head. Plain floats: keys [dim][block], so that scores
need no horizontal sum, values [block][dim]. Formats with scales are cut into tiles of 32 elements
of every token, [dim / 32] one behind the other, whose scales lie beside the codes:

    scales [block] f16 | codes of keys [32][block], of values [block][32]

Two codes of 4 bits share a byte, element i below and i + 16 above: keys [16][block], values
[block][16]; they are kept signed (-8..7). A token's 32 elements are quantized alone, bit for bit
as the number format of the same name does (``quant``).

Sums of products go over codes; the scale is applied to 32 products of a key at once, and to a
value's weight instead of its elements. For each row the order is the same in every tile.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from edgellm.kernels.cpu.vector import F32, I8, I32, Emitter, Value, Var
from edgellm.quant import by_name

BLOCK = 32  # tokens, where nothing else is asked for
BLOCKS = (16, 32, 64, 128)
GROUP = 32  # elements that share a scale
_HALF = GROUP // 2
_BELOW_HALF = 0.49999997  # with 0.5 the number right below 0.5 would be rounded up
_BITS = {"q8_0": 8, "q4_0": 4}

Sums = dict[tuple[int, int], Var]


class KVType:
    """A format of keys or values; ``name`` is that of the number format it stores, ``block`` how
    many tokens lie together."""

    has_scales = False

    def __init__(self, name: str, block: int) -> None:
        self.name, self.block = name, block
        self.bytes = by_name(name).row_bytes(GROUP)  # of 32 elements

    def __repr__(self) -> str:
        return f"<KVType {self.name}>"

    def head_bytes(self, dim: int) -> int:
        """Bytes of one head's block: tokens of ``dim`` elements."""
        return dim * self.bytes * self.block // GROUP

    # ---- kernels --------------------------------------------------------------------------------

    def store_key(self, e: Emitter, x: Value, block: Value, place: Value, dim: int) -> None:
        """float32 [dim] at ``x`` become token ``place`` of a head's block of keys."""
        raise NotImplementedError

    def store_value(self, e: Emitter, x: Value, block: Value, place: Value, dim: int) -> None:
        raise NotImplementedError

    def products(
        self, e: Emitter, block: Value, dim: int, queries: list[Value], following: Value | None
    ) -> Sums:
        """Sums [query, part] of float32 queries [dim] times a block of keys; a part is as many
        tokens as a vector has lanes. ``following`` is read next: asked for line by line."""
        raise NotImplementedError

    def add_values(
        self, e: Emitter, block: Value, dim: int, weights: list[Value], sums: Sums,
        following: Value | None,
    ) -> None:  # fmt: skip
        """Add to sums [row, first column] a block of values times each row's weights [block]."""
        raise NotImplementedError

    # ---- numpy ----------------------------------------------------------------------------------

    def rows(
        self, pool: NDArray[np.uint8], n_heads: int, dim: int, is_keys: bool
    ) -> NDArray[np.uint8]:
        """Blocks of a pool as rows of the number format: uint8 [n_blocks * block, row bytes]."""
        raise NotImplementedError

    def values(
        self, pool: NDArray[np.uint8], n_heads: int, dim: int, is_keys: bool
    ) -> NDArray[np.float32]:
        """What attention sees of blocks: float32 [n_blocks * block, n_heads * dim]."""
        return by_name(self.name).dequantize(self.rows(pool, n_heads, dim, is_keys))


class _Plain(KVType):
    """f32 and f16."""

    def __init__(self, name: str, block: int) -> None:
        super().__init__(name, block)
        self.size = self.bytes // GROUP

    def _load(self, e: Emitter, address: Value) -> Value:
        return e.load_f16(address, e.lanes) if self.size == 2 else e.f32(address)

    def _stored(self, e: Emitter, x: Value) -> Value:
        return e.to_f16(x) if self.size == 2 else x

    def store_key(self, e: Emitter, x: Value, block: Value, place: Value, dim: int) -> None:
        for i in range(0, dim, e.lanes):
            stored = self._stored(e, e.f32(x + 4 * i))
            for lane in range(e.lanes):
                e.store(
                    stored[lane], block + place * self.size + (i + lane) * self.block * self.size
                )

    def store_value(self, e: Emitter, x: Value, block: Value, place: Value, dim: int) -> None:
        at = block + place * (dim * self.size)
        for i in range(0, dim, e.lanes):
            e.store(self._stored(e, e.f32(x + 4 * i)), at + i * self.size)

    def products(
        self, e: Emitter, block: Value, dim: int, queries: list[Value], following: Value | None
    ) -> Sums:
        parts = range(self.block // e.lanes)
        sums = {(r, p): e.var(e.zeros()) for r in range(len(queries)) for p in parts}
        with e.loop(dim) as d:
            line = block + d * (self.block * self.size)
            column = [self._load(e, line + p * e.lanes * self.size) for p in parts]
            _ask(e, following, d, self.block * self.size)
            for r, query in enumerate(queries):
                x = e.broadcast(F32, query + d * 4)
                for p in parts:
                    sums[r, p].set(e.fma(x, column[p], sums[r, p].get()))
        return sums

    def add_values(
        self, e: Emitter, block: Value, dim: int, weights: list[Value], sums: Sums,
        following: Value | None,
    ) -> None:  # fmt: skip
        columns = sorted({c for _, c in sums})
        with e.loop(self.block) as t:
            line = block + t * (dim * self.size)
            _ask(e, following, t, dim * self.size)
            part = {c: self._load(e, line + c * self.size) for c in columns}
            for r, row in enumerate(weights):
                weight = e.broadcast(F32, row + t * 4)
                for c in columns:
                    sums[r, c].set(e.fma(weight, part[c], sums[r, c].get()))

    def rows(
        self, pool: NDArray[np.uint8], n_heads: int, dim: int, is_keys: bool
    ) -> NDArray[np.uint8]:
        if is_keys:
            blocks = pool.reshape(-1, n_heads, dim, self.block, self.size).transpose(0, 3, 1, 2, 4)
        else:
            blocks = pool.reshape(-1, n_heads, self.block, dim, self.size).transpose(0, 2, 1, 3, 4)
        return blocks.reshape(len(blocks) * self.block, -1)


class _Scaled(KVType):
    """q8_0 and q4_0."""

    has_scales = True

    def __init__(self, name: str, block: int) -> None:
        super().__init__(name, block)
        self.bits = _BITS[name]
        self.scales = 2 * block  # bytes of a tile's scales
        self.tile_bytes = self.head_bytes(GROUP)
        self.lines = GROUP * self.bits // 8  # bytes of a token's codes in a tile

    def store_key(self, e: Emitter, x: Value, block: Value, place: Value, dim: int) -> None:
        for g in range(dim // GROUP):
            scale, codes = self._quantized(e, x + 4 * GROUP * g)
            tile = block + g * self.tile_bytes
            e.store(scale, tile + place * 2)
            for i, vector in enumerate(codes):
                for lane in range(vector.n):
                    at = self.scales + (i * vector.n + lane) * self.block
                    e.store(vector[lane], tile + place + at)

    def store_value(self, e: Emitter, x: Value, block: Value, place: Value, dim: int) -> None:
        for g in range(dim // GROUP):
            scale, codes = self._quantized(e, x + 4 * GROUP * g)
            tile = block + g * self.tile_bytes
            e.store(scale, tile + place * 2)
            for i, vector in enumerate(codes):
                e.store(vector, tile + place * self.lines + (self.scales + i * vector.n))

    def _quantized(self, e: Emitter, x: Value) -> tuple[Value, list[Value]]:
        """The scale (f16) of 32 floats, and vectors of their bytes of codes in order."""
        vectors = [e.f32(x + 4 * i) for i in range(0, GROUP, e.lanes)]
        largest = e.reduce(e.largest(vectors), e.larger)
        if self.bits == 8:
            step = largest / 127.0
        else:
            step = self._signed(e, x, vectors, largest) * -0.125
        is_zero = step.eq(0.0)
        one = e.const(1.0, F32, e.lanes)
        factor = e.select(is_zero, e.zeros(), one / e.select(is_zero, one, step))
        scale = e.to_f16(step)[0]
        if self.bits == 8:
            return scale, [self._rounded(e, v * factor).i8() for v in vectors]
        codes = [self._nibble(e, v, factor) for v in vectors]
        half = len(codes) // 2
        both = zip(codes[:half], codes[half:], strict=True)
        return scale, [((low & 15) | (high << 4)).i8() for low, high in both]

    def _signed(self, e: Emitter, x: Value, vectors: list[Value], largest: Value) -> Value:
        """``largest`` with the sign of the first element of that size."""
        numbers = e.const(GROUP - 1, I32, e.lanes)
        for i, v in reversed(list(enumerate(vectors))):
            mine = e.constants(I32, list(range(i * e.lanes, (i + 1) * e.lanes)))
            numbers = e.select(e.abs(v).eq(largest), mine, numbers)
        first = e.reduce(numbers, e.minimum)[0].i64()
        is_negative = e.load(I32, x + first * 4) < 0  # the sign bit: also of zero
        return e.select(is_negative, -largest, largest)

    def _rounded(self, e: Emitter, x: Value) -> Value:
        """The nearest whole number, halves away from zero, as int32."""
        most = e.const(127.0, F32, e.lanes)  # also where the inverse of a tiny scale is infinite
        size = e.minimum(e.abs(x) + _BELOW_HALF, most).i32()
        return e.select(x < 0.0, 0 - size, size)

    def _nibble(self, e: Emitter, x: Value, factor: Value) -> Value:
        """The code -8..7 as int32."""
        code = e.fma_wide(x, factor, 8.5)
        code = e.select(code > 0.0, code, e.zeros())
        return e.minimum(code, e.const(15.0, F32, e.lanes)).i32() - 8

    def _codes(self, e: Emitter, address: Value, is_high: bool = False) -> Value:
        """As float32; of 4 bits the lower or the higher ones of bytes."""
        codes = e.load(I8, address, e.lanes).i32()
        if self.bits == 4:
            codes = codes >> 4 if is_high else (codes << 28) >> 28
        return codes.f32()

    def products(
        self, e: Emitter, block: Value, dim: int, queries: list[Value], following: Value | None
    ) -> Sums:
        n_lines, parts = self.lines, range(self.block // e.lanes)
        pairs = [(r, p) for r in range(len(queries)) for p in parts]
        totals = {pair: e.var(e.zeros()) for pair in pairs}
        with e.loop(dim // GROUP) as g:
            tile, first = block + g * self.tile_bytes, g * (4 * GROUP)
            sums = {pair: e.var(e.zeros()) for pair in pairs}
            with e.loop(n_lines) as i:
                line = tile + self.scales + i * self.block
                _ask(e, following, g * n_lines + i, self.tile_bytes // n_lines)
                for is_high in (False, True)[: GROUP // n_lines]:
                    column = [self._codes(e, line + p * e.lanes, is_high) for p in parts]
                    for r, query in enumerate(queries):
                        x = e.broadcast(F32, query + first + i * 4 + (4 * _HALF * is_high))
                        for p in parts:
                            sums[r, p].set(e.fma(x, column[p], sums[r, p].get()))
            for p in parts:
                scale = e.load_f16(tile + 2 * p * e.lanes, e.lanes)
                for r in range(len(queries)):
                    totals[r, p].set(e.fma(sums[r, p].get(), scale, totals[r, p].get()))
        return totals

    def add_values(
        self, e: Emitter, block: Value, dim: int, weights: list[Value], sums: Sums,
        following: Value | None,
    ) -> None:  # fmt: skip
        columns = sorted({c for _, c in sums})
        groups = sorted({c // GROUP for c in columns})
        scaled = e.stack(4 * self.block * len(groups) * len(weights))  # [row][group][block]
        at = {
            (r, g): scaled + 4 * self.block * (r * len(groups) + k)
            for r in range(len(weights))
            for k, g in enumerate(groups)
        }
        for g in groups:
            for p in range(0, self.block, e.lanes):
                scale = e.load_f16(block + (g * self.tile_bytes + 2 * p), e.lanes)
                for r, row in enumerate(weights):
                    e.store(e.f32(row + 4 * p) * scale, at[r, g] + 4 * p)
        with e.loop(self.block) as t:
            _ask(e, following, t, self.head_bytes(dim) // self.block)
            part = {c: self._codes(e, *self._place(block, t, c)) for c in columns}
            for r in range(len(weights)):
                for g in groups:
                    weight = e.broadcast(F32, at[r, g] + t * 4)
                    for c in (c for c in columns if c // GROUP == g):
                        sums[r, c].set(e.fma(weight, part[c], sums[r, c].get()))

    def _place(self, block: Value, t: Value, column: int) -> tuple[Value, bool]:
        """Where the codes of token ``t`` from a column on begin, and whether they are high bits."""
        g, i = divmod(column, GROUP)
        is_high = i >= self.lines
        line = block + t * self.lines
        return line + (g * self.tile_bytes + self.scales + i - self.lines * is_high), is_high

    def rows(
        self, pool: NDArray[np.uint8], n_heads: int, dim: int, is_keys: bool
    ) -> NDArray[np.uint8]:
        tiles = pool.reshape(-1, n_heads, dim // GROUP, self.tile_bytes)
        scales = tiles[..., : self.scales].reshape(*tiles.shape[:3], self.block, 2)
        codes = tiles[..., self.scales :]
        if is_keys:
            codes = codes.reshape(*tiles.shape[:3], self.lines, self.block).swapaxes(-1, -2)
        else:
            codes = codes.reshape(*tiles.shape[:3], self.block, self.lines)
        if self.bits == 4:
            codes = codes ^ np.uint8(0x88)  # signed to biased, as the number format has them
        blocks = np.concatenate([scales, codes], axis=-1).transpose(0, 3, 1, 2, 4)
        return blocks.reshape(len(blocks) * self.block, -1)


def _ask(e: Emitter, block: Value | None, row: Value, row_bytes: int) -> None:
    if block is not None:
        for line in range(0, row_bytes, 64):
            e.prefetch(block + row * row_bytes + line)


_FORMATS: dict[str, type[KVType]] = {
    "f32": _Plain, "f16": _Plain, "q8_0": _Scaled, "q4_0": _Scaled,
}  # fmt: skip
KV_TYPES = tuple(_FORMATS)


@cache
def kv_type(name: str, block: int = BLOCK) -> KVType:
    """A format by name; the same object for the same block."""
    return _FORMATS[name](name, block)
