"""What `edgellm bench http` measures: a scenario fitted to a server and sent to it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import httpx2

from edgellm.errors import EdgeLLMError
from edgellm.http_load import WORDS, Load, Server
from edgellm.serving_records import SLO, Report
from edgellm.workloads import Maker, Speed, find

_N_CTX = 2048  # where a server does not say; also the most that lengths are shares of
_AHEAD = 4  # a closed loop may do so much more in its time than is planned for an open one


@dataclass
class Plan:
    """Which requests come, and when. ``clients``: in a closed loop. ``speed``: None is measured."""

    scenario: str = "mix"
    seed: int = 0
    n_requests: int | None = None
    rate: float | None = None
    seconds: float | None = None
    clients: int | None = None
    n_ctx: int | None = None
    n_seqs: int = 8
    speed: Speed | None = None

    def maker(self, speed: Speed, n_ctx: int) -> Maker:
        rate, seconds = self.rate, self.seconds
        if self.clients is not None:
            rate, seconds = math.inf, seconds and _AHEAD * seconds
        return Maker(
            speed, n_ctx, 2 * len(WORDS), self.n_seqs, self.seed, self.n_requests, rate, seconds
        )


async def facts(server: Server) -> tuple[str, int | None]:
    """(model, context of a request or None where the server does not say). EdgeLLMError when there
    is no such server."""
    async with server.client() as client:
        try:
            answer = await client.get("/v1/models")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            why = str(error) or type(error).__name__
            raise EdgeLLMError(f"No server answers at {server.url}: {why}.") from None
        if answer.status_code != 200:
            hint = " (--api-key-file)" if answer.status_code in (401, 403) else ""
            raise EdgeLLMError(
                f"{server.url}/v1/models answered {answer.status_code}{hint}: it is not an "
                "OpenAI-style server, or it lets nobody in."
            )
        try:
            model = server.model or str(answer.json()["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise EdgeLLMError(
                f"{server.url}/v1/models names no model; name one with --model-name."
            ) from None
        try:  # llama.cpp's and ours
            props = await client.get("/props")
            n_ctx = int(props.json()["default_generation_settings"]["n_ctx"])
        except (httpx2.HTTPError, ValueError, KeyError, TypeError):
            return model, None
        return model, n_ctx


async def measure(load: Load, plan: Plan, slo: SLO) -> tuple[Report, dict[str, Any]]:
    """Send a plan to a server: (report, what it was measured with)."""
    model, said = await facts(load.server)
    load.server = replace(load.server, model=model)
    n_ctx = plan.n_ctx or min(said or _N_CTX, _N_CTX)
    await load.count_words()
    speed = plan.speed or await load.speed(plan.n_seqs)
    maker = plan.maker(speed, n_ctx)
    asks = find(plan.scenario).make(maker)
    begun = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    run = await load.run(asks, plan.clients, plan.seconds or math.inf)
    report = Report()
    report.add(plan.scenario, run, slo)
    report.facts |= {
        "scale": maker.scale, "speed_prefill": speed.prefill, "speed_decode": speed.decode,
    }  # fmt: skip
    return report, {
        "url": load.server.url, "model": model, "endpoint": load.server.endpoint,
        "scenario": plan.scenario, "seed": plan.seed, "synthetic": True, "begun": begun,
        "clients": plan.clients, "rate": plan.rate, "duration": plan.seconds, "n_ctx": n_ctx,
        "planned": len(asks), "body": load.server.body, "slo": slo.as_ms(),
    }  # fmt: skip
