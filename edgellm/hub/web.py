"""Models of a plain URL, kept in the cache folder of edgellm."""

from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from edgellm.hub import records, store
from edgellm.hub.names import Url, parts_of
from edgellm.hub.records import Record
from edgellm.hub.store import Item, Progress


def find_url(name: Url) -> Path | None:
    """The file of a URL if it and its other parts were fetched."""
    targets = [target for _, target in _files(name)]
    return targets[0] if all(target.is_file() for target in targets) else None


def fetch_url(name: Url, progress: Progress | None = None) -> Path:
    """The file of a URL, with all parts of a split one."""
    from edgellm.hub import remote

    files = _files(name)
    for number, (url, target) in enumerate(files, 1):
        title = target.name if len(files) == 1 else f"{target.name} ({number} of {len(files)})"
        remote.fetch(remote.Wanted(url, target.name), target, partial(_report, progress, title))
    paths = tuple(str(target) for _, target in files)
    records.save(Record(name=name.url, kind="url", files=paths))
    return files[0][1]


def _report(progress: Progress | None, title: str, done: int, total: int | None) -> None:
    if progress:
        progress(Item(title, total, None), done)


def _files(name: Url) -> list[tuple[str, Path]]:
    """(URL, path) of every part. The folder is named after the URL: names alone are not unique."""
    names = parts_of(name.file)
    parts = urlsplit(name.url)
    folder = unquote(parts.path).rpartition("/")[0]
    first = name.url if len(names) == 1 else urlunsplit(parts._replace(path=f"{folder}/{names[0]}"))
    root = store.models_dir() / "url" / store.short_hash(first)
    result = []
    for part in names:
        url = name.url
        if part != name.file:
            path = parts.path.rpartition("/")[0] + "/" + quote(part)
            url = urlunsplit(parts._replace(path=path))
        result.append((url, store.inside(root, part)))
    return result
