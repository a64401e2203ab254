"""The server's log: lines for people, or JSON objects for programs. Never what anybody wrote."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

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


def start_logging(as_json: bool) -> None:
    """On stderr."""
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if as_json else plain)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # what it begins and ends is not news
