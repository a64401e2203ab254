"""The report of `edgellm bench` in its formats."""

import csv
import io
import json
from typing import TYPE_CHECKING, Any

from edgellm.cli._output import size

if TYPE_CHECKING:
    from edgellm.baseline import Change

Rows = list[dict[str, Any]]


def as_json(rows: Rows) -> str:
    return json.dumps(rows, indent=1) + "\n"


def as_csv(rows: Rows) -> str:
    """One line a test; lists and tables within a row are left to JSON."""
    plain = [key for key, value in rows[0].items() if not isinstance(value, list | dict)]
    out = io.StringIO()
    writer = csv.DictWriter(out, plain, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_markdown(rows: Rows) -> str:
    """llama-bench's table with three columns more, the table of widths, and the machine."""
    first = rows[0]
    head = ["model", "size", "params", "backend", "threads", "test", "t/s",
            "of bandwidth", "of dot peak", "bottleneck"]  # fmt: skip
    has_energy = any(row["tokens_per_joule"] for row in rows)
    lines = [
        [
            first["model_type"], size(first["model_size"]),
            f"{first['model_n_params'] / 1e6:,.0f} M", _backend(first),
            str(first["n_threads"]), row["test"],
            f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}", *_limits(row),
            *([f"{row['tokens_per_joule'] or 0:.2f}"] if has_energy else []),
        ]
        for row in rows
        if not _is_width(row)
    ]  # fmt: skip
    parts = [table(head + ["tokens/J"] * has_energy, lines)] if lines else []
    if widths := [row for row in rows if _is_width(row)]:
        parts.append(_widths(widths))
    return "\n".join([*parts, _machine(rows)])


def _backend(row: dict[str, Any]) -> str:
    cpu = f"CPU {row['target']}"
    if not row.get("n_gpu_layers"):
        return cpu
    return f"{row['gpu_info']} (ngl {row['n_gpu_layers']}), {cpu}"


def _is_width(row: dict[str, Any]) -> bool:
    return bool(row["is_width"])


def _limits(row: dict[str, Any]) -> list[str]:
    return [f"{100 * row['of_bandwidth']:.0f} %", f"{100 * row['of_dot_peak']:.0f} %",
            row["bottleneck"]]  # fmt: skip


def _widths(rows: Rows) -> str:
    """One decode step of several sequences together."""
    head = ["sequences", "ms/step", "t/s", "times one", "of bandwidth", "of dot peak", "bottleneck"]
    one = next((row["avg_ts"] for row in rows if row["n_seqs"] == 1), 0.0)
    lines = [
        [
            str(row["n_seqs"]), f"{row['step_ms']:.2f}",
            f"{row['avg_ts']:.1f} ± {row['stddev_ts']:.1f}",
            f"{row['avg_ts'] / one:.2f}" if one else "",
            *_limits(row),
        ]
        for row in rows
    ]  # fmt: skip
    return table(head, lines)


def table(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table, padded so that it can be read as it is."""
    widths = [max(len(cell) for cell in column) for column in zip(head, *lines, strict=True)]

    def line(cells: list[str]) -> str:
        padded = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
        return f"| {' | '.join(padded)} |\n"

    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|\n"
    return line(head) + rule + "".join(line(cells) for cells in lines)


def _machine(rows: Rows) -> str:
    first = rows[0]
    read = sorted(row["read_bandwidth"] for row in rows)[len(rows) // 2]
    dot = sorted(row["dot_peak"] for row in rows)[len(rows) // 2]
    kernels = ", ".join(f"{kind} {kernel}" for kind, kernel in first["kernels"].items())
    return (
        f"{first['cpu_info']}, {first['target']}, {first['n_threads']} threads: reads "
        f"{read / 1e9:.1f} GB/s, multiplies {dot / 1e9:.0f} G/s.\n"
        f"Peak memory {size(first['peak_memory'])}, "
        f"{first['peak_memory'] / first['model_size']:.2f} times the model's weights, with the "
        f"cache of the longest test: keys {first['type_k']}, values {first['type_v']}.\n"
        f"Beside kernels goes {100 * first['beside_kernels']['greedy']:.1f} % of a token's time "
        f"(sampling, text, bookkeeping), {100 * first['beside_kernels']['sampled']:.1f} % with the "
        f"default samplers.\n"
        f"Kernels: {kernels}.\n{first['build']}\n"
    )


def changes_table(changes: "list[Change]") -> str:
    """What --compare found."""
    head = ["test", "before t/s", "now t/s", "ratio (95 %)", "verdict"]
    lines = [
        [c.test, f"{c.old:.2f}", f"{c.new:.2f}", str(c.ratio), c.ratio.verdict] for c in changes
    ]
    return table(head, lines)
