"""edgellm bench serve-sim: how a model serves many at once, in one process."""

from typing import Annotated

import typer

from edgellm.cli import _load_report, _model, _sim_report
from edgellm.cli._load_options import Rate, Requests, Scenario, Seed
from edgellm.cli._options import (
    CpuMask,
    Model,
    ModelFlag,
    Threads,
    one_of,
    positive,
    threads_or_none,
)
from edgellm.cli._output import Status, say, visible, write

FORMATS = {
    "md": _sim_report.as_markdown, "json": _load_report.as_json, "csv": _load_report.as_csv,
}  # fmt: skip
MISSED = 1  # exit code: an SLO was


def command(
    model_argument: Model = None,
    model: ModelFlag = None,
    scenario: Scenario = "mix",
    requests: Requests = None,
    rate: Rate = None,
    seed: Seed = 0,
    slo_ttft: Annotated[
        float | None,
        typer.Option("--slo-ttft", metavar="MS", callback=positive, show_default=False,
                     help="Most milliseconds to the first token."),
    ] = None,
    slo_tpot: Annotated[
        float | None,
        typer.Option("--slo-tpot", metavar="MS", callback=positive, show_default=False,
                     help="Most milliseconds for a token after the first."),
    ] = None,
    static: Annotated[
        bool,
        typer.Option("--static", help="For comparison: a new batch only when the last is done."),
    ] = False,
    ctx_size: Annotated[
        int, typer.Option("-c", "--ctx-size", min=64, help="Context of a request; lengths follow.")
    ] = 2048,
    parallel: Annotated[
        int, typer.Option("-np", "--parallel", min=1, help="Requests that run together.")
    ] = 8,
    threads: Threads = -1,
    cpu_mask: CpuMask = None,
    output: Annotated[
        str, typer.Option("-o", "--output", callback=one_of(FORMATS), help="md, json or csv.")
    ] = "md",
    records: Annotated[
        str | None,
        typer.Option("--records", metavar="FILE", help="Write what became of each request."),
    ] = None,
) -> None:  # fmt: skip
    """Serve requests that arrive by a plan and report latencies, throughput and goodput.

    \b
    An SLO is met when 95 % of the requests keep to it; the exit code is 1 when one is missed.
    Examples:
      edgellm bench serve-sim model.gguf
      edgellm bench serve-sim model.gguf --scenario chat5
      edgellm bench serve-sim model.gguf --rate inf --static
      edgellm bench serve-sim model.gguf --slo-ttft 1000 --slo-tpot 80 -o json
    """
    from edgellm.workloads import SCENARIOS, find

    if scenario == "list":
        write("".join(f"{s.name:12} {s.about}\n" for s in SCENARIOS.values()))
        return
    find(scenario)
    path = _model.locate(_model.pick(model_argument, model))

    from edgellm import serving_records
    from edgellm.bench import machine
    from edgellm.llm import LLM
    from edgellm.simulation import Simulation, config, simulate

    slo = serving_records.SLO(
        slo_ttft and slo_ttft / 1e3, slo_tpot and slo_tpot / 1e3  # of None: None
    )  # fmt: skip
    status = Status()
    try:
        with LLM(
            path, n_ctx=ctx_size, n_threads=threads_or_none(threads), cpu_mask=cpu_mask,
            max_num_seqs=parallel, progress=status.on_terminal,
        ) as llm:  # fmt: skip
            notices = llm.notices
            simulation = Simulation(llm, static, status.on_terminal)
            report = simulate(simulation, scenario, seed, requests, rate, slo)
            facts = {**machine(llm), **config(llm, scenario, seed, static, slo)}
    finally:
        status.clear()
    for notice in notices:
        say(visible(notice))
    write(FORMATS[output](report, facts))
    if records is not None:
        serving_records.write(records, report.records)
    missed = slo.missed(serving_records.summary(report.judged, 1.0))
    for sentence in missed:
        say(f"SLO missed: {sentence}.")
    if missed:
        raise typer.Exit(MISSED)
