"""edgellm bench http: how a server serves many at once, over HTTP."""

import json
from pathlib import Path
from typing import Annotated

import typer

from edgellm.api_keys import sent_key
from edgellm.cli import _http_report, _load_report
from edgellm.cli._load_options import Rate, Requests, Scenario, Seed
from edgellm.cli._options import one_of, positive
from edgellm.cli._output import Status, say, visible, write

FORMATS = {
    "md": _http_report.as_markdown, "json": _load_report.as_json, "csv": _load_report.as_csv,
}  # fmt: skip
MISSED = 1  # exit code: an SLO was, or a request failed


def _object(text: str) -> str:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise typer.BadParameter("must be a JSON object")
    return text


def _two(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        prefill, decode = map(float, text.split(","))
    except ValueError:
        raise typer.BadParameter("must be two numbers, as 200,60") from None
    if not (prefill > 0 and decode > 0):
        raise typer.BadParameter("must be two numbers above 0")
    return text


def command(
    url: Annotated[str, typer.Argument(metavar="URL", help="As http://127.0.0.1:8080.")],
    scenario: Scenario = "mix",
    requests: Requests = None,
    rate: Rate = None,
    duration: Annotated[
        float | None,
        typer.Option("--duration", callback=positive, metavar="SECONDS", show_default=False,
                     help="Begin requests for so long."),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option("--clients", min=1, show_default=False,
                     help="A closed loop: so many clients that send their next request when they "
                     "have an answer."),
    ] = None,
    seed: Seed = 0,
    speed: Annotated[
        str | None,
        typer.Option("--speed", metavar="P,D", callback=_two, show_default=False,
                     help="Prompt and answer tokens/s to plan for, instead of what is measured "
                     "first: runs with the same plan can be compared."),
    ] = None,
    endpoint: Annotated[
        str, typer.Option("--endpoint", callback=one_of(("chat", "completions")),
                          help="chat or completions."),
    ] = "chat",
    model_name: Annotated[
        str, typer.Option("--model-name", help="The server's name of the model; else its first.")
    ] = "",
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", help="The first line is sent; else OPENAI_API_KEY is."),
    ] = None,
    body: Annotated[
        str,
        typer.Option("--body", metavar="JSON", callback=_object,
                     help="More fields of each request, for servers that want others."),
    ] = "{}",
    ctx_size: Annotated[
        int | None,
        typer.Option("-c", "--ctx-size", min=64, show_default=False,
                     help="Context that lengths are shares of; else what the server says, at most "
                     "2048."),
    ] = None,
    parallel: Annotated[
        int, typer.Option("-np", "--parallel", min=1, help="Requests it is thought to run at once.")
    ] = 8,
    timeout: Annotated[
        float, typer.Option("-to", "--timeout", callback=positive, help="Seconds for an answer.")
    ] = 600.0,
    slo: Annotated[
        Path | None,
        typer.Option("--slo", metavar="FILE", show_default=False,
                     help="TOML of milliseconds: ttft, tpot and e2e, each a number (of 95 %) or "
                     "{p50 = ..., p95 = ..., p99 = ...}."),
    ] = None,
    output: Annotated[
        str, typer.Option("-o", "--output", callback=one_of(FORMATS), help="md, json or csv.")
    ] = "md",
    records: Annotated[
        str | None,
        typer.Option("--records", metavar="FILE",
                     help="Write what became of each request; `bench compare` reads two."),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE.png", help="Draw latencies over time."),
    ] = None,
) -> None:  # fmt: skip
    """Load an OpenAI-style server and report latencies, throughput and goodput.

    \b
    Requests come by a plan, whether or not the server keeps up. The exit code is 1 when an SLO is
    missed or a request fails; being told to come again later (429, 503) is no failure. Examples:
      edgellm bench http http://127.0.0.1:8080
      edgellm bench http http://127.0.0.1:8080 --scenario burst --slo slo.toml --picture load.png
      edgellm bench http http://127.0.0.1:8080 --clients 32 --duration 180 --speed 200,60
      edgellm bench http http://127.0.0.1:8080 --rate 10 --duration 60 --records new.jsonl
    """
    from edgellm.remote import address
    from edgellm.workloads import SCENARIOS, find

    if scenario == "list":
        write("".join(f"{s.name:12} {s.about}\n" for s in SCENARIOS.values()))
        return
    find(scenario)
    root = address(url)
    if picture is not None:
        from edgellm.pictures import check

        check(picture)

    import asyncio

    from edgellm import http_bench, serving_records
    from edgellm.http_load import Load, Server
    from edgellm.workloads import Speed

    limits = serving_records.SLO.read(slo) if slo is not None else serving_records.SLO()
    key = sent_key(api_key_file)
    server = Server(root, model_name, endpoint, key, json.loads(body), timeout)
    status = Status()
    try:
        plan = http_bench.Plan(
            scenario, seed, requests, rate, duration, clients, ctx_size, parallel,
            Speed(*map(float, speed.split(","))) if speed is not None else None,
        )  # fmt: skip
        load = Load(server, status.on_terminal)
        report, facts = asyncio.run(http_bench.measure(load, plan, limits))
    finally:
        status.clear()
    if records is not None:
        serving_records.write(records, report.records)
    if picture is not None:
        from edgellm.load_picture import draw

        draw(picture, report.records)
    write(FORMATS[output](report, facts))
    for said, n in load.errors.most_common(5):
        say(visible(f"{n} failed: {said}"))
    missed = limits.missed(serving_records.summary(report.judged, 1.0))
    for sentence in missed:
        say(f"SLO missed: {sentence}.")
    if missed or load.errors:
        raise typer.Exit(MISSED)
