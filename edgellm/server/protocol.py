"""uvicorn's HTTP/1.1, stricter and less patient: who connects and says nothing, sends what two
readers could take for different requests, or stops reading holds no place."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgellm.server.errors import ApiError, openai_error

HEADER_SECONDS = 10.0
STALLED_SECONDS = 60.0  # in which a reader has to take what lies ready for it

_END = re.compile(rb"\n\r?\n")
_LAX = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)|\n[ \t]|\0")  # bare LF or CR, folded headers, NUL
_LENGTH = re.compile(rb"\ncontent-length[ \t]*:([^\r\n]*)", re.IGNORECASE)


class _Strict(h11.Connection):
    """Refuses heads that h11 would read although others may read them differently (RFC 9112, 11.2):
    what stands between could be led to pass on a second request unseen."""

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            data = self.trailing_data[0]
            end = _END.search(data)
            head = data[: end.end()] if end else data
            lengths = _LENGTH.findall(head)
            if _LAX.search(head) or len(lengths) > 1 or any(b"," in n for n in lengths):
                raise h11.RemoteProtocolError("The head of the request is not as it must be.")
        return super().next_event()


class PatientOnce(H11Protocol):
    """From the first byte that may come until a request is there HEADER_SECONDS may pass. So many
    connections may be open at once, and so many of one address (None: any number)."""

    most_connections: int | None = 1000
    most_per_client: int | None = None

    _deadline: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.conn = _Strict(h11.SERVER, self.config.h11_max_incomplete_event_size or 32 << 10)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._is_too_many():
            transport.write(_full())
            transport.close()
            return
        self._wait()

    def _is_too_many(self) -> bool:
        """Whether this connection is one more than there may be."""
        if self.most_connections is not None and len(self.connections) > self.most_connections:
            return True
        if self.most_per_client is None or self.client is None:
            return False
        others: Any = self.connections  # of this class, as uvicorn makes no other
        mine = [c for c in others if c.client is not None and c.client[0] == self.client[0]]
        return len(mine) > self.most_per_client

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._rest()
        elif self._deadline is None:
            self._wait()  # the beginning of a further request

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        self._unstall()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _rest(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """In the shape of other errors; the connection is of no use any more."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.cycle is not None:  # its body went wrong: nothing else may be answered
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            error = ApiError(400, "The request cannot be understood.")
            body = json.dumps(openai_error(error)).encode()
            headers = [("content-type", "application/json"), ("connection", "close"),
                       ("content-length", str(len(body)))]  # fmt: skip
            response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    # ---- readers that stop reading --------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        # abort: what waits to be written would keep the connection open for as long as they like
        self._stalled = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._unstall()
        super().resume_writing()

    def _unstall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


def limited(most_connections: int | None, most_per_client: int | None) -> type[PatientOnce]:
    """The protocol with other limits."""
    limits = {"most_connections": most_connections, "most_per_client": most_per_client}
    return type("Limited", (PatientOnce,), limits)


def _full() -> bytes:
    """An answer to a connection that is one too many."""
    error = ApiError(503, "Too many connections are open; try again later.")
    body = json.dumps(openai_error(error)).encode()
    headers = {"content-type": "application/json", "content-length": len(body),
               "connection": "close", **error.headers}  # fmt: skip
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return b"HTTP/1.1 503 Service Unavailable\r\n" + head.encode() + b"\r\n" + body
