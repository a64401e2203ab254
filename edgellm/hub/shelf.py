"""What edgellm has fetched: listing it, and removing it again."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from edgellm.hub import held, records, store
from edgellm.hub.catalogue import Entry, catalogue
from edgellm.hub.names import Held, Repo, Short, parse
from edgellm.hub.records import Record
from edgellm.hub.sources import repo_of
from edgellm.hub.store import HubError


@dataclass(frozen=True)
class Model:
    """A model on this machine."""

    name: str
    path: Path
    where: str  # catalogue, hf, url, or the program that holds it
    licence: str | None = None


def fetched() -> list[Model]:
    """The models edgellm has fetched."""
    short = _short_names()
    found = []
    for entry in catalogue()[1].values():
        path = _own_file(entry)
        if path is not None:
            found.append(Model(entry.name, path, "catalogue", entry.licence))
    for record in records.load_all():
        if path := record.path():
            name = short.get(record.name, record.name)
            found.append(Model(name, path, record.kind, record.licence or None))
    return found


def everything() -> list[Model]:
    """Those, and the ones that other programs hold."""
    own = fetched()
    known = {os.path.realpath(model.path) for model in own}
    for found in held.everything():
        if os.path.realpath(found.path) not in known:
            own.append(Model(found.name, found.path, found.owner))
    return own


def known_names() -> list[str]:
    """Names of the catalogue and of what was fetched; cheap enough for a Tab key."""
    return sorted({*catalogue()[1], *(record.name for record in records.load_all())})


def _short_names() -> dict[str, str]:
    """Name of a record -> short name, for the models of the catalogue on Hugging Face."""
    return {
        str(repo_of(source)): entry.name
        for entry in catalogue()[1].values()
        for source in entry.sources
        if source["kind"] == "hf"
    }


def _own_file(entry: Entry) -> Path | None:
    if entry.file is None:
        return None
    path = store.models_dir() / entry.file
    return path if path.is_file() else None


def removable(model: str) -> tuple[list[Path], int]:
    """(files that `remove` would delete, their bytes); HubError if there is nothing it may."""
    name = parse(model)
    if isinstance(name, Path):
        raise HubError(f"{model} is a file of your own: delete it yourself, as any file.")
    if isinstance(name, Held):
        held.find_held(name)
        owner = held.PROGRAMS[name.owner]
        raise HubError(f"{model} is held by {owner}: remove it there, edgellm only reads it.")
    files: list[Path] = []
    if isinstance(name, Short):
        entry = catalogue()[1][name.name]
        if entry.file is not None:
            files += _with_unfinished(store.models_dir() / entry.file)
    for record in _records(model):
        for file in map(Path, record.files):
            files += _with_blobs(record, file) if record.kind == "hf" else _with_unfinished(file)
    if not files:
        if isinstance(name, Repo):
            from edgellm.hub.huggingface import find_repo

            if find_repo(name):
                raise HubError(
                    f"{model} lies in the Hugging Face cache, but another program fetched it; "
                    "`hf cache rm` removes it."
                )
        raise HubError(f"{model} is not among what edgellm has fetched (see `edgellm list`).")
    sizes = {path: path.lstat().st_size for path in files if not path.is_symlink()}
    return files, sum(sizes.values())


def remove(model: str) -> None:
    """Delete a fetched model."""
    files, _ = removable(model)
    for path in files:
        path.unlink(missing_ok=True)
    for record in _records(model):
        records.remove(record)
        if record.kind == "hf":
            _remove_if_empty(record.repo)
    for folder in {path.parent for path in files}:
        _remove_empty(folder)


def _records(model: str) -> list[Record]:
    name = parse(model)
    if isinstance(name, Short):
        entry = catalogue()[1][name.name]
        wanted = {str(repo_of(s)) for s in entry.sources if s["kind"] == "hf"}
        return [record for record in records.load_all() if record.name in wanted]
    if isinstance(name, Repo):
        from edgellm.hub.huggingface import same

        found = [r for r in records.load_all() if r.kind == "hf" and r.repo == name.repo]
        return [record for record in found if same(name, record)]
    return [record for record in records.load_all() if record.name == model]


def _with_unfinished(path: Path) -> list[Path]:
    """A file of our own cache, and what an unfinished fetch of it left."""
    from edgellm.hub import remote

    if not _below(path, store.models_dir()):
        return []
    return [one for one in (path, *remote.unfinished(path)) if one.is_file()]


def _with_blobs(record: Record, link: Path) -> list[Path]:
    """A link of a snapshot and the blob behind it, if no other link needs that."""
    from edgellm.hub.huggingface import repo_folder

    root = repo_folder(record.repo)
    if not _below(link, root / "snapshots") or not os.path.lexists(link):
        return []
    if not link.is_symlink():
        return [link]
    blob = link.parent / os.readlink(link)
    others = [path for path in root.glob("snapshots/**/*") if path.is_symlink() and path != link]
    target = os.path.realpath(blob)
    needed = any(os.path.realpath(path) == target for path in others)
    if needed or not _below(blob, root / "blobs") or not os.path.lexists(blob):
        return [link]
    return [link, blob]


def _below(path: Path, root: Path) -> bool:
    """Whether a path lies in a folder, by its spelling."""
    absolute, base = os.path.abspath(path), os.path.abspath(root)
    return absolute.startswith(base + os.sep)


def _remove_if_empty(repo: str) -> None:
    """The folder of a repository, if nothing but notes of the cache itself is left in it."""
    from edgellm.hub.huggingface import repo_folder

    root = repo_folder(repo)
    held_there = [path for part in ("blobs", "snapshots") for path in root.glob(f"{part}/**/*")]
    if not any(path.is_symlink() or not path.is_dir() for path in held_there):
        shutil.rmtree(root, ignore_errors=True)


def _remove_empty(folder: Path) -> None:
    """The folder and its parents in the caches, as far as they are empty."""
    from edgellm.hub.huggingface import cache

    while _below(folder, store.models_dir()) or _below(folder, cache()):
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


def licence_of(path: Path) -> str | None:
    """The licence of a fetched file as its source tells it."""
    real = os.path.realpath(path)
    for model in fetched():
        if os.path.realpath(model.path) == real:
            return model.licence
    return None
