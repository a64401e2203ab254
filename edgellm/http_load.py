"""Load on an OpenAI-style server by a plan, and what became of each request.

Open loop: requests come when the plan says, whether or not the server keeps up, so a slow server
cannot slow the load down; times are those of the plan. Closed loop: so many clients, each sends
its next request when it has the answer to the last one. Prompts are words, mostly a token each;
how many tokens they were is what the server says.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

from edgellm.errors import EdgeLLMError
from edgellm.serving_records import Record, Run
from edgellm.workloads import Ask, Speed

WORDS = (
    "the and that have with this from they will would there their what about which when make can "
    "like time just know take people into year your good some could them see other than then now "
    "look only come over think also back after use two how our work first well way even new want "
    "because any these give day most water house river light stone green paper music story world "
    "hand part place case week company system program question number night point home room mother "
    "area money fact month lot right study book eye job word business issue side kind head service "
    "friend father power hour game line end member law car city community name president team"
).split()
ENDPOINTS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
REJECTED = (429, 503)
_COUNTED = 8, 40  # words of two prompts, whose tokens are counted
_CALIBRATION = 192, 12  # tokens of a prompt, and of each of several answers
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Server:
    """Where the load goes. ``body``: more fields of every request. ``timeout``: seconds that an
    answer may take before it counts as failed."""

    url: str
    model: str = ""
    endpoint: str = "chat"
    key: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    timeout: float = 600.0

    def client(self) -> httpx2.AsyncClient:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        # a proxy of the environment is for the internet, not for a server that is measured
        return httpx2.AsyncClient(
            base_url=self.url, headers=headers, timeout=self.timeout, limits=limits,
            trust_env=False,
        )  # fmt: skip

    def request(self, messages: Messages, max_tokens: int, **more: Any) -> dict[str, Any]:
        """The body of a streamed request; greedy, and of the whole length whatever the model
        says, so that two servers do the same work."""
        body = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}, **more, **self.body}  # fmt: skip
        if self.model:
            body["model"] = self.model
        if self.endpoint == "chat":
            return body | {"messages": messages}
        return body | {"prompt": " ".join(message["content"] for message in messages)}


class Load:
    """Sends plans. ``errors`` counts what failed, by what was said. ``say`` gets progress.
    ``tokens_a_word`` of the server's model: so many times fewer words than the plan has tokens are
    sent."""

    def __init__(self, server: Server, say: Callable[[str], None] = lambda text: None) -> None:
        self.server, self._say = server, say
        self.errors: Counter[str] = Counter()
        self.tokens_a_word = 1
        self._begun = 0.0
        self._n_open = 0
        self._records: list[Record] = []

    async def run(
        self, asks: list[Ask], clients: int | None = None, seconds: float = math.inf
    ) -> Run:
        """Send a plan; with ``clients`` in a closed loop. After ``seconds`` nothing more is begun,
        and what is under way is waited for."""
        self._begun, self._records = time.perf_counter(), []
        ticker = asyncio.create_task(self._tell())
        try:
            async with self.server.client() as client:
                if clients is None:
                    await self._open_loop(client, [a for a in asks if a.at <= seconds])
                else:
                    await self._closed_loop(client, asks, clients, seconds)
        finally:
            ticker.cancel()
        return Run(self._records, self._now())

    async def count_words(self) -> None:
        """Sets ``tokens_a_word``. EdgeLLMError when requests are not answered as they should be."""
        few, many = [(await self._alone(n, n)).n_prompt for n in _COUNTED]
        self.tokens_a_word = max(1, round((many - few) / (_COUNTED[1] - _COUNTED[0])))

    async def _alone(self, n_words: int, first: int) -> Record:
        ask = Ask(0.0, list(range(first, first + n_words * self.tokens_a_word)), 1, "speed")
        record = (await self.run([ask])).records[0]
        if not record.is_complete:
            told = "; ".join(self.errors) or "no text came"
            raise EdgeLLMError(f"{self.server.url} does not answer requests as it should: {told}")
        return record

    async def speed(self, n_seqs: int) -> Speed:
        """Of a prompt alone and of so many answers together, to fit a plan to the server."""
        n_prompt, n_answer = _CALIBRATION
        # different words each time: what is in a prefix cache is not read again
        for first in (1, 7):
            alone = await self._alone(n_prompt // self.tokens_a_word, first)
        together = [Ask(0.0, [k, 3 * k, k + 5], n_answer, "speed") for k in range(n_seqs)]
        run = await self.run(together)
        n_generated = sum(r.n_output for r in run.records if r.is_complete)
        seconds = alone.ttft or alone.e2e or 1.0  # without text when its only token ended it
        return Speed(max(alone.n_prompt, 1) / seconds, max(n_generated, 1) / run.seconds)

    def _words(self, prompt: list[int]) -> str:
        """Prompts that begin alike still do."""
        return " ".join(WORDS[number % len(WORDS)] for number in prompt[:: self.tokens_a_word])

    def _now(self) -> float:
        return time.perf_counter() - self._begun

    async def _tell(self) -> None:
        while True:
            done, now = len(self._records), self._now()
            self._say(f"{done} done, {self._n_open} under way, {now:.0f} s")
            await asyncio.sleep(0.5)

    async def _open_loop(self, client: httpx2.AsyncClient, asks: list[Ask]) -> None:
        async with asyncio.TaskGroup() as group:
            for ask in sorted(asks, key=lambda ask: ask.at):
                await asyncio.sleep(max(0.0, ask.at - self._now()))
                group.create_task(self._conversation(client, ask))

    async def _closed_loop(
        self, client: httpx2.AsyncClient, asks: list[Ask], n: int, seconds: float
    ) -> None:
        plan = iter(asks)

        async def one() -> None:
            for ask in plan:
                if self._now() >= seconds:
                    return
                ask.at = self._now()
                await self._conversation(client, ask)

        await asyncio.gather(*(one() for _ in range(n)))

    async def _conversation(self, client: httpx2.AsyncClient, ask: Ask) -> None:
        """A request, and those that follow from its answer."""
        messages: Messages = []
        prompt = ask.prompt
        while True:
            messages.append({"role": "user", "content": self._words(prompt)})
            record, answer = await self._request(client, ask, messages)
            if ask.then is None or not record.is_complete:
                return
            messages.append({"role": "assistant", "content": answer})
            following = ask.then([])
            prompt, following.at = following.prompt[len(ask.prompt) :], self._now()
            ask = following

    async def _request(
        self, client: httpx2.AsyncClient, ask: Ask, messages: Messages
    ) -> tuple[Record, str]:
        record = Record(ask.kind, 0, ask.at, ask.priority, ask.turn)
        more: dict[str, Any] = {"priority": "batch"} if ask.priority == "batch" else {}
        if "json_schema" in ask.params:
            form = {"name": "answer", "schema": ask.params["json_schema"]}
            more |= {"response_format": {"type": "json_schema", "json_schema": form},
                     "ignore_eos": False}  # fmt: skip
        body = self.server.request(messages, ask.max_tokens, **more)
        end = min(ask.cancel_after or math.inf, ask.timeout or math.inf, self.server.timeout)
        pieces: list[str] = []
        self._n_open += 1
        try:
            async with asyncio.timeout(max(0.0, ask.at + end - self._now())):
                await self._stream(client, body, record, pieces)
        except TimeoutError:
            if end == ask.cancel_after:
                record.finish_reason = "abort"
            else:
                record.finish_reason = "timeout"
                if end != ask.timeout:  # which the plan is for
                    self.errors[f"no end of the answer within {end:g} s (--timeout)"] += 1
        except (httpx2.HTTPError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._fail(record, f"{type(error).__name__}: {error}")
        finally:
            self._n_open -= 1
            record.finished = self._now()
            self._records.append(record)
        return record, "".join(pieces)

    async def _stream(
        self, client: httpx2.AsyncClient, body: dict[str, Any], record: Record, pieces: list[str]
    ) -> None:
        async with client.stream("POST", ENDPOINTS[self.server.endpoint], json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                record.finish_reason = "rejected" if answer.status_code in REJECTED else "error"
                if record.finish_reason == "error":
                    said = answer.text[:200]
                    self.errors[f"HTTP {answer.status_code}: {said}"] += 1
                return
            async for event in _events(answer):
                now = self._now()
                if "error" in event:
                    return self._fail(record, f"in the stream: {event['error']}")
                if (usage := event.get("usage")) is not None:
                    record.n_prompt = usage["prompt_tokens"]
                    record.n_counted = usage.get("completion_tokens", 0)
                    record.n_cached = (usage.get("prompt_tokens_details") or {}).get(
                        "cached_tokens", 0
                    )
                for choice in event.get("choices", ()):
                    if text := _text(choice):
                        record.tokens.append(now)
                        pieces.append(text)
                    record.finish_reason = choice.get("finish_reason") or record.finish_reason
        if not record.finish_reason:
            self._fail(record, "the stream ended without a finish_reason")

    def _fail(self, record: Record, said: str) -> None:
        record.finish_reason = "error"
        self.errors[said] += 1


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return (delta.get("content") or "") + (delta.get("reasoning_content") or "")


async def _events(answer: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """The data of a stream's events, until [DONE]."""
    async for line in answer.aiter_lines():
        if line.startswith("data:"):
            data = line[5:].strip()
            if data == "[DONE]":
                return
            yield json.loads(data)
