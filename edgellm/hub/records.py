"""What edgellm has fetched besides the files of the catalogue: one small JSON file each.

They make a name known without a network, tell which version of a repository it is, and mark what
`edgellm rm` may remove.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from edgellm.hub import store


@dataclass(frozen=True)
class Record:
    """One fetched model."""

    name: str  # as `edgellm list` shows it: user/repo:QUANT, a URL
    kind: str  # hf or url
    files: tuple[str, ...]  # paths; the first is the model
    repo: str = ""
    file: str = ""  # of the first part, within the repository
    default: bool = False  # it is what the repository's name without a quantization means
    commit: str = ""
    licence: str = ""

    def path(self) -> Path | None:
        """The model, if all its files are there."""
        paths = [Path(file) for file in self.files]
        return paths[0] if all(path.is_file() for path in paths) else None


def load_all() -> list[Record]:
    """All records, by name; what cannot be read is no record."""
    found = []
    for path in _folder().glob("*.json"):
        try:
            record = _checked(json.loads(path.read_bytes()))
        except (OSError, ValueError):
            continue
        if record is not None and _path(record.name) == path:
            found.append(record)
    return sorted(found, key=lambda record: record.name)


def save(record: Record) -> None:
    """Write a record, in place of an older one of that name."""
    with store.storing(record.name, _folder()):
        store.write_durably(_path(record.name), json.dumps(asdict(record), indent=1).encode())


def remove(record: Record) -> None:
    """Forget a record; its files stay."""
    _path(record.name).unlink(missing_ok=True)


def _folder() -> Path:
    return store.models_dir() / "records"


def _path(name: str) -> Path:
    return _folder() / f"{store.short_hash(name)}.json"


def _checked(data: Any) -> Record | None:
    """A record out of JSON; None if a field is absent or of another type."""
    if not isinstance(data, dict) or set(data) != {field.name for field in fields(Record)}:
        return None
    files, default = data.pop("files"), data.pop("default")
    if not isinstance(files, list) or not files or not isinstance(default, bool):
        return None
    if not all(isinstance(text, str) for text in (*files, *data.values())):
        return None
    return Record(files=tuple(files), default=default, **data)
