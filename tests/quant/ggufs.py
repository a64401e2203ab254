"""Building GGUF bytes by hand, field by field, so that a test can damage any of them."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B"}
CODES |= {U64: "Q", I64: "q", F64: "d"}

Fields = list[tuple[str, bytes]]  # what a field is, and its bytes


def u32(n: int) -> bytes:
    return struct.pack("<I", n)


def u64(n: int) -> bytes:
    return struct.pack("<Q", n)


def text(s: str | bytes) -> bytes:
    raw = s.encode() if isinstance(s, str) else s
    return u64(len(raw)) + raw


def scalar(value_type: int, value: Any) -> bytes:
    return text(value) if value_type == STRING else struct.pack("<" + CODES[value_type], value)


def array(element_type: int, values: Sequence[Any]) -> bytes:
    body = b"".join(scalar(element_type, value) for value in values)
    return u32(element_type) + u64(len(values)) + body


def fields(
    kv: Sequence[tuple[str, int, bytes]],
    tensors: Sequence[tuple[str, Sequence[int], int, int, bytes]] = (),
    version: int = 3,
    alignment: int = 32,
) -> Fields:
    """kv: (key, value type, value bytes); tensors: (name, shape, type id, offset, data)."""
    out: Fields = [("magic", b"GGUF"), ("version", u32(version))]
    out += [("count", u64(len(tensors))), ("count", u64(len(kv)))]
    for key, value_type, value in kv:
        out += [("length", u64(len(key.encode()))), ("name", key.encode())]
        out += [("type", u32(value_type))]
        if value_type == ARRAY:
            out += [("type", value[:4]), ("count", value[4:12]), ("value", value[12:])]
        elif value_type == STRING:
            out += [("length", value[:8]), ("value", value[8:])]
        else:
            out += [("value", value)]
    for name, shape, type_id, offset, _ in tensors:
        out += [("length", u64(len(name.encode()))), ("name", name.encode())]
        out += [("dims", u32(len(shape)))] + [("dim", u64(dim)) for dim in shape]
        out += [("type", u32(type_id)), ("offset", u64(offset))]
    size = sum(len(raw) for _, raw in out)
    if tensors:
        out.append(("padding", bytes(-size % alignment)))
    position = 0
    for _, _, _, offset, data in sorted(tensors, key=lambda t: t[3]):
        if offset > position:
            out.append(("padding", bytes(offset - position)))
        out.append(("data", data))
        position = offset + len(data)
    return out


def joined(parts: Fields) -> bytes:
    return b"".join(raw for _, raw in parts)


def small(version: int = 3) -> Fields:
    """A model of a few KB with every value type, a vocabulary and three tensors."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(4)] + ["a", "b", "ab"]
    kinds = [2, 3, 3, 6, 6, 6, 6, 1, 1, 1]
    kv = [
        ("general.architecture", STRING, text("llama")),
        ("general.alignment", U32, u32(32)),
        ("u8", U8, scalar(U8, 200)),
        ("i8", I8, scalar(I8, -100)),
        ("u16", U16, scalar(U16, 60000)),
        ("i16", I16, scalar(I16, -30000)),
        ("u32", U32, scalar(U32, 4000000000)),
        ("i32", I32, scalar(I32, -2000000000)),
        ("f32", F32, scalar(F32, 0.5)),
        ("bool", BOOL, scalar(BOOL, 1)),
        ("u64", U64, scalar(U64, 1 << 63)),
        ("i64", I64, scalar(I64, -(1 << 62))),
        ("f64", F64, scalar(F64, 0.1)),
        ("flags", ARRAY, array(BOOL, [0, 1, 1])),
        ("words", ARRAY, array(STRING, ["x", "", "äö"])),
        ("counts", ARRAY, array(I32, [1, 2, 3])),
        ("tokenizer.ggml.model", STRING, text("llama")),
        ("tokenizer.ggml.tokens", ARRAY, array(STRING, tokens)),
        ("tokenizer.ggml.scores", ARRAY, array(F32, [0.0] * len(tokens))),
        ("tokenizer.ggml.token_type", ARRAY, array(I32, kinds)),
        ("tokenizer.ggml.merges", ARRAY, array(STRING, ["a b"])),
        ("tokenizer.chat_template", STRING, text("{{ messages }}")),
    ]
    rng = np.random.default_rng(0)
    tensors = [
        ("token_embd.weight", (32, 10), 8, 0, rng.bytes(340)),
        ("output_norm.weight", (32,), 0, 352, rng.bytes(128)),
        ("blk.0.attn_q.weight", (256, 2), 12, 480, rng.bytes(288)),
    ]
    return fields(kv, tensors, version)
