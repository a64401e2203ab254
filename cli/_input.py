"""What a person types: one line, or several, with history and completion where the terminal can.

A message goes on over several lines when its first begins with three quotes, until a line ends
with them; when a line ends with a backslash; and always in multi-line mode, until an empty line.
"""

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol

QUOTES = '"""'


def is_complete(text: str, multiline: bool) -> bool:
    """Whether Enter sends the text."""
    start = text.lstrip()
    if start.startswith(QUOTES):
        return len(start) >= 6 and start.rstrip().endswith(QUOTES)
    if text.endswith("\\"):
        return False
    if multiline and start and not start.startswith("/"):
        return text.endswith("\n")
    return True


def message(text: str) -> str:
    """The text without the signs that kept it going."""
    start = text.strip()
    if start.startswith(QUOTES):
        return start.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return text.replace("\\\n", "\n").rstrip("\n")


class Reader(Protocol):
    """Where messages come from."""

    multiline: bool

    def read(self, default: str = "") -> str:
        """The next message. EOFError: the person leaves. KeyboardInterrupt: Ctrl-C."""


class SimpleReader:
    """Line by line, for terminals without cursor movement and for --simple-io."""

    def __init__(self, multiline: bool) -> None:
        self.multiline = multiline

    def read(self, default: str = "") -> str:
        if default:
            print(default)
        text = self._line("> ")
        while not is_complete(text, self.multiline):
            text += "\n" + self._line(". ")
        return message(text)

    @staticmethod
    def _line(prompt: str) -> str:
        sys.stdout.write(prompt)
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


class RichReader:
    """With history, completion and editing over several lines."""

    def __init__(
        self,
        multiline: bool,
        history: str | None,
        complete: Callable[[str], Iterable[str]],
        color: bool,
    ) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import ColorDepth

        self.multiline = multiline
        self._session: Any = PromptSession(
            history=_history(history),
            completer=_completer(complete),
            complete_while_typing=False,
            multiline=True,
            prompt_continuation=lambda width, line, wrapped: (
                " " * width if wrapped else ". ".rjust(width)
            ),
            key_bindings=self._keys(),
            color_depth=None if color else ColorDepth.DEPTH_1_BIT,
            reserve_space_for_menu=4,
        )
        # A terminal that does not tell where its cursor is works well enough; no need for a word.
        self._session.app.renderer.cpr_not_supported_callback = lambda: None

    def read(self, default: str = "") -> str:
        from prompt_toolkit.formatted_text import FormattedText

        hint = "Ask something; /? for help"
        return message(
            self._session.prompt(
                FormattedText([("bold", "> ")]),
                default=default,
                placeholder=FormattedText([("fg:ansibrightblack", hint)]),
            )
        )

    def _keys(self) -> Any:
        from prompt_toolkit.key_binding import KeyBindings

        keys = KeyBindings()

        @keys.add("enter")
        def send_or_go_on(event: Any) -> None:
            buffer = event.current_buffer
            if is_complete(buffer.text, self.multiline) or not buffer.document.is_cursor_at_the_end:
                buffer.validate_and_handle()
            else:
                buffer.insert_text("\n")

        @keys.add("escape", "enter")
        def other_way(event: Any) -> None:
            if self.multiline:
                event.current_buffer.validate_and_handle()
            else:
                event.current_buffer.insert_text("\n")

        @keys.add("c-g")
        def editor(event: Any) -> None:
            event.current_buffer.open_in_editor()

        return keys


def _history(path: str | None) -> Any:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if path is None:
        return InMemoryHistory()
    try:
        # FileHistory would make a file that others can read
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        os.chmod(path, 0o600)
    except OSError:  # a chat without memory is better than none
        return InMemoryHistory()
    return FileHistory(path)


def _completer(complete: Callable[[str], Iterable[str]]) -> Any:
    from prompt_toolkit.completion import Completer, Completion

    class Slash(Completer):
        """Commands, and what can follow them."""

        def get_completions(self, document: Any, event: Any) -> Any:
            text = document.text_before_cursor
            if text.startswith("/") and "\n" not in text:
                word = text.rpartition(" ")[2]
                for found in complete(text):
                    yield Completion(found, start_position=-len(word))

    return Slash()
