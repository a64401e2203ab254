"""A process on a pseudo-terminal, and the screen that a person would see."""

import codecs
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pyte

KEYS = {"enter": "\r", "alt-enter": "\x1b\r", "tab": "\t", "up": "\x1b[A", "ctrl-c": "\x03",
        "ctrl-d": "\x04", "ctrl-g": "\x07"}  # fmt: skip


class Screen(pyte.HistoryScreen):
    """Answers what programs ask a terminal."""

    def __init__(self, columns: int, rows: int, reply) -> None:
        super().__init__(columns, rows, history=5000)
        self._reply = reply

    def write_process_input(self, data: str) -> None:
        self._reply(data)

    def select_graphic_rendition(self, *attributes, private=False, **others):
        super().select_graphic_rendition(*attributes)


class Terminal:
    """``lines``: the screen with all that has scrolled out of it. ``raw``: what was written."""

    def __init__(self, code: str, *arguments: str, columns=80, rows=24, env=None, cwd=None):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        base = {
            k: v for k, v in os.environ.items() if not k.startswith(("EDGELLM_", "COLU", "LIN"))
        }
        base |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LANG": "C.UTF-8"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=base | (env or {}),
            cwd=cwd,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.screen = Screen(columns, rows, self.type)
        self._stream = pyte.Stream(self.screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.raw = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def send(self, text: str = "", key: str = "enter") -> None:
        self.type(text)
        time.sleep(0.05)  # a person is not faster, and Escape waits for what follows
        self.type(KEYS[key])

    def read(self, seconds: float) -> bool:
        """Take in what was written; False at the end."""
        ready, _, _ = select.select([self.master], [], [], seconds)
        if not ready:
            return True
        try:
            data = os.read(self.master, 65536)
        except OSError:
            return False
        text = self._decoder.decode(data)
        self.raw += text
        self._stream.feed(text)
        return bool(data)

    def wait(self, text: str, seconds: float = 20.0, times: int = 1) -> None:
        """Until the text has been shown so often."""
        end = time.monotonic() + seconds
        while self.text.count(text) < times:
            if not self.read(0.05) or time.monotonic() > end:
                if self.text.count(text) >= times:
                    return
                raise AssertionError(f"{text!r} did not come:\n{self.text}")

    def settle(self, seconds: float = 0.2) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.read(0.02):
            pass

    def ended(self, seconds: float = 20.0) -> int:
        end = time.monotonic() + seconds
        while self.read(0.05) and time.monotonic() < end:
            if self.process.poll() is not None:
                self.settle(0.1)
                break
        return self.process.wait(seconds)

    @property
    def lines(self) -> list[str]:
        width = self.screen.columns
        above = ["".join(row[n].data for n in range(width)) for row in self.screen.history.top]
        return [line.rstrip() for line in [*above, *self.screen.display]]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def colors(self) -> set[str]:
        """Colours of characters on the screen."""
        rows = self.screen.buffer.values()
        return {c.fg for row in rows for c in row.values()} | {
            c.bg for row in rows for c in row.values()
        }

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)


FAKE_FOLDER = str(Path(__file__).parent)


def chat_code(setup: str = "pass") -> str:
    """A program that is `edgellm` with the fake engine."""
    return (
        f"import sys; sys.path.insert(0, {FAKE_FOLDER!r}); import fake_llm; "
        f"fake_llm.install(); from fake_chat import *; {setup}\n"
        "from edgellm.cli.main import main; main()"
    )


REAL_CODE = "from edgellm.cli.main import main; main()"
