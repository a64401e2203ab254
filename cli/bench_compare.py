"""edgellm bench compare: what two loads of a server differ in, beyond chance."""

from typing import Annotated

import typer

from edgellm.cli._bench_report import table
from edgellm.cli._output import write
from edgellm.errors import EdgeLLMError

SLOWER = 1  # exit code: something is
LATENCIES, PERCENTILES = ("ttft", "tpot", "gap", "e2e"), (50, 95, 99)


def command(
    old: Annotated[str, typer.Argument(metavar="OLD", help="Records of a run.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Records of another.")],
) -> None:
    """Compare the records of two loads (`--records` of `bench http` and `bench serve-sim`).

    \b
    Each ratio new / old has its 95 % interval, from a bootstrap over requests; slower or faster is
    said only when the whole interval says so. The exit code is 1 when anything is slower. Files of
    repeated, interleaved runs can be put together (cat). Example:
      edgellm bench compare old.jsonl new.jsonl
    """
    from edgellm import serving_records
    from edgellm.bootstrap import ratio_of_quantiles

    both = [[r for r in serving_records.read(path) if r.is_complete] for path in (old, new)]
    for path, records in zip((old, new), both, strict=True):
        if not records:
            raise EdgeLLMError(f"{path} holds no request that was completed.")
    lines, is_slower = [], False
    for name in LATENCIES:
        values = [serving_records.values_of(records, name) for records in both]
        if not all(values):
            continue
        for q in PERCENTILES:
            ratio = ratio_of_quantiles(values[1], values[0], q)
            # of times, where more is worse
            verdict = {"slower": "faster", "faster": "slower"}.get(ratio.verdict, "same")
            is_slower |= verdict == "slower"
            lines.append([f"{name.upper() if name != 'gap' else name} P{q}", str(ratio), verdict])
    counts = " and ".join(str(len(records)) for records in both)
    write(table(["new / old", "ratio (95 % interval)", ""], lines))
    write(f"\n{counts} completed requests.\n")
    if is_slower:
        raise typer.Exit(SLOWER)
