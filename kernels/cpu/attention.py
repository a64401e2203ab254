"""Keys and values into the cache, and attention over it.

The cache of a layer is a pool of blocks of ``AttentionShape.block`` tokens, [n_kv_heads] and then
as the type of the keys or values has it (``kv_types``). A slot is the number of a block times its
tokens, plus the place in it.

Attention works in *pieces* of ``PIECE`` positions that start at absolute multiples of it. Each is
reduced from scratch with its own maximum, and pieces are merged by one function in ascending
order, so a token's result does not depend on how work was split (architecture, rule 6). A *unit*
are a few query heads that share a key-value head. An *item* is a few tokens of one sequence, one
unit and a run of pieces:

    int64: first row | tokens | unit | first piece | end piece | partial slot or -1 |
           block table row | 1 to begin with the sinks

With a slot the item is one token and one piece and leaves its state for ``merge``; without one
it finishes its tokens.

*Sinks* (context policy ring): beside the window a token sees the first ``sinks`` tokens of its
sequence, as if they stood right before the window. Keys keep the rotation of their position;
instead the query meets them as if it stood at position min(p, window + sinks - 1), which the
second query input holds. The sinks are a piece of their own before all others. What is visible
depends on the position alone, never on history.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm.kernels.cpu.kv_types import KVType
from edgellm.kernels.cpu.store import EmitKernel
from edgellm.kernels.cpu.vector import F32, I32, I64, Emitter, Value

PIECE = 256
ITEM_WORDS = 8
_TILE_ROWS = 14  # query rows of a tile at most: what 32 registers sum up at once (see _scores)
_NOTHING = -1e30  # the maximum of a piece in which a token sees no key; finite: 0 * it stays 0


@dataclass(frozen=True)
class AttentionShape:
    """What attention kernels are specialised for."""

    n_heads: int
    n_kv_heads: int
    head_dim: int  # of queries and keys
    v_dim: int
    scale: float
    window: int | None
    k_type: KVType
    v_type: KVType
    sinks: int = 0  # at most a block; with a window
    softcap: float | None = None
    has_scores: bool = False  # a learned score for each head takes its share of the softmax
    causal: bool = True

    @property
    def block(self) -> int:
        """Tokens that lie together; PIECE is a multiple."""
        return self.k_type.block

    @property
    def n_parts(self) -> int:
        """Units of a key-value head: code is unrolled over a unit's heads, eight at most."""
        shared = self.n_heads // self.n_kv_heads
        return next(p for p in range(1, shared + 1) if shared % p == 0 and shared // p <= 8)

    @property
    def n_units(self) -> int:
        return self.n_kv_heads * self.n_parts

    @property
    def group(self) -> int:
        """Query heads of a unit."""
        return self.n_heads // self.n_units

    @property
    def tile_tokens(self) -> int:
        """Tokens of a prefill item, whose query rows share one read of the keys."""
        return max(1, _TILE_ROWS // self.group)

    @property
    def name(self) -> str:
        """Everything kernels close over."""
        words = [self.n_heads, self.n_kv_heads, self.head_dim, self.v_dim,
                 self.k_type.name, self.v_type.name]  # fmt: skip
        if self.window is not None:
            words += [f"w{self.window}", f"s{self.sinks}"]
        words += [f"b{self.block}", _spelled(self.scale)]
        if self.softcap is not None:
            words += ["cap", _spelled(self.softcap)]
        words += ["scores"] * self.has_scores + ["whole"] * (not self.causal)
        return "_".join(str(word) for word in words)

    def key_block_bytes(self) -> int:
        """Bytes of a block of keys of one layer."""
        return self.n_kv_heads * self.k_type.head_bytes(self.head_dim)

    def value_block_bytes(self) -> int:
        return self.n_kv_heads * self.v_type.head_bytes(self.v_dim)

    def partial_bytes(self) -> int:
        """State of one query head in one piece: output, then maximum and sum in every lane."""
        return 4 * (self.v_dim + 32)

    def scratch_bytes(self) -> int:
        """Of a thread: scores, outputs and running state of a tile's query rows."""
        rows = self.tile_tokens * self.group
        return rows * 4 * (PIECE + self.v_dim + 64) + 64


def _spelled(number: float) -> str:
    """A float as part of a file name."""
    return float(number).hex().replace(".", "_").replace("-", "m").replace("+", "")


def make_kv_store(shape: AttentionShape) -> EmitKernel:
    """Over tokens. 0 k, 1 k row bytes, 2 v, 3 v row bytes, 4 slots, 5 keys, 6 values."""
    dim, v_dim, k_type, v_type = shape.head_dim, shape.v_dim, shape.k_type, shape.v_type

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        k, k_bytes, v, v_bytes, slots, keys, values = e.arguments(args, 7)
        with e.loop(hi, lo) as row, e.loop(shape.n_kv_heads) as head:
            slot = e.load(I64, slots + row * 8)
            place, number = slot % shape.block, slot // shape.block * shape.n_kv_heads + head
            block = keys + number * k_type.head_bytes(dim)
            k_type.store_key(e, k + row * k_bytes + head * (4 * dim), block, place, dim)
            block = values + number * v_type.head_bytes(v_dim)
            v_type.store_value(e, v + row * v_bytes + head * (4 * v_dim), block, place, v_dim)

    return emit


def _merge(
    e: Emitter, top: Value, total: Value, piece_top: Value, piece_total: Value
) -> tuple[Value, Value, Value, Value]:
    """Running (maximum, sum) with a piece's: the new pair and the factors of both outputs."""
    new_top = e.maximum(top, piece_top)
    old, new = e.exp(top - new_top), e.exp(piece_top - new_top)
    return new_top, e.fma(piece_total, new, total * old), old, new


def _beginning(e: Emitter, shape: AttentionShape, learned: Value) -> tuple[Value, Value]:
    """(maximum, sum) before the first piece: nothing, or a learned score as of a key whose value is
    zero."""
    if shape.has_scores:
        return e.broadcast(F32, learned), e.const(1.0, F32, e.lanes)
    return e.const(_NOTHING, F32, e.lanes), e.zeros()


def make_attention(shape: AttentionShape) -> EmitKernel:
    """Over items. 0 items, 1 q, 2 q row bytes, 3 out, 4 out row bytes, 5 positions, 6 block table,
    7 table row bytes, 8 keys, 9 values, 10 scratch, 11 scratch bytes of a thread, 12 partials,
    13 q for the sinks (row bytes as q), 14 scores [n_heads] or 0. Positions are the last that each
    token sees."""

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        a = e.arguments(args, 15)
        scratch = a[10] + tid * a[11]
        with e.loop(hi, lo) as i:
            item = a[0] + i * (8 * ITEM_WORDS)
            if shape.tile_tokens == 1:
                _Item(e, shape, a, item, scratch, 1).emit()
            else:
                e.branch(
                    e.load(I64, item + 8).eq(1),
                    lambda item=item: _Item(e, shape, a, item, scratch, 1).emit(),  # type: ignore[misc]
                    lambda item=item: _Item(  # type: ignore[misc]
                        e, shape, a, item, scratch, shape.tile_tokens
                    ).emit(),
                )

    return emit


class _Item:
    """Emits one item of ``n_tokens`` tokens. Query rows are [token][head of the group]."""

    def __init__(
        self, e: Emitter, shape: AttentionShape, a: list[Value], item: Value, scratch: Value,
        n_tokens: int,
    ) -> None:  # fmt: skip
        self.e, self.shape, self.n_tokens = e, shape, n_tokens
        self.first, _, self.unit, self.begin, self.end, self.slot, table_row, self.sinks = (
            e.load(I64, item + 8 * w) for w in range(ITEM_WORDS)
        )
        (_, q, q_bytes, out, out_bytes, positions, table, table_bytes, keys, values, _, _,
         self.partials, self.sink_q, learned) = a  # fmt: skip
        self.plain_q, self.q_bytes = q, q_bytes
        self.n_rows = n_tokens * shape.group
        dim, v_dim = shape.head_dim, shape.v_dim
        heads, group = self.unit * shape.group, shape.group
        rows = range(self.n_rows)
        self.q_offsets = [
            (self.first + r // group) * q_bytes + (heads + r % group) * (4 * dim) for r in rows
        ]
        self.out = [
            out + (self.first + r // group) * out_bytes + (heads + r % group) * (4 * v_dim)
            for r in rows
        ]
        self.learned = [learned + (heads + r % group) * 4 for r in rows]
        self.positions = [e.load(I64, positions + (self.first + t) * 8) for t in range(n_tokens)]
        self.table = table + table_row * table_bytes
        self.kv_head, self.keys, self.values = self.unit // shape.n_parts, keys, values
        self.scores = scratch  # [rows][PIECE]
        self.outputs = scratch + self.n_rows * PIECE * 4  # [rows][v_dim]
        self.state = self.outputs + self.n_rows * v_dim * 4  # [rows]: maximum, sum, two factors

    def _state(self, row: int, k: int) -> Value:
        return self.state + (row * 256 + 64 * k)

    def emit(self) -> None:
        e, dim = self.e, self.shape.v_dim
        for r in range(self.n_rows):
            top, total = _beginning(e, self.shape, self.learned[r])
            e.store(top, self._state(r, 0))
            e.store(total, self._state(r, 1))
            for i in range(0, dim, e.lanes):
                e.store(e.zeros(), self.outputs + 4 * (r * dim + i))
        with e.loop(self.end, self.begin - self.sinks if self.shape.sinks else self.begin) as piece:
            self._enter(piece < self.begin)
            piece = self._of_sinks(e.const(0), piece)
            first_key = piece * PIECE
            n_blocks = e.minimum(
                PIECE // self.shape.block, (self.positions[-1] - first_key) // self.shape.block + 1
            )
            n_blocks = self._of_sinks(e.const(1), n_blocks)
            blocks = self.table + piece * (PIECE // self.shape.block * 4)
            with e.loop(n_blocks) as b:
                self._scores(b, n_blocks, blocks, first_key + b * self.shape.block)
            for r in range(self.n_rows):
                self._softmax(r, n_blocks)
            self._outputs(n_blocks, blocks)
        with e.when(self.slot < 0):
            for r in range(self.n_rows):
                inverse = 1.0 / e.f32(self._state(r, 1))
                for i in range(0, dim, e.lanes):
                    value = e.f32(self.outputs + 4 * (r * dim + i))
                    e.store(value * inverse, self.out[r] + 4 * i)

    def _enter(self, is_sinks: Value) -> None:
        """Whether the piece at hand is that of the sinks; which query meets it."""
        self.is_sinks = is_sinks
        base = self._of_sinks(self.sink_q, self.plain_q)
        self.q = [base + offset for offset in self.q_offsets]

    def _of_sinks(self, of_sinks: Value, otherwise: Value) -> Value:
        if not self.shape.sinks:
            return otherwise
        return self.e.select(self.is_sinks, of_sinks, otherwise)

    def _visible(self, position: Value) -> tuple[Value, Value | None]:
        """The newest key that a position sees in this piece, and the newest that is too old."""
        e, shape = self.e, self.shape
        if shape.window is None:
            return position, None
        oldest = position - shape.window
        newest = self._of_sinks(e.minimum(e.const(shape.sinks - 1), oldest), position)
        return newest, self._of_sinks(e.const(-1), oldest)

    def _block(self, base: Value, head_bytes: int, blocks: Value, b: Value) -> Value:
        number = self.e.load(I32, blocks + b * 4).i64() * self.shape.n_kv_heads + self.kv_head
        return base + number * head_bytes

    def _scores(self, b: Value, n_blocks: Value, blocks: Value, first_key: Value) -> None:
        """Scaled and masked scores of all rows against one block of keys. Blocks lie apart: what
        is read next is asked for line by line."""
        e, shape = self.e, self.shape
        k_bytes = shape.k_type.head_bytes(shape.head_dim)
        keys = self._block(self.keys, k_bytes, blocks, b)
        following = e.select(
            b + 1 < n_blocks,
            self._block(self.keys, k_bytes, blocks, e.minimum(b + 1, n_blocks - 1)),
            self._block(self.values, shape.v_type.head_bytes(shape.v_dim), blocks, e.const(0)),
        )
        parts = range(self.shape.block // e.lanes)
        key = [
            (first_key.i32().splat(e.lanes) + e.constants(I32, list(range(p, p + e.lanes))))
            for p in (e.lanes * k for k in parts)
        ]
        at_once = max(1, (e.target.registers - 4) // len(parts))
        for start in range(0, self.n_rows, at_once):
            rows = range(start, min(self.n_rows, start + at_once))
            sums = shape.k_type.products(
                e, keys, shape.head_dim, [self.q[r] for r in rows], following if not start else None
            )
            for r in rows:
                newest, too_old = self._visible(self.positions[r // shape.group])
                for p in parts:
                    seen = key[p] <= newest.i32().splat(e.lanes)
                    if too_old is not None:
                        seen = seen & (key[p] > too_old.i32().splat(e.lanes))
                    score = sums[r - start, p].get() * (shape.scale / (shape.softcap or 1.0))
                    if shape.softcap is not None:
                        score = e.tanh(score) * shape.softcap
                    hidden = e.const(float("-inf"), F32, e.lanes)
                    at = self.scores + b * (4 * self.shape.block) + (r * PIECE + e.lanes * p) * 4
                    e.store(e.select(seen, score, hidden), at)

    def _softmax(self, r: int, n_blocks: Value) -> None:
        """The row's weights in this piece, and its state merged with the piece's."""
        e = self.e
        row, n = self.scores + r * PIECE * 4, n_blocks * self.shape.block
        top = e.var(e.const(_NOTHING, F32, e.lanes))
        with e.loop(n, step=e.lanes) as i:
            top.set(e.maximum(top.get(), e.f32(row + i * 4)))
        piece_top = e.max(top.get())
        total = e.var(e.zeros())
        with e.loop(n, step=e.lanes) as i:
            weight = e.exp(e.f32(row + i * 4) - piece_top)
            e.store(weight, row + i * 4)
            total.set(total.get() + weight)
        piece_total = e.sum(total.get())
        with e.when(self.slot >= 0):
            partial = self._partial(r)
            e.store(piece_top, partial + 4 * self.shape.v_dim)
            e.store(piece_total, partial + 4 * self.shape.v_dim + 64)
        merged = _merge(
            e, e.f32(self._state(r, 0)), e.f32(self._state(r, 1)), piece_top, piece_total
        )
        for k, value in enumerate(merged):
            e.store(value, self._state(r, k))

    def _partial(self, r: int) -> Value:
        return self.partials + (self.slot * self.shape.group + r) * self.shape.partial_bytes()

    def _outputs(self, n_blocks: Value, blocks: Value) -> None:
        """Add the piece's weighted values to the outputs, or leave them for merge."""
        e, shape = self.e, self.shape
        dim, v_bytes = shape.v_dim, shape.v_type.head_bytes(shape.v_dim)
        n_vectors = min(4, dim // e.lanes)
        at_once = max(1, (e.target.registers - 6) // n_vectors)
        for start in range(0, self.n_rows, at_once):
            rows = range(start, min(self.n_rows, start + at_once))
            for first in range(0, dim, n_vectors * e.lanes):
                columns = range(first, min(dim, first + n_vectors * e.lanes), e.lanes)
                sums = {(r - start, c): e.var(e.zeros()) for r in rows for c in columns}
                with e.loop(n_blocks) as b:
                    values = self._block(self.values, v_bytes, blocks, b)
                    following = self._block(
                        self.values, v_bytes, blocks, e.minimum(b + 1, n_blocks - 1)
                    )
                    weights = [self.scores + b * self.shape.block * 4 + r * PIECE * 4 for r in rows]
                    is_first = start == 0 and first == 0
                    shape.v_type.add_values(
                        e, values, dim, weights, sums, following if is_first else None
                    )
                for r in rows:
                    old, new = e.f32(self._state(r, 2)), e.f32(self._state(r, 3))
                    for c in columns:
                        value = sums[r - start, c].get()
                        with e.when(self.slot >= 0):
                            e.store(value, self._partial(r) + 4 * c)
                        at = self.outputs + 4 * (r * dim + c)
                        e.store(e.fma(value, new, e.f32(at) * old), at)


def make_merge(shape: AttentionShape) -> EmitKernel:
    """Over tokens: the pieces of tokens that were split, in ascending order. 0 out, 1 out row
    bytes, 2 (first partial slot, pieces) of each token, 3 partials, 4 scores [n_heads] or 0. Slots
    are [unit][piece]."""
    dim, group = shape.v_dim, shape.group

    def emit(e: Emitter, args: Value, lo: Value, hi: Value, tid: Value) -> None:
        out, out_bytes, splits, partials, learned = e.arguments(args, 5)
        with e.loop(hi, lo) as token:
            first, n = e.load(I64, splits + token * 16), e.load(I64, splits + token * 16 + 8)
            with e.when(n > 0), e.loop(shape.n_heads) as head:
                top, total = map(e.var, _beginning(e, shape, learned + head * 4))
                columns = range(0, dim, e.lanes)
                sums = {c: e.var(e.zeros()) for c in columns}
                with e.loop(n) as i:
                    slot = first + (head // group) * n + i
                    p = partials + (slot * group + head % group) * shape.partial_bytes()
                    merged = _merge(
                        e, top.get(), total.get(), e.f32(p + 4 * dim), e.f32(p + 4 * dim + 64)
                    )
                    top.set(merged[0])
                    total.set(merged[1])
                    for c in columns:
                        value = e.f32(p + 4 * c)
                        sums[c].set(e.fma(value, merged[3], sums[c].get() * merged[2]))
                inverse = 1.0 / total.get()
                for c in columns:
                    at = out + token * out_bytes + head * (4 * dim) + 4 * c
                    e.store(sums[c].get() * inverse, at)

    return emit
