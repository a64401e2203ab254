"""Where model files come from: one grammar of names, one way to a file.

A name is a path, a short name of the catalogue, `user/repo[:quant]` on Hugging Face, a URL, or a
model that another program holds (`ollama:`, `lmstudio:`, `llama.cpp:`). What a fetch promises: the
file appears under its final name only complete and, where one is known, with the right checksum;
two processes do not fetch the same file twice; a fetch that was cut or killed goes on where it was;
what is there once is used without a network. Nothing is printed: progress goes to the callable
given.
"""

from pathlib import Path

from edgellm.hub.catalogue import Entry, catalogue
from edgellm.hub.names import Held, Name, Repo, Short, Url, parse
from edgellm.hub.store import HubError, Item, Progress, cache_dir

__all__ = ["Entry", "HubError", "Item", "Progress", "cache_dir", "catalogue"]
__all__ += ["draft_for", "find", "pull", "resolve"]


def resolve(model: str | None = None, progress: Progress | None = None) -> Path:
    """The file of ``model``, fetched when it is not there; None: the catalogue's default.

    A file beside any other reading of the name wins, as everywhere on a command line.
    """
    name = parse(model)
    return _find(name) or _fetch(name, progress)


def find(model: str | None = None) -> Path | None:
    """The file of ``model`` if it is on this machine; no network is used."""
    return _find(parse(model))


def draft_for(path: Path) -> str | None:
    """The short name of the catalogue's draft model for a model's file, if that is one of it."""
    from edgellm.hub.sources import find_entry

    path = path.resolve()
    for entry in catalogue()[1].values():
        if entry.draft is not None and (here := find_entry(entry)) and here.resolve() == path:
            return entry.draft
    return None


def pull(model: str | None = None, progress: Progress | None = None) -> Path:
    """As `resolve`, but looks whether a Hugging Face repository has a newer file."""
    from edgellm.hub import huggingface, remote

    name = parse(model)
    if isinstance(name, Short):
        name = huggingface.fetched_for(catalogue()[1][name.name]) or name
    here = _find(name)
    if here is None or not isinstance(name, Repo):
        return here or _fetch(name, progress)
    try:
        return huggingface.fetch(name, progress)
    except remote.NetworkError:  # what is here stays good
        return here


def _find(name: Name) -> Path | None:
    if isinstance(name, Path):
        return name
    if isinstance(name, Short):
        from edgellm.hub.sources import find_entry

        return find_entry(catalogue()[1][name.name])
    if isinstance(name, Url):
        from edgellm.hub.web import find_url

        return find_url(name)
    if isinstance(name, Held):
        from edgellm.hub.held import find_held

        return find_held(name)
    from edgellm.hub.huggingface import find_repo

    return find_repo(name)


def _fetch(name: Name, progress: Progress | None) -> Path:
    if isinstance(name, Short):
        from edgellm.hub.sources import fetch_entry

        return fetch_entry(catalogue()[1][name.name], progress)
    if isinstance(name, Url):
        from edgellm.hub.web import fetch_url

        return fetch_url(name, progress)
    assert isinstance(name, Repo), "paths and models held by others were found"
    from edgellm.hub.huggingface import fetch

    return fetch(name, progress)
