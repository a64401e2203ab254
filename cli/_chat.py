"""A chat on a terminal: reads messages, shows answers, obeys slash commands."""

import os
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgellm import session
from edgellm.cli import _slash
from edgellm.cli._output import visible
from edgellm.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.cli._chat_model import Source
    from edgellm.cli._input import Reader
    from edgellm.cli._sampling import Sampling
    from edgellm.cli._view import View
    from edgellm.thinking import Part


@dataclass
class Terminal:
    """What a chat needs of it. ``style`` wraps a line in a colour: (text, name) -> text."""

    reader: "Reader"
    view: Callable[[bool], "View"]  # hide_thinking -> a view for one answer
    style: Callable[[str, str], str]


@dataclass
class Settings:
    """What the command line asks for. ``model`` as it was named."""

    model: str | None
    system: str | None
    variables: dict[str, Any]
    session: str | None
    show_timings: bool
    hide_thinking: bool


class Chat:
    """One chat: a conversation, its settings, and the terminal it happens on."""

    def __init__(
        self, settings: Settings, sampling: "Sampling", terminal: Terminal, source: "Source"
    ) -> None:
        self.sampling, self.reader = sampling, terminal.reader
        self._terminal, self._source = terminal, source
        self.show_timings, self.hide_thinking = settings.show_timings, settings.hide_thinking
        self.session = settings.session
        self.attached: list[tuple[str, str]] = []  # files for the next message: name, text
        self.draft = ""  # what the next input line begins with
        if self.session:
            session.check_name(self.session)
        self.model = source.load(settings.model)
        try:
            self.conversation = self.model.talk(settings.system, settings.variables)
        except BaseException:
            self.model.close()
            raise

    def close(self) -> None:
        self.model.close()

    # ---- the loop ----------------------------------------------------------------------------

    def run(self, first: str | None = None, once: bool = False) -> None:
        """Talk until the person leaves. ``first``: a message that is already there."""
        self.say(f"{self.model.title()}; /? for help")
        if self.session and session.load(self.session):
            self._try(lambda: self.resume(str(self.session), self.conversation.system))
        try:
            if first:
                self._try(lambda: self.send(first))
            while not once:
                self._turn()
        except (EOFError, _slash.Leave):
            print()
        self._try(self.save_cache)

    def _turn(self) -> None:
        draft, self.draft = self.draft, ""
        try:
            text = self.reader.read(draft)
        except KeyboardInterrupt:
            self.say("Ctrl-D or /bye leaves.")
            return
        if text.strip():
            self._try(lambda: self.obey(text))

    def _try(self, action: Callable[[], None]) -> None:
        """What goes wrong is said, and the chat goes on."""
        try:
            action()
        except KeyboardInterrupt:
            self.say("Stopped.")
        except EdgeLLMError as error:
            self.complain(str(error))
        except ValueError as error:
            # layers below `edgellm` derive theirs from ValueError directly
            if not type(error).__module__.startswith("edgellm."):
                raise
            self.complain(str(error))
        except MemoryError:
            self.complain("There is not enough memory; a smaller --ctx-size or model needs less.")
        print()

    def obey(self, text: str) -> None:
        """A command or a message."""
        if text.startswith("/") and not text.startswith("//") and "\n" not in text.strip():
            _slash.run(self, text.strip())
        else:
            self.send(text.removeprefix("/") if text.startswith("//") else text)

    def send(self, text: str) -> None:
        """Ask the model, with the files that wait to be sent."""
        files = [f"{name}:\n```\n{content}\n```\n\n" for name, content in self.attached]
        self.answer(self.conversation.ask("".join(files) + text, self.sampling.params()))
        if self.conversation.last.is_kept:
            self.attached.clear()

    def answer(self, parts: "Iterator[Part]") -> None:
        """Show an answer while it comes; Ctrl-C ends it and keeps what came."""
        print()
        view = self._terminal.view(self.hide_thinking)
        self.conversation.on_prompt = view.reading
        stopped = False
        with _stoppable() as stop:
            try:
                for part in parts:
                    stop.waits = False
                    view.show(part)
                    if stop.asked:
                        break
            except KeyboardInterrupt:
                stop.asked = True
            finally:
                stopped = stop.asked
                parts.close()  # type: ignore[attr-defined]
                view.end()
        self.save()
        last = self.conversation.last
        if not last.is_kept:
            self.say("Stopped before the first word; your message is taken back.")
        elif last.context_full:
            self.complain(
                f"The context of {self.model.n_ctx:,} tokens is full, so the answer is cut: /clear "
                "starts a new conversation, a larger context (-c) holds more."
            )
        elif stopped:
            self.say(f"Stopped after {last.n_answer} tokens.")
        elif self.show_timings:
            self.say(self._speed())
        if dropped := self.model.dropped():
            self.say(dropped)

    # ---- models and sessions -----------------------------------------------------------------

    def change_model(self, name: str) -> None:
        """Go on with another model, or with the old one if the new cannot be had."""
        old, state = self.conversation, self.conversation.state()
        self._source.check(name)  # before the old one is closed: most mistakes are in the name
        before = self.model.name
        self.model.close()
        try:
            self.model = self._source.load(name)
            self.conversation = self.model.talk(old.system, old.variables)
            self.conversation.restore(state, same_model=False)
        except BaseException:
            self.model = self._source.load(before)
            self.conversation = self.model.talk(old.system, old.variables)
            self.conversation.restore(state)
            raise
        self.say(f"{self.model.title()}; the conversation goes on.")

    def save(self, name: str | None = None) -> None:
        """Write the session, if there is one."""
        if target := name or self.session:
            session.save(target, {"model": self.model_id(), **self.conversation.state()})

    def save_cache(self) -> None:
        """Keep what is computed of the session's conversation, so that it need not be read again
        next time."""
        if self.session and self.conversation.seen and self.conversation.messages:
            self.model.save_cache(session.cache_path(self.session), self.conversation.seen)

    def load_cache(self, name: str) -> None:
        """Bring that back, where it still fits model and version."""
        path = session.cache_path(name)
        if path.exists():
            try:
                self.model.load_cache(path)
            except EdgeLLMError as error:
                self.say(f"{error} The conversation is read again.")

    def resume(self, name: str, system: str | None = None) -> None:
        """Take up a saved conversation; a ``system`` message given now replaces its own."""
        state = session.load(name)
        if state is None:
            raise EdgeLLMError(f"There is no session {name!r}.")
        self.conversation.restore(state, state.get("model") == self.model_id())
        if system is not None:
            self.conversation.system = system
        self.load_cache(name)
        messages = self.conversation.messages
        self.say(f"Session {name}: {len(messages)} messages.")
        for message in messages[-2:]:
            sign = ">" if message["role"] == "user" else " "
            text = " ".join(message["content"].split())
            self.say(f"{sign} {text[:200]}{'...' if len(text) > 200 else ''}")

    def model_id(self) -> dict[str, Any]:
        """What must be the same for token ids to mean the same."""
        return self.model.identity(self.conversation)

    # ---- what is told ------------------------------------------------------------------------

    def facts(self) -> list[tuple[str, str]]:
        """For /show info."""
        rows = [("model", self.model.title()), *self.model.facts()]
        return [*rows, ("session", self.session or "none"), *self.statistics()]

    def statistics(self) -> list[tuple[str, str]]:
        """For /stats."""
        used, room = self.conversation.n_tokens, self.model.n_ctx
        of_room = f" of {room:,} tokens ({100 * used / room:.0f} %)" if room else " tokens"
        rows = [
            ("messages", str(len(self.conversation.messages))), ("context", f"{used:,}{of_room}"),
        ]  # fmt: skip
        if (timings := self.conversation.last.timings) and self.conversation.last.is_kept:
            names = {"prompt": "prompt", "predicted": "answer"}
            for key, name in names.items():
                count, rate = timings[f"{key}_n"], timings[f"{key}_per_second"]
                took = timings[f"{key}_ms"] / 1e3
                rows.append((name, f"{count:,} tokens in {took:.2f} s, {rate:.1f} tokens/s"))
            if n := timings.get("draft_n"):
                rows.append(("drafts", f"{timings['draft_n_accepted']:,} of {n:,} tokens right"))
        return rows

    def _speed(self) -> str:
        timings, width = self.conversation.last.timings, shutil.get_terminal_size().columns
        if not timings:
            return ""
        used = timings["cache_n"] + timings["prompt_n"] + timings["predicted_n"]
        parts = [
            f"{timings['predicted_n']} tokens, {timings['predicted_per_second']:.1f} tokens/s",
            f"prompt {timings['prompt_n']}, {timings['prompt_per_second']:.1f} tokens/s",
            f"context {used:,}" + (f" of {self.model.n_ctx:,}" if self.model.n_ctx else ""),
        ]
        while len(parts) > 1 and len(" | ".join(parts)) >= width:
            parts.pop()
        return " | ".join(parts)

    def say(self, text: str) -> None:
        """Something that is not the model's."""
        print(self._terminal.style(_fill(visible(text)), "dim"), flush=True)

    def complain(self, text: str) -> None:
        """Something that went wrong."""
        print(self._terminal.style(_fill(visible(" ".join(text.split()))), "red"), flush=True)

    def table(self, rows: Iterable[tuple[str, str]]) -> None:
        """Names and what they mean, beside each other where there is room."""
        rows, width = list(rows), shutil.get_terminal_size().columns - 1
        left = max(len(name) for name, _ in rows) + 2
        for name, text in rows:
            if width - left < 24:
                lines = [name, *textwrap.wrap(text, max(10, width - 4), initial_indent="    ",
                                              subsequent_indent="    ")]  # fmt: skip
            else:
                wrapped = textwrap.wrap(text, width - left) or [""]
                lines = [f"{name:{left}}{wrapped[0]}"]
                lines += [" " * left + line for line in wrapped[1:]]
            self.say("\n".join(lines))


def _fill(text: str) -> str:
    """One line broken between words; what has several stays as it is."""
    width = shutil.get_terminal_size().columns - 1
    return text if "\n" in text or len(text) <= width else textwrap.fill(text, width)


class _Stop:
    """``waits``: nothing of the answer has come yet."""

    def __init__(self) -> None:
        self.asked, self.waits = False, True


@contextmanager
def _stoppable() -> Iterator[_Stop]:
    """Ctrl-C sets a flag instead of tearing through the engine; the second one, or one while the
    prompt is still read, interrupts at once."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def heard(number: int, frame: Any) -> None:
        if stop.asked or stop.waits:
            raise KeyboardInterrupt
        stop.asked = True

    before = signal.signal(signal.SIGINT, heard)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def is_plain(simple: bool) -> bool:
    """Whether the terminal is to be treated as one that can only print."""
    return (
        simple
        or os.environ.get("TERM", "") in ("dumb", "unknown")
        or not sys.stdout.isatty()
        or not sys.stdin.isatty()
    )
