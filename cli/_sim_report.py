"""The report of `edgellm bench serve-sim` for people."""

from typing import TYPE_CHECKING

from edgellm.cli import _load_report

if TYPE_CHECKING:
    from edgellm.serving_records import Report


def as_markdown(report: "Report", facts: _load_report.Facts) -> str:
    return f"{_load_report.as_markdown(report)}\n{_about(report, facts)}"


def _about(report: "Report", facts: _load_report.Facts) -> str:
    counted = [row["counted"] for row in report.rows if "counted" in row]
    steps = sum(c["steps"] for c in counted) or 1
    beside = sum(c["schedule_seconds"] + c["update_seconds"] for c in counted)
    seconds = sum(row["seconds"] for row in report.rows if "counted" in row)
    slo = _load_report.limits(facts["slo"])
    how = "static batches" if facts["static"] else "continuous batching"
    return (
        f"{facts['model_filename']}, {facts['cpu_info']}, {facts['target']}, "
        f"{facts['n_threads']} threads: {how} of {facts['max_num_seqs']}, context "
        f"{facts['n_ctx']}, seed {facts['seed']}, SLO {slo}.\n"
        f"{seconds:.0f} s, {int(steps)} steps; scheduling and sampling took "
        f"{1e6 * beside / steps:.0f} us of each. Alone it computes "
        f"{report.facts['speed_prefill']:.0f} prompt tokens/s, and "
        f"{report.facts['speed_decode']:.0f} generated with all seats taken; lengths are "
        f"{report.facts['scale']:g} of their share of the context.\n"
        f"Synthetic prompts of arbitrary tokens; greedy, answers of a fixed length.\n"
        f"{facts['build']}\n"
    )
