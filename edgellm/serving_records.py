"""What became of each request of a measurement, and the statistics of many of them.

Nothing here runs a model: records come from a simulation, or from a file, and every figure follows
from them alone. Times are seconds since the measurement began.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from edgellm.errors import EdgeLLMError

QUANTILES = (50, 95, 99)
LATENCIES = ("ttft", "tpot", "jitter", "wait", "e2e")  # fields of a summary with quantiles


@dataclass
class Record:
    """One request. ``tokens`` are the times at which its tokens came. ``n_cached`` of the prompt's
    tokens did not have to be computed."""

    kind: str
    n_prompt: int
    arrived: float
    priority: str = "interactive"
    turn: int = 0  # of a conversation, from 1
    n_cached: int = 0
    admitted: float | None = None
    tokens: list[float] = field(default_factory=list)
    finished: float | None = None
    finish_reason: str = ""
    n_preempted: int = 0
    n_counted: int = 0  # tokens, where a server counts them: a piece of text can be several

    @property
    def is_complete(self) -> bool:
        return self.finish_reason in ("stop", "length")

    @property
    def is_rejected(self) -> bool:
        """Told at once to come again later."""
        return self.finish_reason == "rejected"

    @property
    def n_output(self) -> int:
        """Tokens of the answer."""
        return self.n_counted or len(self.tokens)

    @property
    def is_cancelled(self) -> bool:
        """By its client, who does not care any more how fast it was."""
        return self.finish_reason == "abort"

    @property
    def ttft(self) -> float | None:
        """Time to the first token, the wait in the queue included."""
        return self.tokens[0] - self.arrived if self.tokens else None

    @property
    def tpot(self) -> float | None:
        """Time of a token after the first, on average."""
        n = self.n_output - 1
        return (self.tokens[-1] - self.tokens[0]) / n if n > 0 and self.tokens else None

    @property
    def gaps(self) -> list[float]:
        return [float(gap) for gap in np.diff(self.tokens)]

    @property
    def jitter(self) -> float | None:
        """Standard deviation of the gaps between tokens."""
        return float(np.std(self.gaps)) if len(self.tokens) > 2 else None

    @property
    def wait(self) -> float | None:
        """Time in the queue, until the end for those that were never begun; a client does not
        know it."""
        if self.admitted is None and self.tokens:
            return None
        until = self.admitted if self.admitted is not None else self.finished
        return until - self.arrived if until is not None else None

    @property
    def e2e(self) -> float | None:
        return self.finished - self.arrived if self.finished is not None else None


Quantile = tuple[str, int]  # latency, percentile


@dataclass(frozen=True)
class SLO:
    """Most seconds that a request may take to its first token, for each one after it, and in all;
    None: no matter. It is met as a whole when 95 % of the requests keep to it. ``others`` are
    limits of further quantiles, as 0.3 of ("ttft", 50)."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    others: tuple[tuple[Quantile, float], ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> SLO:
        """A TOML file of milliseconds: ``ttft = 1000`` or ``ttft = {p50 = 300, p95 = 1000}``, the
        same for ``tpot`` and ``e2e``. EdgeLLMError names what is wrong."""
        try:
            with open(path, "rb") as file:
                tables = tomllib.load(file)
        except OSError as error:
            raise EdgeLLMError(f"{path} (--slo): {error.strerror or error}.") from None
        except ValueError as error:
            raise EdgeLLMError(f"{path} (--slo) is not TOML: {error}.") from None
        limits: dict[str, float] = {}
        others: list[tuple[Quantile, float]] = []
        for name, value in tables.items():
            points = value if isinstance(value, dict) else {"p95": value}
            for point, ms in points.items():
                known = name in ("ttft", "tpot", "e2e") and point in [f"p{q}" for q in QUANTILES]
                if not known or isinstance(ms, bool) or not isinstance(ms, int | float) or ms <= 0:
                    raise EdgeLLMError(
                        f"{path} (--slo): {name}.{point} = {ms!r} is no limit; there are ttft, "
                        "tpot and e2e in milliseconds, each a number or p50, p95 and p99 of it."
                    )
                if point == "p95":
                    limits[name] = ms / 1e3
                else:
                    others.append(((name, int(point[1:])), ms / 1e3))
        return cls(**limits, others=tuple(others))

    def as_ms(self) -> dict[str, float]:
        """The limits that there are, as ``{"ttft_p95": 1000.0}``."""
        p95 = {f"{name}_p95": getattr(self, name) for name in ("ttft", "tpot", "e2e")}
        others = {f"{name}_p{q}": limit for (name, q), limit in self.others}
        return {name: 1e3 * v for name, v in (p95 | others).items() if v is not None}

    def is_met(self, record: Record) -> bool:
        """By one request. What has no second token cannot have been slow between two."""
        if not record.is_complete:
            return False
        is_quick = self.ttft is None or (record.ttft is not None and record.ttft <= self.ttft)
        is_short = self.e2e is None or (record.e2e is not None and record.e2e <= self.e2e)
        return is_quick and is_short and (self.tpot is None or (record.tpot or 0.0) <= self.tpot)

    def missed(self, summary: dict[str, Any]) -> list[str]:
        """What a summary misses, in words."""
        found = []
        p95 = [((name, 95), getattr(self, name)) for name in ("ttft", "tpot", "e2e")]
        for (name, q), limit in (*p95, *self.others):
            if limit is None:
                continue
            value = summary[name][f"p{q}"]
            if value is None:
                found.append(f"no request had a {name.upper()}")
            elif value > limit:
                found.append(
                    f"{name.upper()} P{q} is {1e3 * value:.0f} ms, more than {1e3 * limit:.0f}"
                )
        return found


def quantiles(values: Iterable[float | None]) -> dict[str, float | int | None]:
    """n, mean and percentiles of those that are there: a mean never comes alone."""
    found = np.array([v for v in values if v is not None], np.float64)
    if not len(found):
        return {"n": 0, "mean": None, **{f"p{q}": None for q in QUANTILES}, "max": None}
    points = np.percentile(found, QUANTILES)
    return {
        "n": len(found), "mean": float(found.mean()),
        **{f"p{q}": float(p) for q, p in zip(QUANTILES, points, strict=True)},
        "max": float(found.max()),
    }  # fmt: skip


def values_of(records: Iterable[Record], name: str) -> list[list[float]]:
    """A latency's values, or all gaps, of each request that has any."""
    if name == "gap":
        return [r.gaps for r in records if len(r.tokens) > 1]
    return [[value] for r in records if (value := getattr(r, name)) is not None]


def summary(records: list[Record], seconds: float, slo: SLO | None = None) -> dict[str, Any]:
    """Figures of the requests of a measurement that took so long."""
    slo, seconds = slo or SLO(), max(seconds, 1e-9)
    gaps = [gap for record in records for gap in record.gaps]
    begun = [r for r in records if r.admitted is not None or r.tokens]
    n_prompt, n_cached = sum(r.n_prompt for r in begun), sum(r.n_cached for r in begun)
    n_generated = sum(r.n_output for r in records)
    n_good = sum(map(slo.is_met, records))
    n_asked = sum(not r.is_cancelled for r in records)
    return {
        "requests": len(records),
        "completed": sum(r.is_complete for r in records),
        "cancelled": sum(r.is_cancelled for r in records),
        "rejected": sum(r.is_rejected for r in records),
        "failed": sum(not (r.is_complete or r.is_cancelled or r.is_rejected) for r in records),
        "seconds": seconds,
        **{name: quantiles(getattr(r, name) for r in records) for name in LATENCIES},
        "gap": quantiles(gaps),
        "pooled_jitter": float(np.std(gaps)) if gaps else None,
        "prompt_tokens": n_prompt,
        "prefill_tokens": n_prompt - n_cached,
        "generated_tokens": n_generated,
        "hit_rate": n_cached / n_prompt if n_prompt else 0.0,
        "prompt_tokens_per_second": n_prompt / seconds,
        "generated_tokens_per_second": n_generated / seconds,
        "good": n_good,
        "of_good": n_good / n_asked if n_asked else 0.0,
        "goodput": n_good / seconds,  # requests/s that met every SLO
        "preempted": sum(r.n_preempted for r in records),
    }


@dataclass
class Run:
    """Records, how long it took, and what the engine counted meanwhile, where it is known."""

    records: list[Record]
    seconds: float
    counted: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """``rows``: a summary of all requests of each phase, and of each kind of them. ``judged`` are
    the records that an SLO is for. ``notes`` are sentences about what the scenario is there for,
    ``facts`` the same as numbers."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    judged: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, run: Run, slo: SLO, is_judged: bool = True) -> None:
        """A phase. A batch request has nobody waiting, so no SLO is for it."""
        self.rows.append(
            {"phase": name, "kind": "all", **summary(run.records, run.seconds, slo),
             **({"counted": run.counted} if run.counted else {})}
        )  # fmt: skip
        kinds = sorted({r.kind for r in run.records})
        for kind in kinds if len(kinds) > 1 else []:
            of = [r for r in run.records if r.kind == kind]
            self.rows.append({"phase": name, "kind": kind, **summary(of, run.seconds, slo)})
        self.records += run.records
        if is_judged:
            self.judged += [r for r in run.records if r.priority == "interactive"]


def write(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    """One JSON object a line."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(record)) + "\n" for record in records)
    except OSError as error:
        raise EdgeLLMError(f"{path}: {error.strerror or error} (--records).") from None


def read(path: str | os.PathLike[str]) -> list[Record]:
    """What ``write`` wrote. EdgeLLMError for anything else."""
    names = {f.name for f in fields(Record)}
    try:
        with open(path, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        return [Record(**{k: v for k, v in row.items() if k in names}) for row in rows]
    except OSError as error:
        raise EdgeLLMError(f"{path}: {error.strerror or error}.") from None
    except (ValueError, TypeError, AttributeError):
        raise EdgeLLMError(f"{path} holds no records of requests.") from None
