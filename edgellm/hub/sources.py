"""A model of the catalogue from the first of its sources that works."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgellm.hub import store
from edgellm.hub.catalogue import Entry
from edgellm.hub.names import Repo
from edgellm.hub.store import HubError, Progress


def find_entry(entry: Entry) -> Path | None:
    """The file, if it was fetched from any source."""
    if entry.file is not None:
        target = store.models_dir() / entry.file
        if _complete(target, entry):
            return target
    for source in entry.sources:
        if source["kind"] == "hf":
            from edgellm.hub.huggingface import find_repo

            if path := find_repo(repo_of(source)):
                return path
    return None


def fetch_entry(entry: Entry, progress: Progress | None = None) -> Path:
    """The file, fetched when it is not there. The sources are tried in order."""
    if path := find_entry(entry):
        return path
    failures = []
    for source in entry.sources:
        try:
            return SOURCES[source["kind"]](entry, source, progress)
        except HubError as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    reasons = "; ".join(
        f"({number}) {str(error).rstrip('.')}" for number, error in enumerate(failures, 1)
    )
    raise HubError(f"{entry.name} could not be fetched from any of its sources: {reasons}.")


def repo_of(source: Mapping[str, Any]) -> Repo:
    """The repository that a source of kind hf names."""
    return Repo(source["repo"], quant=source["quant"])


def _complete(path: Path, entry: Entry) -> bool:
    """Only checked files get the final name, so the size is enough to know one of them again."""
    try:
        return path.stat().st_size == entry.size
    except OSError:  # absent; if the folder is at fault, making it says so
        return False


def _target(entry: Entry) -> tuple[Path, int, str]:
    """(path, size, sha256) of an entry that has a file of its own in the cache."""
    if entry.file is None or entry.size is None or entry.sha256 is None:
        raise HubError(f"The catalogue lacks file, size or sha256 of {entry.name}; add them to it.")
    return store.inside(store.models_dir(), entry.file), entry.size, entry.sha256


def _pypi(entry: Entry, source: Mapping[str, Any], progress: Progress | None) -> Path:
    from edgellm.hub import pip

    target, size, sha256 = _target(entry)
    with store.storing(entry.name, target.parent), store.locked(target):
        if not _complete(target, entry):  # another process may have been faster
            pip.fetch(entry, source, target, size, sha256, progress)
    return target


def _url(entry: Entry, source: Mapping[str, Any], progress: Progress | None) -> Path:
    from edgellm.hub import remote

    target, size, sha256 = _target(entry)
    remote.fetch(
        remote.Wanted(source["url"], entry.name, size, sha256),
        target,
        lambda done, total: progress(entry, done) if progress else None,
    )
    return target


def _hf(entry: Entry, source: Mapping[str, Any], progress: Progress | None) -> Path:
    from edgellm.hub import huggingface

    return huggingface.fetch(repo_of(source), progress, title=entry.title)


Source = Callable[[Entry, Mapping[str, Any], Progress | None], Path]
SOURCES: dict[str, Source] = {"pypi": _pypi, "url": _url, "hf": _hf}
