"""GGUF files that other programs on this machine hold; they are used in place and never changed.

Each program's files are somebody else's data: names and digests in them are checked before a path
is made of them, and what does not look as expected is left out.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.hub import names, store
from edgellm.hub.names import Held
from edgellm.hub.store import HubError

MAX_MANIFEST = 1 << 20
OLLAMA_MODEL = "application/vnd.ollama.image.model"
PROGRAMS = {
    "ollama": "Ollama",
    "lmstudio": "LM Studio",
    "llama.cpp": "llama.cpp",
    "hf": "the Hugging Face cache",
}


@dataclass(frozen=True)
class Found:
    """A model on this machine."""

    name: str  # `edgellm run NAME` uses it
    path: Path
    owner: str  # a key of PROGRAMS


def find_held(name: Held) -> Path:
    """The file of a model that another program holds; HubError if that has no such model."""
    there = [found for found in _of(name.owner)]
    for wanted in (str(name), f"{name}:latest"):  # as Ollama reads a name without a tag
        for found in there:
            if found.name == wanted:
                return found.path
    some = ", ".join(found.name for found in there[:10])
    raise HubError(
        f"{PROGRAMS[name.owner]} holds no model {name.name!r} here; "
        + (f"it has {some}." if some else "no GGUF file of it was found.")
    )


def everything() -> list[Found]:
    """All models that other programs hold."""
    from edgellm.hub.huggingface import snapshots

    found = [one for owner in names.OWNERS for one in _of(owner)]
    return found + [Found(str(name), path, "hf") for name, path in snapshots()]


def _of(owner: str) -> list[Found]:
    seen: dict[str, Found] = {}
    for found in FINDERS[owner]():
        seen.setdefault(found.name, found)  # of two folders the first wins
    return list(seen.values())


def _ollama() -> Iterator[Found]:
    for root in _ollama_roots():
        for path in sorted((root / "manifests").glob("*/*/*/*")):
            host, user, model, tag = path.relative_to(root / "manifests").parts
            name = f"{model}:{tag}"
            if (host, user) != ("registry.ollama.ai", "library"):
                name = f"{user}/{name}"
            if host != "registry.ollama.ai":
                name = f"{host}/{name}"
            if name.isprintable() and (blob := _ollama_blob(root, path)):
                yield Found(f"ollama:{name}", blob, "ollama")


def _ollama_roots() -> list[Path]:
    if own := os.environ.get("OLLAMA_MODELS"):
        return [Path(own).expanduser()]
    return [Path.home() / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]


def _ollama_blob(root: Path, manifest: Path) -> Path | None:
    """The file of the one layer that is the model."""
    data = _json(manifest)
    layers = data.get("layers") if isinstance(data, dict) else None
    if not isinstance(layers, list):
        return None
    digests = [
        layer.get("digest")
        for layer in layers
        if isinstance(layer, dict) and layer.get("mediaType") == OLLAMA_MODEL
    ]
    digest = store.sha256_digest(digests[0]) if len(digests) == 1 else None
    if digest is None:
        return None
    blob = store.inside(root / "blobs", f"sha256-{digest}")
    return blob if is_gguf(blob) else None


def _lmstudio() -> Iterator[Found]:
    for root in _lmstudio_roots():
        for path in sorted(root.glob("*/*/*.gguf")):
            file = path.relative_to(root).as_posix()
            if _begins_a_model(path) and file.isprintable():
                yield Found(f"lmstudio:{file}", path, "lmstudio")


def _lmstudio_roots() -> list[Path]:
    home = Path.home()
    try:
        home_of_it = Path((home / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        home_of_it = home / ".lmstudio"
    roots = [home_of_it / "models", home / ".cache/lm-studio/models"]
    settings = _json(home_of_it / "settings.json")
    chosen = settings.get("downloadsFolder") if isinstance(settings, dict) else None
    if isinstance(chosen, str) and chosen and "\0" not in chosen:
        roots.insert(0, Path(chosen).expanduser())
    return roots


def _llama_cpp() -> Iterator[Found]:
    root = _llama_cpp_root()
    for path in sorted(root.glob("*.gguf")):
        if _begins_a_model(path) and path.name.isprintable():
            yield Found(f"llama.cpp:{path.name}", path, "llama.cpp")


def _llama_cpp_root() -> Path:
    if own := os.environ.get("LLAMA_CACHE"):
        return Path(own).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/llama.cpp"
    if local := os.environ.get("LOCALAPPDATA"):
        return Path(local) / "llama.cpp"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llama.cpp"


def _begins_a_model(path: Path) -> bool:
    whole = all(path.with_name(part).is_file() for part in names.parts_of(path.name))
    return bool(names.models_among([path.name])) and whole and is_gguf(path)


def is_gguf(path: Path) -> bool:
    """Whether a regular file begins as a GGUF file does."""
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _json(path: Path) -> Any:
    """The content of a small JSON file, or None."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_MANIFEST:
            return None
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


FINDERS: dict[str, Callable[[], Iterator[Found]]] = {
    "ollama": _ollama,
    "lmstudio": _lmstudio,
    "llama.cpp": _llama_cpp,
}
