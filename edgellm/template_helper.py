"""The helper process for templates that nobody vouches for, seen from this side.

One process serves all templates of a program. It is started by the first that needs it, or ahead of
time by `HELPER.start()`; a render that takes too long, or too much memory, costs the helper its
life and the caller a sentence. Answers are JSON, so nothing that comes back is run.
"""

import atexit
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import psutil

from edgellm.template_engine import Fault

SECONDS = 0.22  # of one render with its probes, the first with compiling as well
STARVED = 2.0  # the same for a helper that the system hardly lets run
MEMORY = 64 << 20  # bytes; for systems that do not enforce the helper's own limit
START_SECONDS = 30.0
MAX_ANSWER = 100 << 20  # bytes of a line: 8 M characters, escaped

# What Python needs to find itself; no tokens, no proxies.
_KEPT = frozenset(
    "PATH PYTHONPATH PYTHONHOME PYTHONUSERBASE PYTHONPLATLIBDIR HOME USERPROFILE APPDATA "
    "SYSTEMROOT LD_LIBRARY_PATH DYLD_LIBRARY_PATH VIRTUAL_ENV LANG LC_ALL TMPDIR TEMP".split()
)


class HelperLost(Fault):
    """The helper had to be ended, or ended by itself."""


class Helper:
    """Starts, asks, watches and ends the process. Safe to use from many threads, in turns."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # a fork must not share its parent's helper
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._resting = 0  # bytes of memory when it was ready

    def start(self) -> None:
        """Start it unless it runs; returns at once, the process gets ready meanwhile."""
        with self._lock:
            if self._owner == os.getpid() and self._process and self._process.poll() is None:
                return
            self._owner = os.getpid()
            # -P: a jinja2.py in the current folder is not what we mean.
            command = [sys.executable, "-P", "-m", "edgellm.template_worker"]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={k: v for k, v in os.environ.items() if k.upper() in _KEPT},
                    start_new_session=True,  # Ctrl-C on the terminal is not meant for it
                )
            except OSError as error:
                raise HelperLost(
                    f"The process that renders unknown chat templates cannot be started: {error}."
                ) from None
            self._resting = 0
            self._answers = queue.SimpleQueue()
            arguments = (self._process, self._answers)
            threading.Thread(target=_collect, args=arguments, daemon=True).start()

    def stop(self) -> None:
        """End it; the next request starts another."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None and self._owner == os.getpid():
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        _close(pipe)

    def render(
        self, source: str, context: Mapping[str, Any] | None, now: datetime, seconds: float
    ) -> str:
        """The text, or "" when ``context`` is None, which only compiles. Raises Fault."""
        try:
            request = json.dumps(
                {"source": source, "context": context, "now": now.isoformat()}
            ).encode()
        except (TypeError, ValueError) as error:
            raise Fault(f"These messages cannot be handed to the chat template: {error}.") from None
        with self._lock:
            self._wait_until_ready()
            assert self._process is not None and self._process.stdin is not None
            try:
                self._process.stdin.write(request + b"\n")
                self._process.stdin.flush()
            except OSError:
                self.stop()
                raise HelperLost("The process that renders chat templates has ended.") from None
            answer = self._answer(seconds)
            if answer.get("damaged"):
                self.stop()
                self.start()  # gets ready while nobody waits
                raise HelperLost(str(answer["fault"]))
        if "fault" in answer:
            raise Fault(str(answer["fault"]), bool(answer["undefined"]))
        return str(answer["text"])

    def _wait_until_ready(self) -> None:
        self.start()
        if self._resting:
            return
        assert self._process is not None
        try:
            line = self._answers.get(timeout=START_SECONDS)
        except queue.Empty:
            line = b""
        if line != b"ready\n":
            self.stop()
            raise HelperLost(
                "The process that renders unknown chat templates did not start; a named template "
                "(--chat-template) needs none."
            )
        self._resting = _memory(self._process.pid)

    def _answer(self, seconds: float) -> dict[str, Any]:
        """Wait for it, watching clock and memory."""
        assert self._process is not None
        pid = self._process.pid
        start, used = time.monotonic(), _cpu(pid)
        limit = seconds
        while True:
            try:
                line = self._answers.get(timeout=0.01)
                break
            except queue.Empty:
                pass
            if _memory(pid) > self._resting + MEMORY:
                self._end("needs more memory than a template may use")
            if time.monotonic() - start > limit:
                # On a busy machine the helper may not have had its turn.
                if limit < STARVED and _cpu(pid) - used < seconds / 3:
                    limit = min(limit + seconds, STARVED)
                else:
                    self._end("takes too long: it may never end")
        try:
            return dict(json.loads(line))
        except ValueError:
            self._end("ended the process in which it was rendered")

    def _end(self, why: str) -> NoReturn:
        self.stop()
        self.start()  # gets ready while nobody waits
        raise HelperLost(f"The chat template {why}.")


def _collect(process: "subprocess.Popen[bytes]", answers: "queue.SimpleQueue[bytes]") -> None:
    """Lines of the process, then b"" for its end."""
    assert process.stdout is not None
    line = b"\n"
    while line:
        try:
            line = process.stdout.readline(MAX_ANSWER)
        except (OSError, ValueError):  # closed by stop()
            line = b""
        answers.put(line)


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except OSError:  # what was not yet written cannot be any more
        pass


def _memory(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _cpu(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    except psutil.Error:
        return 0.0


HELPER = Helper()
atexit.register(HELPER.stop)
