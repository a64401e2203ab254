"""Which cores a draft model may have: only those that the target leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgellm.errors import EdgeLLMError


@dataclass(frozen=True)
class Share:
    """Threads, and the CPUs that they stay on; none: wherever the system puts them."""

    n_threads: int
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class Division:
    """``is_apart``: both compute at the same time. Else they take turns on the same cores."""

    target: Share
    draft: Share
    is_apart: bool


def divide(
    cores: Sequence[int], target: Share, is_asked: bool, is_on_gpu: bool,
    n_threads: int | None = None, draft_cpus: tuple[int, ...] = (),
) -> Division:  # fmt: skip
    """``cores``: a CPU of each core that the process may use. The target takes ``target``: what it
    was asked to where ``is_asked``, else all cores. ``n_threads`` and ``draft_cpus``: what the
    draft model was asked to take."""
    if draft_cpus:
        rest = [c for c in target.cpus or cores if c not in draft_cpus]
        if shared := sorted(set(target.cpus) & set(draft_cpus)):
            raise EdgeLLMError(
                f"CPU {shared[0]} is both the target's (-C) and the draft model's (--draft-cores)."
            )
        if not rest:
            raise EdgeLLMError("--draft-cores leaves the target no core: name fewer.")
        n_draft = min(n_threads or len(draft_cpus), len(draft_cpus))
        share = Share(min(target.n_threads, len(rest)), tuple(rest))
        return Division(share, Share(n_draft, draft_cpus), True)
    taken = set(target.cpus) or set(cores[: target.n_threads])
    if is_on_gpu and not is_asked:
        taken = set(cores[:1])  # for the thread that drives the GPU
    spare = tuple(c for c in cores if c not in taken)
    if not spare:
        n_draft = min(n_threads or target.n_threads, len(cores))
        return Division(target, Share(n_draft, target.cpus), False)
    spare = spare[: n_threads or len(spare)]
    if is_on_gpu:
        return Division(target, Share(len(spare), spare), True)
    return Division(Share(target.n_threads, tuple(sorted(taken))), Share(len(spare), spare), True)
