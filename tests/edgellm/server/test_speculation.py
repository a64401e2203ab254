"""Speculation over HTTP: the same text, the counts in timings and metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from edgellm.speculative.options import SpeculationOptions


def test_counts_are_in_timings_and_metrics(start: Callable[..., Any], eager: None) -> None:
    server = start(speculation=SpeculationOptions("lookup"))
    body = {"prompt": "abc abd abc abd abc", "max_tokens": 60, "temperature": 0,
            "ignore_eos": True}  # fmt: skip
    timings = server.post("/v1/completions", body).json()["timings"]
    assert timings["draft_n"] >= timings["draft_n_accepted"] > 0
    pieces = []
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        pieces = [line for line in reply.iter_lines() if line.startswith("data: {")]
    assert len(pieces) > 10
    text = server.http.get("/metrics").text
    found = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    prefix = "edgellm:spec_decode_num"
    counts = server.llm.metrics.speculation
    assert found[f"{prefix}_drafts_total", None] == counts.drafts > 0
    assert found[f"{prefix}_draft_tokens_total", None] == counts.drafted_tokens
    assert found[f"{prefix}_accepted_tokens_total", None] == counts.accepted_tokens
    by_position = [
        value for (name, _), value in found.items()
        if name == f"{prefix}_accepted_tokens_per_pos_total"
    ]  # fmt: skip
    assert sum(by_position) == counts.accepted_tokens and by_position == sorted(by_position)[::-1]
