"""edgellm doctor: what this machine has, what it reaches, and what would help."""

import json
from typing import Annotated, Any

import typer

from edgellm.cli._output import Status, columns, size, visible, write

# Of all features, those that people know from comparing processors.
_KNOWN = ("avx2", "fma", "f16c", "avxvnni", "avx512f", "avx512bw", "avx512vnni", "avx512bf16",
          "amx-int8", "neon", "dotprod", "i8mm", "sve", "sve2")  # fmt: skip


def command(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Examine this machine: CPU, threads, memory bandwidth, kernel store, GPU; and one advice."""
    from edgellm.doctor import examine

    status = Status()
    try:
        facts = examine(status.on_terminal)
    finally:
        status.clear()
    write(json.dumps(facts, ensure_ascii=False) + "\n" if as_json else as_text(facts))


def as_text(facts: dict[str, Any]) -> str:
    cpu, threads, store = facts["cpu"], facts["threads"], facts["kernel_store"]
    features = " ".join(f for f in _KNOWN if f in cpu["features"]) or "none that matter"
    others = ", ".join(name for name in cpu["usable_targets"] if name != cpu["target"])
    quota = f", quota {threads['quota']}" if threads["quota"] else ""
    rows = [
        ("CPU", cpu["name"]),
        ("features", features),
        ("target", f"{cpu['target']}, {cpu['lanes']} lanes" + (f" (also {others})" * bool(others))),
        ("last cache", size(cpu["last_level_cache"])),
        ("threads", f"{threads['default']} by default: {threads['allowed']} of {threads['cpus']} "
                    f"CPUs allowed, {threads['cores']} performance cores{quota}"),
        ("memory", f"{size(facts['memory']['available'])} available, "
                   f"huge pages {facts['memory']['huge_pages'] or 'unknown'}"),
        *(
            (f"{m['threads']} thread{'s' * (m['threads'] > 1)}",
             f"reads {m['read_bandwidth'] / 1e9:.1f} GB/s, "
             f"multiplies {m['dot_peak'] / 1e9:.0f} G/s (bytes, {cpu['target']})")
            for m in facts["measured"]
        ),
        ("kernel store", _store_line(store)),
        *(("GPU", line) for line in _gpu_lines(facts["gpu"])),
    ]  # fmt: skip
    return (
        "\n".join([*columns((a, visible(b)) for a, b in rows), "", visible(facts["advice"])]) + "\n"
    )


def _gpu_lines(gpu: dict[str, Any]) -> list[str]:
    if not gpu["usable"]:
        found = f"{', '.join(gpu['found'])} is there. " if gpu["found"] else ""
        return [found + gpu["why"]]
    return [
        f"{g['place']}: {g['name']}, compute capability {g['compute_capability']}, "
        f"{size(g['free'])} of {size(g['total'])} free"
        for g in gpu["usable"]
    ]


def _store_line(store: dict[str, Any]) -> str:
    if store["place"] is None:
        return "off"
    left = store["all_bytes"] - store["bytes"]
    parts = [f"{store['place']}: {store['kernels']} kernels, {size(store['bytes'])}"]
    parts += [f"{size(left)} of other versions"] if left else []
    parts += [] if store["writable"] else ["not writable"]
    return ", ".join(parts)
