"""linear_<weights>: output rows = activations times weights, in register tiles.

One sequence of float operations per output, the same in the one-token kernel and in every tile
width, so a row's result does not depend on its company (architecture, rule 6). A tile of 1..8
tokens reads a group of packed rows once; with many tokens the group stays in the second cache
level from tile to tile. Unpacking it once into bytes and floats (a panel) was tried and does not
pay: the multiplier pipes are the limit, unpacking runs beside them.

Arguments of every linear kernel (64-bit integers): 0 weights, 1 activations, 2 output,
3 blocks a row, 4 bytes of an activation row, 5 bytes of an output row, 6 bias or 0, 7 row groups,
8 groups a chunk, 9 bytes of a group, 10 address of the number of tokens. A chunk is a run of row
groups; outputs are padded to whole groups.
"""

from __future__ import annotations

from edgellm.kernels.cpu.activations import (
    GROUP,
    HALF_SUMS,
    SCALE,
    SCALED_SUM,
    SUMS,
    Activation,
)
from edgellm.kernels.cpu.decode import TracedBlock, decode_block
from edgellm.kernels.cpu.layout import WORDS, Fields, PackedLayout, PairedFields
from edgellm.kernels.cpu.store import EmitKernel
from edgellm.kernels.cpu.sums import Sum32, add_scaled, sum_of_products
from edgellm.kernels.cpu.targets import Target
from edgellm.kernels.cpu.vector import F32, I8, I16, I32, I64, Emitter, Value
from edgellm.quant.block import QuantType

N_ARGUMENTS = 11
_WIDE, _PREFETCH_BYTES = 4, 6912  # tokens of a tile that computes longer than memory waits
# Narrower tiles are streams, which the CPU's own prefetcher follows; where the arithmetic of
# blocks of 256 makes it stutter, hints a little ahead of it help, farther ones disturb it.
_NEAR_BYTES = 1152


class Tile:
    """What varies between kinds of weights: one tile of ``width`` tokens over one row group."""

    block: int  # elements
    tiles: tuple[int, ...]  # widths in tokens, widest first

    def block_bytes(self, lanes: int) -> int:
        raise NotImplementedError

    def emit(
        self, e: Emitter, width: int, w: Value, x: list[Value], n_blocks: Value, ahead: Value
    ) -> list[Value]:
        """The outputs [width] of one row group, each a vector over its rows. ``ahead``: how far
        beyond the weights in use others may be asked for, in bytes."""
        raise NotImplementedError


class PackedTile(Tile):
    """int8 activations against packed codes (see layouts)."""

    def __init__(self, layout: PackedLayout, form: Activation, target: Target) -> None:
        self.layout, self.form, self.block = layout, form, layout.block
        # a tile holds one sum for each token and term
        self.tiles = tuple(w for w in target.tiles if w * form.terms <= target.tiles[0])

    def block_bytes(self, lanes: int) -> int:
        return self.layout.block_bytes(lanes)

    def emit(
        self, e: Emitter, width: int, w: Value, x: list[Value], n_blocks: Value, ahead: Value
    ) -> list[Value]:
        layout, form, size = self.layout, self.form, self.block_bytes(e.lanes)
        outputs = [e.var(e.zeros()) for _ in range(width)]
        span_bytes = form.struct_bytes * form.terms
        with e.loop(n_blocks) as i:
            p = w + i * size
            n_bytes = size if width >= _WIDE or self.block > 32 else 0
            prefetch = _Prefetch(e, p + ahead, n_bytes, layout.n_groups * WORDS)
            rows = [address + i * (layout.n_groups // form.groups * span_bytes) for address in x]
            fields = layout.fields(e, p)
            scales = _IntegerScales if isinstance(fields, PairedFields) else _FloatScales
            block = scales(e, form, fields, [v.get() for v in outputs])  # type: ignore[arg-type]
            for step, (groups, read) in enumerate(layout.steps(e, p)):
                span, first = divmod(groups[0], form.groups)
                structs = {
                    (m, term): rows[m] + (span * span_bytes + term * form.struct_bytes)
                    for m in range(width)
                    for term in range(form.terms)
                }
                sums = {
                    at: [self._sums(e, struct, first + k) for k in range(len(groups))]
                    for at, struct in structs.items()
                }
                for g, t, code in read():
                    prefetch.step()
                    k, part = g - groups[0], t * layout.n_sums // WORDS
                    for at, struct in structs.items():
                        four = e.broadcast(I32, struct + (GROUP * (first + k) + 4 * t))
                        sums[at][k][part].add(code, four.bitcast(I8, 4 * e.lanes))
                closes = (groups[-1] + 1) % form.groups == 0
                for (token, term), struct in structs.items():
                    totals = [total for group in sums[token, term] for total in group]
                    block.add(step, token, term, totals, struct)
                    if closes:
                        block.close_span(span, token, term, struct)
            for slot, result in zip(outputs, block.outputs, strict=True):
                slot.set(result)
        return [v.get() for v in outputs]

    def _sums(self, e: Emitter, struct: Value, group: int) -> list[Sum32]:
        layout = self.layout
        return [
            sum_of_products(e, layout.largest, start, layout.is_paired)
            for start in layout.start(e, struct, group)
        ]


class _FloatScales:
    """From the sums of a block to outputs: within a span of activations scale by scale, then times
    the span's scale."""

    def __init__(self, e: Emitter, form: Activation, fields: Fields, outputs: list[Value]) -> None:
        self.e, self.form, self.fields, self.outputs = e, form, fields, outputs
        self.partial: dict[tuple[int, int], Value] = {}  # of the open span, by token and term

    def add(self, step: int, token: int, term: int, sums: list[Sum32], struct: Value) -> None:
        e, at = self.e, (token, term)
        for k, total in enumerate(sums):
            scale, value = self.fields.scales[len(sums) * step + k](), total.total().f32()
            if at in self.partial:
                self.partial[at] = e.fma(value, scale, self.partial[at])
            else:
                self.partial[at] = value * scale

    def close_span(self, span: int, token: int, term: int, struct: Value) -> None:
        e, at = self.e, struct + self.form.span
        if self.fields.minimums:  # formats of 32 elements: the span is a block
            scaled_sum, minimum = e.broadcast(F32, at + SCALED_SUM), self.fields.minimums[span]()
            self.outputs[token] = e.fma(scaled_sum, minimum, self.outputs[token])
        scale, partial = e.broadcast(F32, at + SCALE), self.partial.pop((token, term))
        self.outputs[token] = e.fma(partial, scale, self.outputs[token])


class _IntegerScales:
    """The same with integer scales and minimums: exact in int32 up to the end of a span."""

    def __init__(
        self, e: Emitter, form: Activation, fields: PairedFields, outputs: list[Value]
    ) -> None:
        self.e, self.form, self.fields, self.outputs = e, form, fields, outputs
        self.partial: dict[tuple[int, int], Value] = {}

    def add(self, step: int, token: int, term: int, sums: list[Sum32], struct: Value) -> None:
        zero = self.e.const(0, I32, self.e.lanes)
        total = self.partial.get((token, term), zero)
        scales = self.fields.scales[step]()
        self.partial[token, term] = add_scaled(self.e, total, sums[0], sums[1], scales)

    def close_span(self, span: int, token: int, term: int, struct: Value) -> None:
        e, fields, at = self.e, self.fields, struct + self.form.span
        value = self.partial.pop((token, term)).f32() * fields.d
        if fields.minus_dmin is not None:
            n = self.form.groups // (1 if fields.of_halves else 2)  # pairs in a span
            total = e.const(0, I32, e.lanes)
            for k in range(n):
                sums = at + ((HALF_SUMS if fields.of_halves else SUMS) + 4 * k)
                pair = e.broadcast(I32, sums).bitcast(I16, 2 * e.lanes)
                total = e.dot2(total, fields.minimums[n * span + k](), pair)
            value = e.fma(total.f32(), fields.minus_dmin, value)
        scale = e.broadcast(F32, at + SCALE)
        self.outputs[token] = e.fma(value, scale, self.outputs[token])


class _Prefetch:
    """Hints for a later part of the weights, spread evenly over the words of a block."""

    def __init__(self, e: Emitter, p: Value, n_bytes: int, n_words: int) -> None:
        self.e, self.n_words, self.words, self.done = e, n_words, 0, 0
        self.lines = [p + line for line in range(0, n_bytes, 64)]

    def step(self) -> None:
        self.words += 1
        while self.done < len(self.lines) * self.words // self.n_words:
            self.e.prefetch(self.lines[self.done])
            self.done += 1


class FloatTile(Tile):
    """float32 activations against F32, F16 or BF16 weights, interleaved one element a row."""

    def __init__(self, quant_type: QuantType, target: Target) -> None:
        self.type, self.block, self.tiles = quant_type, 1, target.tiles

    def block_bytes(self, lanes: int) -> int:
        return self.type.bytes * lanes

    def _load(self, e: Emitter, p: Value) -> Value:
        if self.type.name == "f32":
            return e.f32(p)
        if self.type.name == "f16":
            return e.load_f16(p, e.lanes)
        wide = e.load(I16, p, e.lanes, signed=False).i32() << 16
        return wide.bitcast(F32, e.lanes)

    def emit(
        self, e: Emitter, width: int, w: Value, x: list[Value], n_blocks: Value, ahead: Value
    ) -> list[Value]:
        outputs = [e.var(e.zeros()) for _ in range(width)]
        with e.loop(n_blocks) as k:
            weights = self._load(e, w + k * self.block_bytes(e.lanes))
            for m in range(width):
                value = e.broadcast(F32, x[m] + k * 4)
                outputs[m].set(e.fma(weights, value, outputs[m].get()))
        return [v.get() for v in outputs]


class DecodeTile(Tile):
    """Decode-then-dot: rows as the file has them, each block decoded by its own ``decode`` and
    multiplied with float32 activations. For types that have no packed layout yet."""

    def __init__(self, quant_type: QuantType, target: Target) -> None:
        self.type, self.block, self.tiles = quant_type, quant_type.block, target.tiles

    def block_bytes(self, lanes: int) -> int:
        return self.type.bytes * lanes

    def emit(
        self, e: Emitter, width: int, w: Value, x: list[Value], n_blocks: Value, ahead: Value
    ) -> list[Value]:
        n = 16  # elements of a partial sum; chunks of 32 go in halves
        spare = e.stack(4 * e.lanes * width)
        with e.loop(e.lanes) as row:
            start = w + row * n_blocks * self.type.bytes
            sums = [e.var(e.zeros(n)) for _ in range(width)]
            with e.loop(n_blocks) as i:
                at = 0
                for chunk in decode_block(e, self.type, start + i * self.type.bytes):
                    for half in range(0, chunk.n, n):
                        part = chunk.slice(half, n)
                        for m in range(width):
                            value = e.f32(x[m] + i * (4 * self.block) + 4 * at, n)
                            sums[m].set(e.fma(part, value, sums[m].get()))
                        at += n
            for m in range(width):
                e.store(e.sum(sums[m].get())[0], spare + row * 4 + 4 * e.lanes * m)
        return [e.f32(spare + 4 * e.lanes * m) for m in range(width)]


def make_linear(tile: Tile) -> EmitKernel:
    """The kernel over chunks of row groups (arguments: module docstring)."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        a = e.arguments(args, N_ARGUMENTS)
        emit_groups(e, tile, a, lo * a[8], e.minimum(hi * a[8], a[7]),
                    a[0], a[1], a[2], e.load(I64, a[10]))  # fmt: skip

    return emit


def emit_groups(
    e: Emitter, tile: Tile, a: list[Value], first: Value, last: Value,
    weights: Value, x: Value, out: Value, n_tokens: Value,
) -> None:  # fmt: skip
    """Row groups first..last for n_tokens rows of x; shared by plain and expert kernels."""
    n_blocks, x_bytes, out_bytes, bias, group_bytes = a[3], a[4], a[5], a[6], a[9]
    e.align_stack()

    def widths(group: Value) -> None:
        done, w = e.var(0), weights + group * group_bytes
        column = out + group * (4 * e.lanes)
        for width in tile.tiles:
            begin = done.get()
            n = (n_tokens - begin) // width
            with e.loop(n) as i:
                token = begin + i * width
                row = x + token * x_bytes
                rows = [row + x_bytes * m for m in range(width)]
                # the first tile brings later weights in; they stay in cache for the others
                distance = _PREFETCH_BYTES if width >= _WIDE else _NEAR_BYTES
                ahead = e.select(token.eq(0), e.const(distance), e.const(0))
                slots = [e.var(r) for r in tile.emit(e, width, w, rows, n_blocks, ahead)]
                with e.when(bias.ne(0)):
                    for slot in slots:
                        slot.set(slot.get() + e.f32(bias + group * (4 * e.lanes)))
                for m, slot in enumerate(slots):
                    e.store(slot.get(), column + (token + m) * out_bytes)
            done.set(begin + n * width)

    with e.loop(last, first) as group:
        widths(group)


def make_pack(layout: PackedLayout) -> EmitKernel:
    """Repack rows of the file. Arguments: 0 file rows, 1 their bytes, 2 rows, 3 blocks a row,
    4 out. Chunks are row groups; rows past the last repeat it, their outputs are never read."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        source, row_bytes, n_rows, n_blocks, out = e.arguments(args, 5)
        size = layout.type.bytes
        codes, spare = e.stack(layout.block * e.lanes), e.stack(16 * e.lanes)
        with e.loop(hi, lo) as group, e.loop(n_blocks) as i:
            target = out + (group * n_blocks + i) * layout.block_bytes(e.lanes)
            with e.loop(e.lanes) as row:
                number = e.minimum(group * e.lanes + row, n_rows - 1)
                b = TracedBlock(e, source + number * row_bytes + i * size)
                at = codes + row * layout.block
                for k, chunk in enumerate(layout.type.codes(b) if layout.needs_codes else ()):
                    e.store(chunk, at + k * layout.type.chunk)
                layout.pack_lane(e, b, row, target, spare)

            def word(t: int) -> Value:
                rows = [e.load(I32, codes + (r * layout.block + 4 * t)) for r in range(e.lanes)]
                return gather(e, rows).bitcast(I8, 4 * e.lanes).unsigned()

            layout.pack_words(e, word, target, spare)

    return emit


def make_pack_float(quant_type: QuantType) -> EmitKernel:
    """Interleave rows of floats; arguments as ``make_pack``."""
    element = {4: I32, 2: I16}[quant_type.bytes]

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        source, row_bytes, n_rows, n, out = e.arguments(args, 5)
        with e.loop(hi, lo) as group:
            target = out + group * n * (quant_type.bytes * e.lanes)
            rows = [
                source + e.minimum(group * e.lanes + r, n_rows - 1) * row_bytes
                for r in range(e.lanes)
            ]
            with e.loop(n) as k:
                values = [e.load(element, r + k * quant_type.bytes) for r in rows]
                e.store(gather(e, values), target + k * (quant_type.bytes * e.lanes))

    return emit


def gather(e: Emitter, scalars: list[Value]) -> Value:
    """Scalars as the lanes of a vector."""
    vector = scalars[0].splat(len(scalars))
    for i, s in enumerate(scalars[1:], 1):
        vector = Value(e, e.b.insert_element(vector.v, s.v, e.const(i, I32).v))
    return vector
