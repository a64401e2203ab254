"""Loading a model for a command."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.cli._offload import OffloadFlags
from edgellm.cli._options import threads_or_none
from edgellm.cli._output import Status, say, visible
from edgellm.cli._prompt_options import prestart_helper
from edgellm.cli._speculation import SpeculationFlags

if TYPE_CHECKING:
    from edgellm.llm import LLM


def load(
    path: Path,
    ctx_size: int,
    threads: int,
    template: str | None = None,
    plain: bool = False,
    parallel: int = 1,
    policy: str = "error",
    cpu_mask: str | None = None,
    overrides: dict[str, Any] | None = None,
    cache_types: tuple[str, str] = ("f16", "f16"),
    tell: Callable[[str], object] | None = None,
    offload: OffloadFlags | None = None,
    speculation: SpeculationFlags | None = None,
) -> "LLM":
    """The model, with progress and notices on stderr; with ``tell`` it gets the notices alone."""
    prestart_helper(path, template)

    from edgellm.llm import LLM

    guesses = None
    if speculation is not None:
        guesses = speculation.options(path)
        speculation.report(guesses)
    status = Status(plain)
    try:
        llm = LLM(
            path,
            n_ctx=ctx_size or None,
            n_threads=threads_or_none(threads),
            cpu_mask=cpu_mask,
            max_num_seqs=parallel,
            type_k=cache_types[0],
            type_v=cache_types[1],
            context_policy=policy,
            progress=status if tell is None else None,
            offload=None if offload is None else offload.options,
            speculation=guesses,
            **(overrides or {}),
        )
    finally:
        status.clear()
    for notice in llm.notices:
        (tell or say)(visible(notice))
    if offload is not None:
        offload.report(llm)
    return llm


def what_was_dropped(llm: "LLM") -> str:
    """Under the policy ring, a sentence about what the end of the answer no longer saw, or ""."""
    if not llm.n_dropped:
        return ""
    return f"{llm.n_dropped:,} tokens have left the context of {llm.n_ctx:,} (policy ring)."
