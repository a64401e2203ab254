"""Vector code as readable Python: values with operators that emit LLVM instructions.

A kernel is a Python function that runs once while it is traced: Python loops unroll, ``e.loop``
emits a real loop, and arithmetic on ``Value`` objects becomes LLVM vector instructions. Addresses
are 64-bit integers (``Value``) so that a kernel's arguments are one flat array of integers.

Rules that make results the same in any batch (architecture, rule 6): no fast-math flags, fused
multiply-add only through ``fma``, horizontal reductions by one fixed tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from edgellm.kernels.cpu.targets import Target

BIT, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()


def _vector(element: ir.Type, n: int) -> ir.Type:
    return element if n == 1 else ir.VectorType(element, n)


def _element(ty: ir.Type) -> ir.Type:
    return ty.element if isinstance(ty, ir.VectorType) else ty


def _count(ty: ir.Type) -> int:
    return ty.count if isinstance(ty, ir.VectorType) else 1


def _constant(ty: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(ty, [value] * ty.count if isinstance(ty, ir.VectorType) else value)


class Value:
    """An LLVM value with operators. Integers carry their signedness for ``>>`` and conversion."""

    __slots__ = ("e", "is_signed", "v")

    def __init__(self, e: Emitter, v: Any, is_signed: bool = True) -> None:
        self.e, self.v, self.is_signed = e, v, is_signed

    @property
    def type(self) -> ir.Type:
        return self.v.type

    @property
    def n(self) -> int:
        """Number of elements; 1 for a scalar."""
        return _count(self.v.type)

    @property
    def is_float(self) -> bool:
        return isinstance(_element(self.v.type), ir.FloatType | ir.HalfType)

    def _like(self, v: Any) -> Value:
        return Value(self.e, v, self.is_signed)

    def _pair(self, other: Value | float) -> tuple[Any, Any]:
        if not isinstance(other, Value):
            return self.v, _constant(self.v.type, other)
        if other.n == self.n:
            return self.v, other.v
        return (self.v, other.splat(self.n).v) if self.n > 1 else (self.splat(other.n).v, other.v)

    def _binary(self, other: Value | float, integer: str, floating: str = "") -> Value:
        a, b = self._pair(other)
        return self._like(getattr(self.e.b, floating if self.is_float else integer)(a, b))

    def __add__(self, other: Value | float) -> Value:
        if isinstance(other, int) and other == 0:  # an offset of nothing needs no instruction
            return self
        return self._binary(other, "add", "fadd")

    def __radd__(self, other: float) -> Value:
        return self + other

    def __sub__(self, other: Value | float) -> Value:
        return self._binary(other, "sub", "fsub")

    def __rsub__(self, other: float) -> Value:
        return self._like(_constant(self.v.type, other)) - self

    def __mul__(self, other: Value | float) -> Value:
        return self._binary(other, "mul", "fmul")

    def __rmul__(self, other: float) -> Value:
        return self * other

    def __truediv__(self, other: Value | float) -> Value:
        return self._binary(other, "", "fdiv")

    def __rtruediv__(self, other: float) -> Value:
        return self._like(_constant(self.v.type, other)) / self

    def __floordiv__(self, other: Value | int) -> Value:
        return self._binary(other, "sdiv" if self.is_signed else "udiv")

    def __mod__(self, other: Value | int) -> Value:
        return self._binary(other, "srem" if self.is_signed else "urem")

    def __and__(self, other: Value | int) -> Value:
        return self._binary(other, "and_")

    def __or__(self, other: Value | int) -> Value:
        return self._binary(other, "or_")

    def __xor__(self, other: Value | int) -> Value:
        return self._binary(other, "xor")

    def __lshift__(self, bits: int) -> Value:
        return self if bits == 0 else self._shift(bits, "shl")

    def __rshift__(self, bits: int) -> Value:
        return self if bits == 0 else self._shift(bits, "ashr" if self.is_signed else "lshr")

    def _shift(self, bits: int, how: str) -> Value:
        ty = self.v.type
        if _element(ty) is I8 and _count(ty) > 1 and how != "ashr" and _count(ty) % 2 == 0:
            # no x86 byte shifts: shift 16-bit pairs and mask what crossed over
            wide = ir.VectorType(I16, _count(ty) // 2)
            moved = getattr(self.e.b, how)(self.e.b.bitcast(self.v, wide), _constant(wide, bits))
            keep = (0xFF << bits) & 0xFF if how == "shl" else 0xFF >> bits
            return self._like(self.e.b.bitcast(moved, ty)) & keep
        return self._like(getattr(self.e.b, how)(self.v, _constant(ty, bits)))

    def __neg__(self) -> Value:
        return self._like(self.e.b.fneg(self.v) if self.is_float else self.e.b.neg(self.v))

    def _compare(self, op: str, other: Value | float) -> Value:
        a, b = self._pair(other)
        if self.is_float:
            return Value(self.e, self.e.b.fcmp_ordered(op, a, b), False)
        compare = self.e.b.icmp_signed if self.is_signed else self.e.b.icmp_unsigned
        return Value(self.e, compare(op, a, b), False)

    def __lt__(self, other: Value | float) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Value | float) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Value | float) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._compare(">=", other)

    def eq(self, other: Value | float) -> Value:
        """Elementwise ==, as a method so that Python's own equality and hashing stay untouched."""
        return self._compare("==", other)

    def ne(self, other: Value | float) -> Value:
        return self._compare("!=", other)

    # ---- shape and type ---------------------------------------------------------------------

    def signed(self) -> Value:
        return Value(self.e, self.v, True)

    def unsigned(self) -> Value:
        return Value(self.e, self.v, False)

    def bitcast(self, element: ir.Type, n: int) -> Value:
        return self._like(self.e.b.bitcast(self.v, _vector(element, n)))

    def _integer(self, element: ir.Type) -> Value:
        ty = _vector(element, self.n)
        if self.is_float:
            return Value(self.e, self.e.b.fptosi(self.v, ty))
        width = _element(self.v.type).width
        if width == element.width:
            return self
        if width > element.width:
            return self._like(self.e.b.trunc(self.v, ty))
        extend = self.e.b.sext if self.is_signed else self.e.b.zext
        return self._like(extend(self.v, ty))

    def i8(self) -> Value:
        return self._integer(I8)

    def i16(self) -> Value:
        return self._integer(I16)

    def i32(self) -> Value:
        return self._integer(I32)

    def i64(self) -> Value:
        return self._integer(I64)

    def f32(self) -> Value:
        """Integers become float32 (exactly up to 24 bits)."""
        ty = _vector(F32, self.n)
        convert = self.e.b.sitofp if self.is_signed else self.e.b.uitofp
        return Value(self.e, convert(self.v, ty))

    def splat(self, n: int) -> Value:
        """A scalar repeated n times."""
        ty, undefined = _vector(self.v.type, n), ir.Constant(_vector(self.v.type, n), ir.Undefined)
        first = self.e.b.insert_element(undefined, self.v, ir.Constant(I32, 0))
        order = ir.Constant(ir.VectorType(I32, n), [0] * n)
        assert ty.count == n
        return self._like(self.e.b.shuffle_vector(first, undefined, order))

    def shuffle(self, order: Sequence[int], other: Value | None = None) -> Value:
        """Elements of self (then of other) in the given order."""
        second = ir.Constant(self.v.type, ir.Undefined) if other is None else other.v
        index = ir.Constant(ir.VectorType(I32, len(order)), list(order))
        return self._like(self.e.b.shuffle_vector(self.v, second, index))

    def slice(self, start: int, n: int) -> Value:
        return self.shuffle(range(start, start + n))

    def __getitem__(self, i: int) -> Value:
        if self.n == 1:
            return self
        return self._like(self.e.b.extract_element(self.v, ir.Constant(I32, i)))


class Var:
    """A mutable variable of a kernel: a stack slot that LLVM turns into a register."""

    __slots__ = ("e", "is_signed", "slot")

    def __init__(self, e: Emitter, initial: Value) -> None:
        self.e, self.is_signed = e, initial.is_signed
        with e.b.goto_entry_block():
            self.slot = e.b.alloca(initial.type)
        e.b.store(initial.v, self.slot)

    def get(self) -> Value:
        return Value(self.e, self.e.b.load(self.slot), self.is_signed)

    def set(self, value: Value) -> None:
        self.e.b.store(value.v, self.slot)


class Emitter:
    """Emits one kernel for one target through an LLVM IRBuilder ``b``."""

    def __init__(self, builder: ir.IRBuilder, target: Target) -> None:
        self.b, self.target, self.lanes = builder, target, target.lanes

    # ---- constants, memory ------------------------------------------------------------------

    def const(self, value: float, element: ir.Type = I64, n: int = 1) -> Value:
        return Value(self, _constant(_vector(element, n), value))

    def constants(self, element: ir.Type, values: Sequence[int]) -> Value:
        return Value(self, ir.Constant(ir.VectorType(element, len(values)), list(values)))

    def zeros(self, n: int | None = None) -> Value:
        return self.const(0.0, F32, n or self.lanes)

    def constant_table(self, name: str, data: bytes) -> Value:
        """The address of bytes that become part of the kernel's code, once under a name."""
        table = self.b.module.globals.get(name)
        if table is None:
            ty = ir.ArrayType(I8, len(data))
            table = ir.GlobalVariable(self.b.module, ty, name)
            table.initializer = ir.Constant(ty, bytearray(data))
            table.global_constant, table.linkage, table.align = True, "internal", 64
        return Value(self, self.b.ptrtoint(table, I64))

    def i16(self, n: int) -> ir.Type:
        return ir.VectorType(I16, n)

    def value(self, x: Value | int) -> Value:
        return x if isinstance(x, Value) else self.const(x)

    def var(self, initial: Value | int) -> Var:
        return Var(self, self.value(initial))

    def stack(self, n_bytes: int) -> Value:
        """The address of n_bytes of the thread's stack, 64-byte aligned, valid in this kernel."""
        with self.b.goto_entry_block():
            slot = self.b.alloca(ir.ArrayType(I8, n_bytes))
            slot.align = 64
            return Value(self, self.b.ptrtoint(slot, I64))

    def _pointer(self, address: Value, ty: ir.Type) -> Any:
        return self.b.inttoptr(address.v, ty.as_pointer())

    def load(self, element: ir.Type, address: Value, n: int = 1, signed: bool = True) -> Value:
        """n unaligned elements from ``address`` (bytes)."""
        ty = _vector(element, n)
        instruction = self.b.load(self._pointer(address, ty))
        instruction.align = 1
        return Value(self, instruction, signed)

    def store(self, value: Value, address: Value) -> None:
        instruction = self.b.store(value.v, self._pointer(address, value.type))
        instruction.align = 1

    def u8(self, address: Value, n: int) -> Value:
        return self.load(I8, address, n, signed=False)

    def f32(self, address: Value, n: int | None = None) -> Value:
        return self.load(F32, address, n or self.lanes)

    def arguments(self, address: Value, n: int) -> list[Value]:
        """The kernel's first n arguments: a flat array of 64-bit integers."""
        return [self.load(I64, address + 8 * i) for i in range(n)]

    def broadcast(self, element: ir.Type, address: Value, n: int | None = None) -> Value:
        """One element from memory in every lane (folds into the instruction that uses it)."""
        return self.load(element, address).splat(n or self.lanes)

    def gather_i32(self, base: Value, numbers: Value, size: int) -> Value:
        """int32 from base + numbers[i] * size of each lane."""
        n, pointer = numbers.n, Value(self, self._pointer(base, I32))
        zeros = self.const(0, I32, n)
        if self.target.lanes == 16 and n == 16:
            all_lanes = Value(self, _constant(ir.VectorType(ir.IntType(1), n), 1))
            return self.call("llvm.x86.avx512.mask.gather.dpi.512", zeros.type, zeros, pointer,
                             numbers, all_lanes, self.const(size, I32)).unsigned()  # fmt: skip
        if self.target.lanes == 8 and n == 8:
            all_lanes = self.const(-1, I32, n)
            return self.call("llvm.x86.avx2.gather.d.d.256", zeros.type, zeros, pointer, numbers,
                             all_lanes, self.const(size, I8)).unsigned()  # fmt: skip
        wide = numbers.i64()
        found = zeros
        for i in range(n):
            value = self.load(I32, base + wide[i] * size)
            found = Value(self, self.b.insert_element(found.v, value.v, self.const(i, I32).v))
        return found.unsigned()

    # ---- half precision ---------------------------------------------------------------------

    def load_f16(self, address: Value, n: int = 1) -> Value:
        """n float16 widened to float32."""
        if self.target.has_f16c:
            half = self.b.load(self._pointer(address, _vector(F16, n)))
            half.align = 1
            return Value(self, self.b.fpext(half, _vector(F32, n)))
        bits = self.load(I16, address, n, signed=False).i32()
        sign, magnitude = (bits & 0x8000) << 16, bits & 0x7FFF
        # rebias by a multiplication, which also normalises subnormals
        number = (magnitude << 13).bitcast(F32, n) * 2.0**112
        special = (magnitude << 13) | 0x7F800000
        chosen = self.select(magnitude.signed() >= 0x7C00, special, number.bitcast(I32, n))
        return Value(self, self.b.bitcast((chosen | sign).v, _vector(F32, n)))

    def to_f16(self, x: Value) -> Value:
        """float32 -> the 16 bits of the nearest float16 (ties to even; beyond 65504: infinity)."""
        n = x.n
        if self.target.has_f16c:
            half = self.b.fptrunc(x.v, _vector(F16, n))
            return Value(self, self.b.bitcast(half, _vector(I16, n)), False)
        bits = x.bitcast(I32, n).unsigned()
        sign, magnitude = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
        rounded = magnitude + ((magnitude >> 13) & 1) + 0xFFF  # ties to even on bit 13
        normal = (rounded - (112 << 23)) >> 13
        # below 2^-14 the sum with 0.5 puts the rounded mantissa into the low bits of a float
        tiny = (magnitude.bitcast(F32, n).signed() + 0.5).bitcast(I32, n) - 0x3F000000
        result = self.select(magnitude < 0x38800000, tiny.unsigned(), normal)
        result = self.select(magnitude >= 0x477FF000, result * 0 + 0x7C00, result)
        result = self.select(magnitude > 0x7F800000, result * 0 + 0x7E00, result)
        return (result | sign).i16()

    # ---- arithmetic -------------------------------------------------------------------------

    def call(self, name: str, result: ir.Type, *args: Value) -> Value:
        """Call an LLVM intrinsic or an external C function."""
        function = self.b.module.globals.get(name)
        if function is None:
            ty = ir.FunctionType(result, [a.type for a in args])
            function = ir.Function(self.b.module, ty, name)
        return Value(self, self.b.call(function, [a.v for a in args]))

    def _float_call(self, name: str, *args: Value) -> Value:
        n = args[0].n
        return self.call(f"llvm.{name}.{f'v{n}' if n > 1 else ''}f32", args[0].type, *args)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c with one rounding (two on targets without the instruction)."""
        return self._float_call("fma", a, b, c) if self.target.has_fma else a * b + c

    def fma_wide(self, a: Value, b: Value, c: float) -> Value:
        """a * b + c by way of float64: the same bits whether or not there is the instruction."""
        wide = _vector(F64, a.n)
        product = self.b.fmul(self.b.fpext(a.v, wide), self.b.fpext(b.v, wide))
        return Value(self, self.b.fptrunc(self.b.fadd(product, _constant(wide, c)), a.type))

    def dot4(self, acc: Value, codes: Value, x: Value, largest: int = 255) -> Value:
        return self.target.dot4(self, acc, codes, x, largest)

    def dot2(self, acc: Value, a: Value, b: Value) -> Value:
        return self.target.dot2(self, acc, a, b)

    def lookup(self, levels: Sequence[int], codes: Value) -> Value:
        """levels[code] as bytes; codes below 16, one level for each."""
        shuffle = {64: "avx512.pshuf.b.512", 32: "avx2.pshuf.b", 16: "ssse3.pshuf.b.128"}
        if self.lanes >= 8 and codes.n in shuffle:  # AVX2 and up shuffle bytes by vector
            table = self.constants(I8, list(levels) * (codes.n // 16))
            return self.call(f"llvm.x86.{shuffle[codes.n]}", codes.type, table, codes).unsigned()
        if self.target.name.startswith("neon") and codes.n == 16:
            table = self.constants(I8, list(levels))
            return self.call("llvm.aarch64.neon.tbl1.v16i8", codes.type, table, codes).unsigned()
        found = self.const(levels[0], I8, codes.n)
        for i, level in enumerate(levels[1:], 1):
            found = self.select(codes.eq(i), self.const(level, I8, codes.n), found)
        return found.unsigned()

    def madd_i16(self, a: Value, b: Value | None) -> Value:
        """AVX2: sums of adjacent 16-bit products in int32; b None multiplies by 1."""
        ones = self.const(1, I16, a.n) if b is None else b
        return self.call("llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), a, ones)

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return Value(self, self.b.select(condition.v, yes.v, no.v), yes.is_signed)

    def minimum(self, a: Value | int, b: Value | int) -> Value:
        x, y = self.value(a), self.value(b)
        return self.select(x < y, x, y)

    def maximum(self, a: Value, b: Value) -> Value:
        """The larger float; b where either is NaN."""
        return self.select(a > b, a, b)

    def larger(self, a: Value, b: Value) -> Value:
        """The larger magnitude of floats, NaN where either is, so that what a damaged file holds
        reaches the logits, where it is seen. Magnitudes are ordered as their bits are, NaN last,
        and integers take one instruction where floats take five."""
        x, y = (self.abs(v).bitcast(I32, v.n) for v in (a, b))
        return self.select(x > y, x, y).bitcast(F32, a.n)

    def largest(self, values: Sequence[Value]) -> Value:
        """The largest magnitude over several vectors, lane by lane."""
        found = self.abs(values[0])
        for v in values[1:]:
            found = self.larger(v, found)
        return found

    def abs(self, x: Value) -> Value:
        return self._float_call("fabs", x)

    def rint(self, x: Value) -> Value:
        """Round half to even. Adding and taking away 1.5 * 2^23 does it without an instruction
        that old CPUs lack; exact for |x| < 2^22."""
        if self.target.name != "generic":
            return self._float_call("rint", x)
        magic = 12582912.0
        return (x + magic) - magic

    def round_i32(self, x: Value) -> Value:
        """``rint`` as int32; for |x| < 2^22."""
        if self.target.name == "generic":
            return self.rint(x).i32()
        n = x.n
        shape = f"v{n}" if n > 1 else ""
        return self.call(f"llvm.lrint.{shape}i32.{shape}f32", _vector(I32, n), x)

    def sqrt(self, x: Value) -> Value:
        return self._float_call("sqrt", x)

    def reduce(self, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """All lanes combined by one fixed tree; every lane holds the result."""
        step = x.n // 2
        while step:
            x = combine(x, x.shuffle([i ^ step for i in range(x.n)]))
            step //= 2
        return x

    def sum(self, x: Value) -> Value:
        return self.reduce(x, lambda a, b: a + b)

    def max(self, x: Value) -> Value:
        return self.reduce(x, self.maximum)

    def exp(self, x: Value) -> Value:
        """e**x by one polynomial in every lane (Cephes expf); exactly 1 at 0, 0 below -87, NaN of
        NaN."""
        n = x.n
        low = x < -87.0
        x = self.select(low, self.const(-87.0, F32, n), x)
        x = self.select(x > 88.0, self.const(88.0, F32, n), x)
        k = self.rint(x * 1.4426950408889634)
        r = self.fma(k, self.const(-0.693359375, F32, n), x)
        r = self.fma(k, self.const(2.12194440e-4, F32, n), r)
        p = self.const(1.9875691500e-4, F32, n)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
                  5.0000001201e-1, 1.0, 1.0):  # fmt: skip
            p = self.fma(p, r, self.const(c, F32, n))
        scaled = (p.bitcast(I32, n) + (k.i32() << 23)).bitcast(F32, n)
        return self.select(low, self.const(0.0, F32, n), scaled)

    def tanh(self, x: Value) -> Value:
        return 1.0 - 2.0 / (self.exp(x * 2.0) + 1.0)

    def log(self, x: Value) -> Value:
        """Natural logarithm of positive normal numbers by one polynomial (Cephes logf)."""
        n = x.n
        bits = x.bitcast(I32, n)
        k = ((bits - 0x3F3504F3) >> 23).f32()  # the mantissa then lies in sqrt(1/2) .. sqrt(2)
        m = (bits - (((bits - 0x3F3504F3) >> 23) << 23)).bitcast(F32, n) - 1.0
        p = self.const(7.0376836292e-2, F32, n)
        for c in (
            -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
            -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
        ):  # fmt: skip
            p = self.fma(p, m, self.const(c, F32, n))
        square = m * m
        tail = self.fma(k, self.const(-2.12194440e-4, F32, n), p * m * square)
        tail = self.fma(square, self.const(-0.5, F32, n), tail)
        return self.fma(k, self.const(0.693359375, F32, n), m + tail)

    def log1p(self, x: Value) -> Value:
        """log(1 + x) for x >= 0, exact to rounding for small x too (Kahan)."""
        y = x + 1.0
        small = y.eq(1.0)
        ratio = x / self.select(small, self.const(1.0, F32, x.n), y - 1.0)
        return self.select(small, x, self.log(y) * ratio)

    # ---- control flow -----------------------------------------------------------------------

    @contextmanager
    def loop(self, stop: Value | int, start: Value | int = 0, step: int = 1) -> Iterator[Value]:
        """for i in range(start, stop, step), as a real loop."""
        b = self.b
        first, last = self.value(start), self.value(stop)
        before = b.basic_block
        head, body, done = (b.append_basic_block(f"loop.{n}") for n in ("head", "body", "done"))
        b.branch(head)
        b.position_at_end(head)
        i = b.phi(I64)
        i.add_incoming(first.v, before)
        b.cbranch(b.icmp_signed("<", i, last.v), body, done)
        b.position_at_end(body)
        yield Value(self, i)
        following = b.add(i, ir.Constant(I64, step))
        i.add_incoming(following, b.basic_block)
        b.branch(head)
        b.position_at_end(done)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.b.if_then(condition.v):
            yield

    def branch(
        self, condition: Value, yes: Callable[[], None], no: Callable[[], None] | None = None
    ) -> None:
        """if condition: yes() else: no()"""
        with self.b.if_else(condition.v) as (then, otherwise):
            with then:
                yes()
            with otherwise:
                if no is not None:
                    no()

    def opaque(self, x: Value) -> Value:
        """x, in a way that LLVM cannot look through, and in the order of such requests: it would
        turn a sequence of integer sums into a tree, whose leaves need many registers."""
        same = ir.FunctionType(x.type, [x.type])
        vectors = "w" if "aarch64" in self.b.module.triple else "x"
        return x._like(
            self.b.call(ir.InlineAsm(same, "", f"={vectors},0", side_effect=True), [x.v])
        )

    def align_stack(self) -> None:
        """Let LLVM align the kernel's stack for vectors. It decides so before it knows which
        vectors run out of registers, and unaligned ones straddle cache lines."""
        address = self.stack(64)
        used = ir.FunctionType(ir.VoidType(), [I64])
        with self.b.goto_entry_block():
            self.b.call(ir.InlineAsm(used, "", "r", side_effect=True), [address.v])

    def prefetch(self, address: Value, locality: int = 2) -> None:
        """Hint that a line will be read; 2 = bring it to the second cache level."""
        pointer = Value(self, self._pointer(address, I8))
        self.call(
            "llvm.prefetch.p0", ir.VoidType(), pointer,
            self.const(0, I32), self.const(locality, I32), self.const(1, I32),
        )  # fmt: skip
