"""Reports of `edgellm bench` in files, and what has changed between two of them."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.bootstrap import Ratio, ratio_of_means
from edgellm.errors import EdgeLLMError

Rows = list[dict[str, Any]]
_NEEDED = ("test", "model_filename", "samples_ts", "cpu_info", "target", "n_threads")
_MADE_WITH = ("cpu_info", "target", "n_threads", "type_k", "type_v")


@dataclass(frozen=True)
class Change:
    """One test in two reports; speeds in tokens/s, ``ratio`` is new / old."""

    test: str
    old: float
    new: float
    ratio: Ratio


def check_place(path: str) -> None:
    """Raises what would keep ``save`` from writing there, before anything is measured."""
    if os.path.exists(path):
        load(path)
    elif not os.path.isdir(folder := os.path.dirname(path) or "."):
        raise EdgeLLMError(f"The report cannot be written to {path} (--save): no folder {folder}.")


def save(path: str, rows: Rows) -> None:
    """Write a report; rows of other models that the file holds stay, so that one file can be the
    baseline of several models."""
    mine = {_model(row) for row in rows}
    kept = [row for row in load(path) if _model(row) not in mine] if os.path.exists(path) else []
    try:
        Path(path).write_text(json.dumps([*kept, *rows], indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise EdgeLLMError(
            f"The report cannot be written to {path} (--save): {error.strerror}."
        ) from None


def load(path: str) -> Rows:
    """A report that ``save`` or `edgellm bench -o json` wrote."""
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise EdgeLLMError(f"The report {path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise EdgeLLMError(
            f"{path} is no report: it is not JSON; write one with `edgellm bench --save`."
        ) from None
    if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
        raise EdgeLLMError(
            f"{path} is no report of edgellm bench; write one with `edgellm bench --save`."
        )
    return rows


def _is_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and all(key in row for key in _NEEDED)
        and isinstance(row["test"], str)
        and isinstance(row["samples_ts"], list)
        and len(row["samples_ts"]) > 0
        and all(isinstance(x, int | float) and 0 < x < math.inf for x in row["samples_ts"])
    )


def _model(row: dict[str, Any]) -> str:
    return os.path.basename(str(row["model_filename"]))


def compare(new: Rows, old: Rows) -> tuple[list[Change], list[str]]:
    """Changes of the tests that both reports have, and what makes them hard to compare."""
    by_test = {(_model(row), row["test"]): row for row in old}
    pairs = [
        (row, by_test[_model(row), row["test"]])
        for row in new
        if (_model(row), row["test"]) in by_test
    ]
    if not pairs:
        raise EdgeLLMError(
            "The two reports have no test of this model in common; measure the same -p, -n, -d "
            "and --batch."
        )
    notes = [
        f"The old report was measured with {key} {old_row[key]}, this one with {new_row[key]}."
        for new_row, old_row in pairs[:1]
        for key in _MADE_WITH
        if key in old_row and key in new_row and new_row[key] != old_row[key]
    ]
    changes = [
        Change(
            row["test"],
            sum(before["samples_ts"]) / len(before["samples_ts"]),
            sum(row["samples_ts"]) / len(row["samples_ts"]),
            ratio_of_means(row["samples_ts"], before["samples_ts"]),
        )
        for row, before in pairs
    ]
    return changes, notes
