"""/metrics: what the engine counts, in Prometheus's text format under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator

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
from edgellm.server.service import Service

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
}


class EngineCollector(Collector):
    """Reads the engine's numbers when asked. ``prefixes``: of the names."""

    def __init__(self, engine: AsyncLLM, model: str, prefixes: tuple[str, ...]) -> None:
        self._engine, self._model, self._prefixes = engine, model, prefixes

    def collect(self) -> Iterator[Metric]:
        for prefix in self._prefixes:
            yield from self._family(prefix)

    def _family(self, prefix: str) -> Iterator[Metric]:
        metrics, labels, values = self._engine.metrics, ["model_name"], [self._model]
        for name, (source, text) in _COUNTERS.items():
            family = CounterMetricFamily(f"{prefix}:{name}", text, labels=labels)
            family.add_metric(values, getattr(metrics, source))
            yield family
        preemptions = CounterMetricFamily(
            f"{prefix}:num_preemptions", "Requests that lost their room", labels=[*labels, "cause"]
        )
        for cause in ("memory", "priority"):
            preemptions.add_metric([*values, cause], metrics.preemptions[cause])
        yield preemptions
        success = CounterMetricFamily(
            f"{prefix}:request_success", "Requests by how they ended",
            labels=[*labels, "finished_reason"],
        )  # fmt: skip
        for reason, count in list(metrics.finished.items()):
            success.add_metric([*values, reason], count)
        yield success
        gauges = {
            "num_requests_running": ("Requests that run", len(self._engine.running)),
            "num_requests_waiting": ("Requests that wait", self._engine.n_waiting),
            "kv_cache_usage_perc": ("Share of the cache's blocks in use", self._engine.kv_usage),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"{prefix}:{name}", text, labels=labels)
            gauge.add_metric(values, value)
            yield gauge
        for name, source in _HISTOGRAMS.items():
            yield self._histogram(f"{prefix}:{name}", getattr(metrics, source))

    def _histogram(self, name: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, "As vLLM's", labels=["model_name"])
        total, buckets = 0, []
        for bound, count in zip([*histogram.bounds, None], list(histogram.counts), strict=True):
            total += count
            buckets.append(("+Inf" if bound is None else str(float(bound)), float(total)))
        family.add_metric([self._model], buckets, histogram.sum)
        return family


async def metrics(http: HttpRequest) -> Response:
    registry: CollectorRegistry = http.app.state.registry
    return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


def registry_of(service: Service, vllm_names: bool) -> CollectorRegistry:
    """``vllm_names``: the same once more under vLLM's own prefix, for tools that read those."""
    registry = CollectorRegistry()
    prefixes = ("edgellm", "vllm") if vllm_names else ("edgellm",)
    registry.register(EngineCollector(service.engine, service.model, prefixes))
    return registry
