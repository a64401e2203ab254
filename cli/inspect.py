"""edgellm inspect: what is in a model file, without loading its weights."""

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli import _model
from edgellm.cli._options import CacheTypeK, CacheTypeV, CtxSize, Model, ModelFlag
from edgellm.cli._output import columns, size, visible, write

if TYPE_CHECKING:
    from edgellm.quant.gguf import GGUF

SHOWN = 5  # elements of an array
LONGEST = 100  # characters of a text


def command(
    model_argument: Model = None,
    model: ModelFlag = None,
    ctx_size: CtxSize = 0,
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    architectures: Annotated[
        bool, typer.Option("--architectures", help="What this version runs, without a model.")
    ] = False,
) -> None:
    """Show metadata, tensors, bits per weight, the memory bill and the kernel of each type."""
    if architectures:
        from edgellm.what_runs import what_runs

        write(what_runs())
        return
    path = _model.locate(_model.pick(model_argument, model))

    from edgellm.quant.gguf import GGUF

    with GGUF(path) as file:
        facts = describe(file, ctx_size or None, cache_type_k, cache_type_v)
    write(json.dumps(facts, ensure_ascii=False) + "\n" if as_json else as_text(facts))


def describe(
    file: "GGUF", n_ctx: int | None, type_k: str = "f16", type_v: str = "f16"
) -> dict[str, Any]:
    """Everything the command shows, as plain data."""
    return {
        "file": file.path,
        "bytes": file.n_bytes,
        "gguf_version": file.version,
        "parts": len(file.parts),
        "metadata": {key: summary(value) for key, value in file.metadata.items()},
        "types": _types(file),
        "memory": _memory(file, n_ctx, type_k, type_v),
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "type": tensor.type.name,
                "bytes": tensor.n_bytes,
            }
            for tensor in file.tensors.values()
        ],
    }


def _memory(file: "GGUF", n_ctx: int | None, type_k: str, type_v: str) -> dict[str, Any]:
    """The bill, or under "error" why there is none."""
    from dataclasses import asdict

    from edgellm.memory import bill
    from edgellm.quant.gguf import GGUFError

    try:
        cost = bill(file, n_ctx, type_k, type_v)
    except GGUFError as error:  # a vocabulary, or a model that cannot be run: show the rest
        return {"error": str(error)}
    return {**asdict(cost), "total": cost.total}


def _types(file: "GGUF") -> list[dict[str, Any]]:
    """One row per tensor type, the heaviest first."""
    from edgellm.kernels.cpu.report import kernel_for

    rows: dict[str, dict[str, Any]] = {}
    for tensor in file.tensors.values():
        row = rows.setdefault(tensor.type.name, {"tensors": 0, "weights": 0, "bytes": 0})
        row["tensors"] += 1
        row["weights"] += math.prod(tensor.shape)
        row["bytes"] += tensor.n_bytes
    result = []
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["bytes"]):
        kernel, packed = kernel_for(name)
        bits = 8 * row["bytes"] / row["weights"] if row["weights"] else 0.0
        result.append(
            {"type": name, **row, "bits_per_weight": bits, "kernel": kernel, "packed": packed}
        )
    return result


def summary(value: Any) -> Any:
    """A metadata value for showing: arrays by their length and first elements."""
    if isinstance(value, str | bool | int | float):
        return value
    first = [_element(element) for element in value[:SHOWN]]
    return first if len(value) <= SHOWN else {"length": len(value), "first": first}


def _element(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.item()  # a numpy number


def as_text(facts: dict[str, Any]) -> str:
    """The same for people."""
    lines = [f"{facts['file']}: {size(facts['bytes'])}, GGUF version {facts['gguf_version']}"]
    if facts["parts"] > 1:
        lines[0] += f", {facts['parts']} parts"
    lines += ["", "Metadata"]
    lines += [f"  {key} = {_one_line(value)}" for key, value in facts["metadata"].items()]
    if facts["types"]:
        lines += ["", "Types", *_type_lines(facts["types"])]
    lines += ["", "Memory", *_memory_lines(facts["memory"])]
    if facts["tensors"]:
        lines += ["", "Tensors"]
        rows = [
            (t["name"], t["type"], " x ".join(map(str, t["shape"])), size(t["bytes"]))
            for t in facts["tensors"]
        ]
        lines += columns(rows)
    return "\n".join(lines) + "\n"


def _type_lines(types: list[dict[str, Any]]) -> list[str]:
    head = ("type", "tensors", "size", "bits/weight", "kernel")
    rows = [head]
    for t in types:
        kernel = t["kernel"] if t["packed"] else f"{t['kernel']} (not packed: slower)"
        bits = f"{t['bits_per_weight']:.3g}"
        rows.append((t["type"], str(t["tensors"]), size(t["bytes"]), bits, kernel))
    weights = sum(t["weights"] for t in types)
    n_bytes = sum(t["bytes"] for t in types)
    total = f"{8 * n_bytes / weights:.3g}" if weights else "-"
    n_tensors = str(sum(t["tensors"] for t in types))
    rows.append(("all", n_tensors, size(n_bytes), total, f"{weights / 1e6:,.1f} M weights"))
    return columns(rows)


def _memory_lines(memory: dict[str, Any]) -> list[str]:
    if "error" in memory:
        return [f"  cannot be run: {visible(memory['error'])}"]
    types = dict.fromkeys((memory["type_k"], memory["type_v"]))
    kinds = memory["type_k"] if len(types) == 1 else "keys {}, values {}".format(*types)
    rows = [
        ("weights", size(memory["weights"]), ""),
        ("KV cache per token", size(memory["kv_per_token"]), kinds),
        (f"KV cache for {memory['n_ctx']:,} tokens", size(memory["kv"]), ""),
        ("activations", size(memory["arena"]), "about"),
        ("all", size(memory["total"]), ""),
    ]
    if memory["state"]:
        rows.insert(3, ("state of a sequence", size(memory["state"]), "f32"))
    return columns(rows)


def _one_line(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(_one_line(element) for element in value["first"])
        return f"[{inner}, ...] ({value['length']:,} elements)"
    if isinstance(value, list):
        return "[" + ", ".join(_one_line(element) for element in value) + "]"
    if isinstance(value, str):
        cut = value if len(value) <= LONGEST else f"{value[:LONGEST]}..."
        return json.dumps(cut, ensure_ascii=False)
    return str(value)
