"""What the reports of `edgellm bench serve-sim` and `bench http` share: formats and tables."""

import csv
import io
import json
from typing import TYPE_CHECKING, Any

from edgellm.cli._bench_report import table

if TYPE_CHECKING:
    from edgellm.serving_records import Report

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


def as_markdown(report: "Report") -> str:
    """Tables and notes."""
    notes = [note + "\n" for note in report.notes]
    return "\n".join([_latencies(report.rows), _throughput(report.rows), *notes])


def limits(slo: dict[str, float]) -> str:
    """An SLO in words."""
    found = (f"{name.replace('_', ' ').upper()} {ms:g} ms" for name, ms in slo.items())
    return ", ".join(found) or "none"


def _name(row: dict[str, Any]) -> str:
    return row["phase"] if row["kind"] == "all" else f"· {row['kind']}"


def _latencies(rows: list[dict[str, Any]]) -> str:
    """Milliseconds. A client does not know how long its request waited."""
    names = ["ttft", "tpot", "e2e", "gap", "jitter"]
    known = any("counted" in row for row in rows)
    titles = [name if name in ("gap", "jitter") else name.upper() for name in names]
    head = ["ms: mean / P50 / P95 / P99", "n", *titles]
    lines = [
        [_name(row), str(row["requests"]), *(_points(row[name]) for name in names)] for row in rows
    ]
    if known:
        head += ["queue wait", "max wait"]
        for line, row in zip(lines, rows, strict=True):
            line += [_points(row["wait"]), _ms(row["wait"]["max"])]
    return table(head, lines)


def _points(of: dict[str, Any]) -> str:
    return " / ".join(_ms(of[part]) for part in _SHOWN)


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.1f}" if seconds < 0.01 else f"{1e3 * seconds:,.0f}"


def _throughput(rows: list[dict[str, Any]]) -> str:
    head = ["", "done", "cancelled", "rejected", "failed", "prompt t/s", "generated t/s",
            "hit rate", "in SLO", "goodput req/s"]  # fmt: skip
    lines = [
        [_name(row), str(row["completed"]), str(row["cancelled"]), str(row["rejected"]),
         str(row["failed"]), f"{row['prompt_tokens_per_second']:.1f}",
         f"{row['generated_tokens_per_second']:.1f}", f"{100 * row['hit_rate']:.1f} %",
         f"{100 * row['of_good']:.0f} %", f"{row['goodput']:.2f}"]
        for row in rows
    ]  # fmt: skip
    if any("counted" in row for row in rows):
        head += ["preempted: memory", "priority"]
        for line, row in zip(lines, rows, strict=True):
            counted = row.get("counted", {})
            line += [str(int(counted[f"preempted_by_{cause}"])) if counted else ""
                     for cause in ("memory", "priority")]  # fmt: skip
    return table(head, lines)
