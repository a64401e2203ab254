"""Conversations on disk: one JSON file each in the cache folder, readable by its owner only."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm import private_file
from edgellm.errors import EdgeLLMError
from edgellm.hub import cache_dir

VERSION = 1
# What is a file name on every system and cannot lead out of the folder.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


class SessionError(EdgeLLMError):
    """A session cannot be read or written."""


def private_dir(name: str) -> Path:
    """A folder in the cache folder that is nobody else's business."""
    folder = cache_dir() / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SessionError(
            f"The folder {folder} cannot be made: {error.strerror or error}; EDGELLM_CACHE names "
            "another place."
        ) from None
    return folder


def check_name(name: str) -> str:
    """The name, if a session may be called so."""
    if not NAME.fullmatch(name) or name.endswith(".") or RESERVED.fullmatch(name):
        raise SessionError(
            f"{name!r} cannot be the name of a session: use letters, digits, '-', '_' and '.', at "
            "most 64."
        )
    return name


def path_of(name: str) -> Path:
    """Where the session of this name lies, or would."""
    return private_dir("sessions") / f"{check_name(name)}.json"


def cache_path(name: str) -> Path:
    """Where the keys and values of the session lie, or would."""
    return path_of(name).with_suffix(".kv")


def names() -> list[str]:
    """Names of the saved sessions."""
    return sorted(path.stem for path in private_dir("sessions").glob("*.json"))


def save(name: str, state: Mapping[str, Any]) -> Path:
    """Write it whole or not at all."""
    path = path_of(name)
    text = json.dumps({"version": VERSION, **state}, ensure_ascii=False)
    try:
        private_file.write(path, [text.encode("utf-8", errors="replace")])
    except OSError as error:
        raise SessionError(
            f"The session cannot be written to {path}: {error.strerror or error}."
        ) from None
    return path


def load(name: str) -> dict[str, Any] | None:
    """The saved state; None when there is none."""
    path = path_of(name)
    if path.exists() and not path.is_file():
        raise SessionError(f"The session {path} is not a regular file.")
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or error
        raise SessionError(f"The session {path} cannot be read: {reason}.") from None
    except (ValueError, RecursionError):
        raise _damaged(path) from None
    if isinstance(state, dict) and state.get("version", VERSION) != VERSION:
        raise SessionError(f"The session {path} was written by another version of edgellm.")
    if not _is_sound(state):
        raise _damaged(path)
    return dict(state)


def _damaged(path: Path) -> SessionError:
    return SessionError(f"The session {path} is damaged: remove the file, or use another name.")


def _is_sound(state: Any) -> bool:
    """Whether it has the shape that `Conversation.restore` takes."""
    if not isinstance(state, dict) or not isinstance(state.get("messages"), list):
        return False
    if not isinstance(state.get("system"), str | None):
        return False
    for message in state["messages"]:
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
            return False
        if not isinstance(message.get("content"), str):
            return False
    seen = state.get("seen")
    if seen is None:
        return True
    return (
        isinstance(seen, dict)
        and isinstance(seen.get("text"), str)
        and isinstance(seen.get("tokens"), list)
        and all(type(token) is int and token >= 0 for token in seen["tokens"])
    )
