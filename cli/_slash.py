"""The commands of a chat, the words that begin with a slash.

A command is a function under ``@slash(names...)``: the first name is the one that /help lists, the
others are what people know from elsewhere. It gets the chat and the rest of the line; what it
returns goes to the model as a message.
"""

import difflib
import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.cli._sampling import FLAGS, Sampling
from edgellm.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.cli._chat import Chat

MAX_FILE = 1 << 20  # bytes of a file that /read puts into a message


@dataclass(frozen=True)
class Command:
    """``arguments`` and ``help`` are what /help shows."""

    names: tuple[str, ...]
    arguments: str
    help: str
    run: Callable[["Chat", str], str | None]


COMMANDS: dict[str, Command] = {}
ORDER: list[Command] = []


class Leave(Exception):
    """The person has had enough."""


def slash(*names: str, arguments: str = "") -> Callable[..., Any]:
    """Register a command; its docstring is its help."""

    def register(function: Callable[["Chat", str], str | None]) -> Any:
        command = Command(names, arguments, " ".join((function.__doc__ or "").split()), function)
        ORDER.append(command)
        COMMANDS.update({name: command for name in names})
        return function

    return register


def run(chat: "Chat", line: str) -> str | None:
    """Do what ``line``, which begins with a slash, says. Raises EdgeLLMError and Leave."""
    word, _, rest = line[1:].partition(" ")
    word = word.strip().lower()
    command = COMMANDS.get(word) or _parameter(word)
    if command is None:
        near = difflib.get_close_matches(word, COMMANDS, 1)
        meant = f" Did you mean /{near[0]}?" if near else ""
        raise EdgeLLMError(
            f"There is no command /{word}.{meant} /help lists them; // begins a message with /."
        )
    return command.run(chat, rest.strip())


def _parameter(word: str) -> Command | None:
    """/temperature 0.2 and its like."""
    try:
        Sampling.field(word)
    except EdgeLLMError:
        return None
    return Command((word,), "", "", lambda chat, rest: _set_parameter(chat, word, rest))


def complete(text: str) -> list[str]:
    """What the last word of a line that begins with a slash may become."""
    word, space, rest = text[1:].partition(" ")
    if not space:
        return [f"/{name}" for name in sorted(COMMANDS) if name.startswith(word)]
    last = rest.rpartition(" ")[2]
    if word == "set":
        if rest.startswith(("parameter ", "param ")):
            return [flag.field for flag in FLAGS if flag.field.startswith(last)]
        return [name for name in SETTINGS if name.startswith(last)] if " " not in rest else []
    if word == "show":
        return [name for name in SHOWN if name.startswith(last)]
    if word in ("load", "save", "session"):
        from edgellm.session import names

        return [name for name in names() if name.startswith(last)]
    if word in ("read", "file", "model"):
        return _paths(last)
    return []


def _paths(start: str) -> list[str]:
    found = glob.glob(os.path.expanduser(glob.escape(start)) + "*")
    return sorted(path + os.sep if os.path.isdir(path) else path for path in found)


# ---- leaving and help ------------------------------------------------------------------------


@slash("help", "?", "h", arguments="[COMMAND]")
def help_(chat: "Chat", rest: str) -> None:
    """List the commands, or explain one."""
    wanted = rest.lstrip("/")
    commands = ORDER if not wanted else [c for c in ORDER if wanted in c.names]
    if not commands:
        raise EdgeLLMError(f"There is no command /{wanted}; /help lists them.")
    rows = [(f"/{c.names[0]} {c.arguments}".rstrip(), c.help) for c in commands]
    chat.table(rows)
    if wanted:
        others = ", ".join(f"/{name}" for name in commands[0].names[1:])
        if others:
            chat.say(f"The same: {others}")
        return
    chat.say("A parameter's name is a command too: /temperature 0.2")
    chat.say('Several lines: """ before and after them, or \\ at the end of a line.')
    chat.say("Ctrl-C stops the answer, Ctrl-D leaves, Ctrl-G opens your editor.")


@slash("bye", "exit", "quit", "q")
def bye(chat: "Chat", rest: str) -> None:
    """Leave (as Ctrl-D does)."""
    raise Leave


# ---- the conversation ------------------------------------------------------------------------


@slash("clear", "new", "reset")
def clear(chat: "Chat", rest: str) -> None:
    """Forget the conversation; the system message stays."""
    chat.conversation.clear()
    chat.attached.clear()
    chat.save()
    chat.say("A new conversation.")


@slash("regen", "regenerate", "retry")
def regen(chat: "Chat", rest: str) -> None:
    """Answer the last message again."""
    chat.answer(chat.conversation.regenerate(chat.sampling.params()))


@slash("edit", arguments="[TEXT]")
def edit(chat: "Chat", rest: str) -> None:
    """Put another text in the place of the last message."""
    if rest:
        chat.answer(chat.conversation.edit(rest, chat.sampling.params()))
    else:
        chat.draft = chat.conversation.undo()
        chat.save()


@slash("undo")
def undo(chat: "Chat", rest: str) -> None:
    """Take back the last message and its answer."""
    text = " ".join(chat.conversation.undo().split())
    chat.save()
    chat.say(f"Taken back: {text[:60]}{'...' if len(text) > 60 else ''}")


@slash("system", "sys", arguments="[TEXT]")
def system(chat: "Chat", rest: str) -> None:
    """Set the system message and begin anew; without a text show it, - removes it."""
    if not rest:
        chat.say(chat.conversation.system or "There is no system message.")
        return
    chat.conversation.system = None if rest in ("-", '""') else rest.strip('"')
    chat.conversation.clear()
    chat.save()
    chat.say("Set; a new conversation." if rest != "-" else "Removed; a new conversation.")


@slash("history")
def history(chat: "Chat", rest: str) -> None:
    """Show the conversation."""
    for message in chat.conversation.messages:
        chat.say(f"{message['role']}: {message['content']}")


@slash("read", "file", arguments="FILE")
def read(chat: "Chat", rest: str) -> None:
    """Send a text file with the next message."""
    if not rest:
        raise EdgeLLMError("Name a file: /read notes.txt")
    path = Path(rest.strip("'\"")).expanduser()
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise EdgeLLMError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise EdgeLLMError(f"{path} is not UTF-8 text.") from None
    if len(data) > MAX_FILE:
        raise EdgeLLMError(f"{path} has more than {MAX_FILE >> 20} MiB, too much for a message.")
    chat.attached.append((path.name, text))
    chat.say(f"{path.name}: {len(text):,} characters go with your next message.")


@slash("glob", arguments="PATTERN")
def glob_(chat: "Chat", rest: str) -> None:
    """Send all text files that match, as /read does."""
    paths = sorted(p for p in glob.glob(os.path.expanduser(rest), recursive=True))
    files = [p for p in paths if os.path.isfile(p)]
    if not files:
        raise EdgeLLMError(f"No file matches {rest!r}.")
    for path in files[:100]:
        read(chat, path)


@slash("image")
def image(chat: "Chat", rest: str) -> None:
    """Not yet: models here read text only."""
    raise EdgeLLMError("Images cannot be sent: models are run on text only.")


# ---- models and sessions ---------------------------------------------------------------------


@slash("model", arguments="[NAME]")
def model(chat: "Chat", rest: str) -> None:
    """Go on with another model; without a name tell which this is."""
    if rest:
        chat.change_model(rest)
    else:
        chat.say(chat.model.title())


@slash("save", arguments="[NAME]")
def save(chat: "Chat", rest: str) -> None:
    """Keep the conversation under a name."""
    name = rest or chat.session
    if not name:
        raise EdgeLLMError("Name it: /save trip")
    chat.save(name)
    chat.say(f"Saved; /load {name} or --session {name} brings it back.")


@slash("load", arguments="NAME")
def load(chat: "Chat", rest: str) -> None:
    """Bring back a saved conversation, or go on with another model."""
    from edgellm.session import names

    if not rest:
        chat.say("Saved: " + (", ".join(names()) or "nothing yet") + ".")
    elif rest in names():
        chat.resume(rest)
    else:
        chat.change_model(rest)


# ---- settings --------------------------------------------------------------------------------


def _set_parameter(chat: "Chat", name: str, text: str) -> None:
    if not text:
        field = Sampling.field(name)
        chat.say(f"{field} is {chat.sampling.as_dict()[field]}")
        return
    field = chat.sampling.set(name, text.strip('"'))
    chat.say(f"{field} is now {chat.sampling.as_dict()[field]}")


SETTINGS = (
    "system", "parameter", "verbose", "quiet", "think", "nothink", "showthinking", "hidethinking",
    "multiline", "nomultiline",
)  # fmt: skip


@slash("set", arguments="WHAT [VALUE]")
def set_(chat: "Chat", rest: str) -> None:
    """system TEXT, parameter NAME VALUE, verbose or quiet (speed line), think or nothink,
    showthinking or hidethinking, multiline or nomultiline."""
    what, _, value = rest.partition(" ")
    value = value.strip()
    if what == "system":
        system(chat, value)
    elif what in ("parameter", "param"):
        name, _, text = value.partition(" ")
        if not name:
            raise EdgeLLMError("Name it: /set parameter temperature 0.2")
        _set_parameter(chat, name, text.strip())
    elif what in ("verbose", "quiet"):
        chat.show_timings = what == "verbose"
        chat.say("The speed line is " + ("on." if chat.show_timings else "off."))
    elif what in ("think", "nothink"):
        chat.conversation.variables["enable_thinking"] = what == "think"
        chat.say("Thinking is " + ("on" if what == "think" else "off") + ", where the model can.")
    elif what in ("showthinking", "hidethinking"):
        chat.hide_thinking = what == "hidethinking"
        chat.say("Thinking is " + ("folded." if chat.hide_thinking else "shown."))
    elif what in ("multiline", "nomultiline"):
        chat.reader.multiline = what == "multiline"
        on = "Enter begins a line, an empty line sends." if what == "multiline" else "Enter sends."
        chat.say(on)
    elif what in ("history", "nohistory", "wordwrap", "nowordwrap", "format", "noformat"):
        raise EdgeLLMError(f"/set {what} is not supported here.")
    else:
        raise EdgeLLMError(f"/set knows {', '.join(SETTINGS)}.")


SHOWN = ("info", "parameters", "system", "template", "license", "timings")


@slash("show", arguments="WHAT")
def show(chat: "Chat", rest: str) -> None:
    """info, parameters, system, template, license or timings."""
    if rest in ("", "info", "model"):
        chat.table(chat.facts())
    elif rest in ("parameters", "params"):
        chat.table([(key, str(value)) for key, value in chat.sampling.as_dict().items()])
    elif rest == "system":
        system(chat, "")
    elif rest == "template":
        chat.say(chat.model.template(chat.conversation))
    elif rest in ("license", "licence"):
        chat.say(chat.model.licence())
    elif rest in ("timings", "stats"):
        stats(chat, "")
    else:
        raise EdgeLLMError(f"/show knows {', '.join(SHOWN)}.")


@slash("stats", "timings")
def stats(chat: "Chat", rest: str) -> None:
    """Tokens, room in the context, and speed."""
    chat.table(chat.statistics())
