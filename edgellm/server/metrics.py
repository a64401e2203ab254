"""/metrics: what the engine counts, in Prometheus's text format under vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)  # fmt: skip
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from edgellm.engine import AsyncLLM
from edgellm.metrics import Histogram
from edgellm.server.models import Models

_HISTOGRAMS = {
    "time_to_first_token_seconds": "time_to_first_token",
    "inter_token_latency_seconds": "inter_token_latency",
    "e2e_request_latency_seconds": "e2e_request_latency",
    "request_queue_time_seconds": "request_queue_time",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
    "iteration_tokens": "iteration_tokens",
    "step_seconds": "step_time",
}
_COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts"),
    "generation_tokens": ("generation_tokens", "Tokens that were generated"),
    "prefix_cache_queries": ("prompt_tokens", "Tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("cached_tokens", "Tokens found in the prefix cache"),
    "steps": ("steps", "Steps of the engine"),
    "stalls": ("stalls", "Times that the engine made no progress"),
    "cache_faults": ("faults", "Times that the cache's accounts were wrong"),
    "spec_decode_num_drafts": ("speculation.drafts", "Drafts that were checked"),
    "spec_decode_num_draft_tokens": ("speculation.drafted_tokens", "Tokens of these drafts"),
    "spec_decode_num_accepted_tokens": ("speculation.accepted_tokens", "Of these, right ones"),
    "spec_decode_num_declined": ("speculation.declined", "Drafts that were not worth checking"),
}


_GAUGES: dict[str, tuple[str, Callable[[AsyncLLM], float]]] = {
    "num_requests_running": ("Requests that run", lambda engine: len(engine.running)),
    "num_requests_waiting": ("Requests that wait", lambda engine: engine.n_waiting),
    "spec_decode_saved_seconds": (
        "What speculation has saved, about",
        lambda engine: engine.metrics.speculation.saved_seconds,
    ),
    "kv_cache_usage_perc": ("Share of the cache's blocks in use", lambda engine: engine.kv_usage),
}


class EngineCollector(Collector):
    """Reads the engines' numbers when asked. ``prefixes``: of the names."""

    def __init__(self, models: Models, prefixes: tuple[str, ...]) -> None:
        self._models, self._prefixes = models, prefixes

    def collect(self) -> Iterator[Metric]:
        engines = [(service.model, service.engine) for service in self._models.services]
        for prefix in self._prefixes:
            yield from _families(prefix, engines)


def _families(prefix: str, engines: list[tuple[str, AsyncLLM]]) -> Iterator[Metric]:
    labels = ["model_name"]
    for name, (source, text) in _COUNTERS.items():
        family = CounterMetricFamily(f"{prefix}:{name}", text, labels=labels)
        for model, engine in engines:
            family.add_metric([model], attrgetter(source)(engine.metrics))
        yield family
    preemptions = CounterMetricFamily(
        f"{prefix}:num_preemptions", "Requests that lost their room", labels=[*labels, "cause"]
    )
    success = CounterMetricFamily(
        f"{prefix}:request_success", "Requests by how they ended",
        labels=[*labels, "finished_reason"],
    )  # fmt: skip
    accepted = CounterMetricFamily(
        f"{prefix}:spec_decode_num_accepted_tokens_per_pos",
        "Right tokens by their place in the draft", labels=[*labels, "position"],
    )  # fmt: skip
    for model, engine in engines:
        for position, count in sorted(engine.metrics.speculation.accepted_at.items()):
            accepted.add_metric([model, str(position)], count)
        for cause in ("memory", "priority"):
            preemptions.add_metric([model, cause], engine.metrics.preemptions[cause])
        for reason, count in list(engine.metrics.finished.items()):
            success.add_metric([model, reason], count)
    yield preemptions
    yield success
    yield accepted
    for name, (text, value) in _GAUGES.items():
        gauge = GaugeMetricFamily(f"{prefix}:{name}", text, labels=labels)
        for model, engine in engines:
            gauge.add_metric([model], value(engine))
        yield gauge
    for name, source in _HISTOGRAMS.items():
        histograms = HistogramMetricFamily(f"{prefix}:{name}", "As vLLM's", labels=labels)
        for model, engine in engines:
            histogram: Histogram = getattr(engine.metrics, source)
            histograms.add_metric([model], _buckets(histogram), histogram.sum)
        yield histograms


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    total, found = 0, []
    for bound, count in zip([*histogram.bounds, None], list(histogram.counts), strict=True):
        total += count
        found.append(("+Inf" if bound is None else str(float(bound)), float(total)))
    return found


async def metrics(http: HttpRequest) -> Response:
    registry: CollectorRegistry = http.app.state.registry
    return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


def registry_of(models: Models, vllm_names: bool) -> CollectorRegistry:
    """``vllm_names``: the same once more under vLLM's own prefix, for tools that read those."""
    registry = CollectorRegistry()
    prefixes = ("edgellm", "vllm") if vllm_names else ("edgellm",)
    registry.register(EngineCollector(models, prefixes))
    return registry
