"""API keys: from a file and the environment, never from the command line, which others see."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.server.safety import Caps


def read_caps(keys: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, "Caps"]]:
    """Keys of a server and what each may ask for: a line of the file goes on with max_tokens=N or
    concurrency=N, or with both."""
    from edgellm.server.safety import Caps

    found: dict[str, Caps] = {}
    for line in keys:
        key, *words = line.split()
        numbers: dict[str, int] = {}
        for word in words:
            name, _, value = word.partition("=")
            known = name in ("max_tokens", "concurrency") and value.isascii() and value.isdecimal()
            if not known or not int(value):
                raise EdgeLLMError(
                    f"--api-key-file: {word!r} behind a key is neither max_tokens=N nor "
                    "concurrency=N."
                )
            numbers[name] = int(value)
        found[key] = Caps(**numbers)
    return tuple(found), found


def api_keys(file: Path | None, variable: str) -> tuple[str, ...]:
    """Keys of a file, one on each line, then that of an environment variable."""
    found = []
    if file is not None:
        try:
            found = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise EdgeLLMError(f"{file} (--api-key-file): {reason}.") from None
        if not any(key.strip() for key in found):
            raise EdgeLLMError(f"{file} (--api-key-file) holds no key.")
    found.append(os.environ.get(variable, ""))
    return tuple(key.strip() for key in found if key.strip())
