"""API keys: from a file and the environment, never from the command line, which others see."""

import os
from pathlib import Path

from edgellm.errors import EdgeLLMError


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


def sent_key(file: Path | None) -> str:
    """What a client of a server sends: the first key of the file, else OPENAI_API_KEY, else ""."""
    return next(iter(api_keys(file, "OPENAI_API_KEY")), "")
