"""The report of `edgellm bench serve-sim` in its formats."""

import csv
import io
import json
from typing import TYPE_CHECKING, Any

from edgellm.cli._bench_report import table

if TYPE_CHECKING:
    from edgellm.simulation import Report

Facts = dict[str, Any]
_SHOWN = ("mean", "p50", "p95", "p99")


def as_json(report: "Report", facts: Facts) -> str:
    found = {"config": facts, "rows": report.rows, "facts": report.facts, "notes": report.notes}
    return json.dumps(found, indent=1) + "\n"


def as_csv(report: "Report", facts: Facts) -> str:
    """One line for each row; a latency's parts are columns, as ttft_p95."""
    rows = [_flat(row) for row in report.rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= {f"{key}_{part}": v for part, v in value.items()}
        else:
            found[key] = value
    return found


def as_markdown(report: "Report", facts: Facts) -> str:
    return "\n".join(
        [_latencies(report.rows), _throughput(report.rows), *map(_line, report.notes),
         _about(report, facts)]
    )  # fmt: skip


def _line(note: str) -> str:
    return note + "\n"


def _name(row: dict[str, Any]) -> str:
    return row["phase"] if row["kind"] == "all" else f"· {row['kind']}"


def _latencies(rows: list[dict[str, Any]]) -> str:
    """Milliseconds."""
    head = ["ms: mean / P50 / P95 / P99", "n", "TTFT", "TPOT", "gap", "jitter", "queue wait",
            "max wait"]  # fmt: skip
    lines = [
        [_name(row), str(row["requests"]),
         *(_points(row[name]) for name in ("ttft", "tpot", "gap", "jitter", "wait")),
         _ms(row["wait"]["max"])]
        for row in rows
    ]  # fmt: skip
    return table(head, lines)


def _points(of: dict[str, Any]) -> str:
    return " / ".join(_ms(of[part]) for part in _SHOWN)


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.1f}" if seconds < 0.01 else f"{1e3 * seconds:,.0f}"


def _throughput(rows: list[dict[str, Any]]) -> str:
    head = ["", "done", "cancelled", "failed", "prompt t/s", "generated t/s", "hit rate",
            "in SLO", "goodput req/s", "preempted: memory", "priority"]  # fmt: skip
    lines = []
    for row in rows:
        counted = row.get("counted")
        causes = [str(int(counted[f"preempted_by_{c}"])) if counted else ""
                  for c in ("memory", "priority")]  # fmt: skip
        lines.append(
            [_name(row), str(row["completed"]), str(row["cancelled"]), str(row["failed"]),
             f"{row['prompt_tokens_per_second']:.1f}", f"{row['generated_tokens_per_second']:.1f}",
             f"{100 * row['hit_rate']:.1f} %", f"{100 * row['of_good']:.0f} %",
             f"{row['goodput']:.2f}", *causes]
        )  # fmt: skip
    return table(head, lines)


def _about(report: "Report", facts: Facts) -> str:
    counted = [row["counted"] for row in report.rows if "counted" in row]
    steps = sum(c["steps"] for c in counted) or 1
    beside = sum(c["schedule_seconds"] + c["update_seconds"] for c in counted)
    seconds = sum(row["seconds"] for row in report.rows if "counted" in row)
    slo = ", ".join(f"{name} {limit:g} ms" for name, limit in facts["slo"].items() if limit)
    how = "static batches" if facts["static"] else "continuous batching"
    return (
        f"{facts['model_filename']}, {facts['cpu_info']}, {facts['target']}, "
        f"{facts['n_threads']} threads: {how} of {facts['max_num_seqs']}, context "
        f"{facts['n_ctx']}, seed {facts['seed']}, SLO {slo or 'none'}.\n"
        f"{seconds:.0f} s, {int(steps)} steps; scheduling and sampling took "
        f"{1e6 * beside / steps:.0f} us of each. Alone it computes "
        f"{report.facts['speed_prefill']:.0f} prompt tokens/s, and "
        f"{report.facts['speed_decode']:.0f} generated with all seats taken; lengths are "
        f"{report.facts['scale']:g} of their share of the context.\n"
        f"Synthetic prompts of arbitrary tokens; greedy, answers of a fixed length.\n"
        f"{facts['build']}\n"
    )
