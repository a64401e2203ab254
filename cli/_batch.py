"""edgellm run --batch: the files, the engine and the progress line."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer

from edgellm.cli._offload import OffloadFlags
from edgellm.cli._output import Status, say
from edgellm.cli._prompt_options import template_variables
from edgellm.cli._prompt_tokens import (
    has_template,
    message_tokens,
    no_system_message,
    prompt_tokens,
)
from edgellm.cli._speculation import SpeculationFlags
from edgellm.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.batch import Progress
    from edgellm.llm import LLM
    from edgellm.sampling_params import SamplingParams

AT_ONCE = 8


@dataclass(frozen=True)
class Shape:
    """How a request becomes what the model reads."""

    system: str | None
    raw: bool
    chat_template: str | None
    template_arguments: str | None
    reasoning: str


def open_batch(batch: str | None, out: str | None, has_prompt: bool) -> BinaryIO:
    """The lines of --batch. Refuses what does not go with it."""
    if batch is None or out is None:
        raise typer.BadParameter("one is given without the other", param_hint="'--batch' / '--out'")
    if has_prompt:
        raise typer.BadParameter(
            "a prompt is given as well; the prompts are in the file", param_hint="'--batch'"
        )
    if batch == "-":
        return sys.stdin.buffer
    try:
        if os.path.exists(out) and os.path.samefile(batch, out):
            raise typer.BadParameter("it is the file of --batch", param_hint="'--out'")
        if os.path.exists(batch) and not os.path.isfile(batch):
            raise typer.BadParameter(f"{batch} is not a regular file", param_hint="'--batch'")
        return open(batch, "rb")
    except OSError as error:
        raise typer.BadParameter(
            f"{batch}: {error.strerror or error}", param_hint="'--batch'"
        ) from None


def run_batch(
    path: Path,
    source: BinaryIO,
    out: str,
    params: "SamplingParams",
    shape: Shape,
    resources: tuple[int, int, int, str, str | None, tuple[str, str]],
    overrides: dict[str, Any],
    offload: OffloadFlags,
    speculation: SpeculationFlags,
) -> None:
    """Answer what has no answer yet. Raises BatchFailed at the end if any line failed."""
    from edgellm import batch
    from edgellm.cli._engine import load

    ctx_size, threads, parallel, policy, cpu_mask, cache_types = resources
    results = batch.Results(out)
    parallel = AT_ONCE if parallel == -1 else parallel
    status, report = _reporter()
    try:
        with (
            source,
            load(
                path,
                ctx_size,
                threads,
                shape.chat_template,
                parallel=parallel,
                policy=policy,
                cpu_mask=cpu_mask,
                overrides=overrides,
                cache_types=cache_types,
                offload=offload,
                speculation=speculation,
            ) as llm,
        ):
            if shape.system is not None and not has_template(llm, shape.chat_template):
                raise no_system_message("the model has no chat template")
            progress = batch.run(llm, source, results, params, _encoder(llm, shape), report)
    finally:
        status.clear()
        results.close()
    say(f"{progress}.")
    if failed := progress.failed + results.n_failed:
        lines = "1 line" if failed == 1 else f"{failed} lines"
        raise batch.BatchFailed(
            f'{lines} failed: see "error" in {out}; remove those to try them again.'
        )


def _encoder(llm: "LLM", shape: Shape) -> Any:
    variables = template_variables(shape.template_arguments, shape.reasoning)
    raw = shape.raw or not has_template(llm, shape.chat_template)
    if raw and not shape.raw:
        say("The model has no chat template: it continues the prompts as they are.")

    def encode(body: dict[str, Any]) -> list[int]:
        if "prompt" in body:
            return prompt_tokens(
                llm, body["prompt"], shape.system, raw, shape.chat_template, variables
            )
        if raw:
            why = "--raw is given" if shape.raw else "the model has no chat template"
            raise EdgeLLMError(f"There are messages, but {why}: give a prompt.")
        messages = body["messages"]
        return message_tokens(llm, messages, shape.system, shape.chat_template, variables)

    return encode


def _reporter() -> tuple[Status, Any]:
    """A status line that is not written more often than can be read."""
    status = Status()
    pause = 0.5 if sys.stderr.isatty() else 10.0
    due = time.monotonic() + pause

    def report(progress: "Progress") -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + pause
            status(str(progress))

    return status, report
