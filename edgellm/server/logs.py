"""The server's log: lines for people, or JSON objects for programs. Never what anybody wrote."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import logging.handlers
import os
import queue
import threading
from datetime import UTC, datetime

_MOST_RECORDS = 10_000  # that wait to be written
_LAST_SECONDS = 1.0  # at the end of the process
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "color_message"}  # the last: uvicorn's


class JsonLines(logging.Formatter):
    """One object for each record: time, level, logger, message, and what else the record was given
    (``extra`` of the logging call)."""

    def format(self, record: logging.LogRecord) -> str:
        found = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{k: v for k, v in vars(record).items() if k not in _STANDARD},
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


class _Beside(logging.handlers.QueueHandler):
    """Records go to a thread that writes them: whoever reads stderr, or does not, must not hold the
    event loop up. What does not fit into the queue is lost."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        record.msg, record.args = record.getMessage(), None  # as it is now
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


def start_logging(as_json: bool) -> None:
    """On stderr."""
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if as_json else plain)
    records: queue.Queue[logging.LogRecord | None] = queue.Queue(_MOST_RECORDS)

    def write() -> None:
        while (record := records.get()) is not None:
            handler.handle(record)

    def end() -> None:
        with contextlib.suppress(queue.Full):
            records.put_nowait(None)
        writer.join(_LAST_SECONDS)
        if writer.is_alive():  # stuck in a pipe that nobody reads, as whatever else flushes it
            os._exit(0)

    writer = threading.Thread(target=write, name="edgellm-log", daemon=True)
    writer.start()
    atexit.register(end)
    logging.basicConfig(level=logging.INFO, handlers=[_Beside(records)])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # what it begins and ends is not news
