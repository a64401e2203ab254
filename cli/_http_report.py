"""The report of `edgellm bench http` for people."""

from typing import TYPE_CHECKING

from edgellm.cli import _load_report

if TYPE_CHECKING:
    from edgellm.serving_records import Report


def as_markdown(report: "Report", facts: _load_report.Facts) -> str:
    return f"{_load_report.as_markdown(report)}\n{_about(report, facts)}"


def _about(report: "Report", facts: _load_report.Facts) -> str:
    clients = facts["clients"]
    how = f"{clients} clients in a closed loop" if clients else "arrivals by the plan"
    seconds = sum(row["seconds"] for row in report.rows if row["kind"] == "all")
    return (
        f"{facts['url']} ({facts['model']}), {facts['scenario']}, seed {facts['seed']}: {how}, "
        f"{facts['planned']} requests planned, {seconds:.0f} s, SLO "
        f"{_load_report.limits(facts['slo'])}.\n"
        f"Planned for {report.facts['speed_prefill']:.0f} prompt tokens/s and "
        f"{report.facts['speed_decode']:.0f} of answers; lengths are {report.facts['scale']:g} of "
        f"their share of a context of {facts['n_ctx']}.\n"
        f"Synthetic prompts of arbitrary words; greedy, answers of a fixed length.\n"
    )
