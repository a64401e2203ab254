"""What a machine has, what it measures, and one line of advice: facts for `edgellm doctor`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgellm.gpus import nvidia_names, open_gpus
from edgellm.kernels.cpu import cores, targets
from edgellm.kernels.cpu.store import KernelStore
from edgellm.memory import available_bytes
from edgellm.speeds import measure_cpu

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def examine(say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """All facts; takes about two seconds."""
    store = KernelStore()
    facts: dict[str, Any] = {"cpu": cpu(), "threads": threads(), "memory": memory()}
    n_threads = facts["threads"]["default"]
    say("measuring the memory and the dot products")
    facts["measured"] = [measured(n, store) for n in sorted({1, n_threads})]
    facts["kernel_store"] = kernel_store(store.place)
    facts["gpu"] = gpu()
    facts["advice"] = advice(facts)
    return facts


def cpu() -> dict[str, Any]:
    target = targets.current()
    return {
        "name": cores.cpu_name(),
        "target": target.name,
        "lanes": target.lanes,
        "usable_targets": [t.name for t in targets.TARGETS.values() if t.available()],
        "features": targets.cpu_features(),
        "last_level_cache": cores.last_level_cache(),
    }


def threads() -> dict[str, Any]:
    """``allowed`` and ``performance`` count logical CPUs, ``cores`` physical performance cores."""
    allowed = cores.allowed_cpus()
    performance = cores.performance_cpus(allowed)
    return {
        "cpus": os.cpu_count() or 1,
        "allowed": len(allowed),
        "performance": len(performance),
        "cores": len(set(cores.cores_of(performance).values())),
        "quota": cores.cgroup_cores() or None,
        "default": cores.default_threads(),
    }


def memory(huge_pages: Path = _HUGE_PAGES) -> dict[str, Any]:
    """``huge_pages``: always, madvise or never; None where the system has no such setting."""
    try:
        chosen = huge_pages.read_text().partition("[")[2].partition("]")[0] or None
    except OSError:
        chosen = None
    return {"available": available_bytes(), "huge_pages": chosen}


def measured(n_threads: int, store: KernelStore) -> dict[str, Any]:
    speed = measure_cpu(n_threads, store)
    return {"threads": n_threads, "read_bandwidth": speed.read, "dot_peak": speed.dots}


def kernel_store(place: Path | None) -> dict[str, Any]:
    """Where compiled kernels are kept; ``kernels`` and ``bytes`` are those this version can load,
    ``all_bytes`` also what other versions left."""
    if place is None:
        return {"place": None, "kernels": 0, "bytes": 0, "all_bytes": 0, "writable": False}
    mine = [path.stat().st_size for path in place.glob("*.obj")]
    everything = [path.stat().st_size for path in place.parent.glob("*/*.obj")]
    existing = next(p for p in (place, *place.parents) if p.exists())
    return {
        "place": str(place.parent),
        "kernels": len(mine),
        "bytes": sum(mine),
        "all_bytes": sum(everything),
        "writable": _is_writable(existing),
    }


def _is_writable(folder: Path) -> bool:
    """By writing: permissions say nothing of file systems that take no files."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def gpu() -> dict[str, Any]:
    """What the driver says is there, what can be used of it, and why not."""
    devices, reason = open_gpus()
    usable = []
    for name, device in devices.items():
        free, total = device.memory()
        usable.append({
            "place": name, "name": device.name, "free": free, "total": total,
            "compute_capability": ".".join(map(str, device.cc)),
        })  # fmt: skip
    return {"found": nvidia_names(), "usable": usable, "used": bool(usable), "why": reason}


def advice(facts: dict[str, Any]) -> str:
    """The one thing that matters most on this machine, in a sentence."""
    cpu, threads, store = facts["cpu"], facts["threads"], facts["kernel_store"]
    best = cpu["usable_targets"][0]
    if cpu["target"] != best:
        return f"EDGELLM_TARGET chooses {cpu['target']}; unset it, this CPU can run {best}."
    if store["place"] is None:
        return (
            "EDGELLM_KERNEL_STORE=off makes every start compile its kernels; unset it to keep them."
        )
    if not store["writable"]:
        return (
            f"{store['place']} cannot be written, so every start compiles its kernels; name "
            "another folder in EDGELLM_KERNEL_STORE."
        )
    if threads["quota"] and threads["quota"] < threads["cores"]:
        return (
            f"The CPU quota of this container is {threads['quota']} of {threads['cores']} cores; "
            "a larger one makes prompts faster."
        )
    if facts["memory"]["huge_pages"] == "never":
        return (
            "Huge pages are off; as root, `echo madvise > "
            "/sys/kernel/mm/transparent_hugepage/enabled` makes weights stream faster."
        )
    if cpu["target"] == "generic":
        return (
            "This CPU has no vector instructions edgellm knows; small models are the best choice."
        )
    one, all_of_them = facts["measured"][0], facts["measured"][-1]
    ceiling = all_of_them["read_bandwidth"] / 1e9
    said = (
        f"All is well. Decoding reads all weights for each token: at most {ceiling:.0f} tokens/s "
        "for each GB of a model that is not cached."
    )
    if len(facts["measured"]) > 1 and one["read_bandwidth"] > 0.9 * all_of_them["read_bandwidth"]:
        said += " One thread reads about as fast as all; the others speed up prompts and batches."
    return said
