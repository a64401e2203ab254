"""The grammar of model names, and how a quantization is read off a file name. No file is opened."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from edgellm.hub.catalogue import catalogue
from edgellm.hub.store import HubError, safe_part

DEFAULT_QUANT = "Q4_K_M"
OWNERS = ("ollama", "lmstudio", "llama.cpp")  # programs whose models are used in place
HUB_HOSTS = ("huggingface.co", "hf.co")
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")

_ID = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"({_ID}/{_ID})(?::([A-Za-z0-9_.-]{{1,200}}))?")
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:IQ\d\w*|T?Q\d\w*|MXFP4\w*|NVFP4|BF16|F16|F32|FP16|FP32))(?=$|[-./])",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Short:
    """A name of the catalogue."""

    name: str


@dataclass(frozen=True)
class Repo:
    """A repository on Hugging Face; without quant or file, the default of its files."""

    repo: str
    quant: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        if self.file is not None:
            return f"hf.co/{self.repo}/{self.file}"
        return f"{self.repo}:{self.quant}" if self.quant else self.repo


@dataclass(frozen=True)
class Url:
    """A file on the web."""

    url: str
    file: str  # its own name, safe


@dataclass(frozen=True)
class Held:
    """A model of another program."""

    owner: str
    name: str

    def __str__(self) -> str:
        return f"{self.owner}:{self.name}"


Name = Path | Short | Repo | Url | Held


def parse(model: str | None) -> Name:
    """What a name means; HubError if it is none."""
    default, entries = catalogue()
    if model is None:
        return Short(default)
    if "\0" in model:
        raise HubError(f"{model[:100]!r} is not the name of a model: it holds a zero byte.")
    if os.path.isfile(os.path.expanduser(model)):
        return Path(model).expanduser()
    if model in entries:
        return Short(model)
    owner, colon, rest = model.partition(":")
    if colon and owner in OWNERS:
        return Held(owner, rest)
    if "://" in model:
        return _url(model)
    if model.startswith(tuple(f"{host}/" for host in HUB_HOSTS)):
        return _on_hub(model.partition("/")[2], model)
    if os.path.isdir(os.path.expanduser(model)):
        raise HubError(f"{model} is a folder: name the .gguf file in it.")
    match = _REPO.fullmatch(model)
    if match and not match[1].lower().endswith(".gguf") and valid_repo(match[1]):
        return Repo(match[1], match[2])
    if model.lower().endswith(".gguf") or model.startswith((".", "~", "/")):
        raise HubError(f"{model!r} is neither a file nor the name of a model: check the path.")
    raise HubError(
        f"{model!r} is neither a file nor a model of the catalogue ({', '.join(sorted(entries))}); "
        "a model on Hugging Face is named user/repo or user/repo:QUANT."
    )


def valid_repo(repo: str) -> bool:
    """Whether ``repo`` can be `user/name`; the folder of the cache is made from it."""
    return (
        _REPO.fullmatch(repo) is not None
        and ":" not in repo
        and "--" not in repo
        and ".." not in repo
        and all(safe_part(part) for part in repo.split("/"))
    )


def _on_hub(rest: str, model: str) -> Repo:
    """user/repo[:quant], user/repo/file.gguf, user/repo/resolve|blob/main/file.gguf"""
    user, _, tail = rest.partition("/")
    name, _, file = tail.partition("/")
    name, _, quant = name.partition(":")
    repo = f"{user}/{name}"
    for page in ("resolve/main/", "blob/main/", "tree/main"):
        file = file.removeprefix(page)
    if not valid_repo(repo) or (file and (quant or not file.lower().endswith(".gguf"))):
        raise HubError(
            f"{model!r} does not name a model on Hugging Face; hf.co/user/repo:QUANT does, and so "
            "does hf.co/user/repo/file.gguf (of the branch main)."
        )
    if file:
        return Repo(repo, file=file)
    match = _REPO.fullmatch(f"{repo}:{quant}") if quant else None
    if quant and not match:
        raise HubError(f"{quant!r} in {model!r} is not the name of a quantization.")
    return Repo(repo, quant or None)


def _url(model: str) -> Name:
    try:
        parts = urlsplit(model)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise HubError(f"{model!r} is not a URL: {error}.") from None
    if not model.isprintable() or " " in model or not host:
        raise HubError(f"{model!r} is not a URL: percent-encode spaces and control characters.")
    check_scheme(model)
    if parts.username is not None:
        raise HubError("A URL with a user name or password in it is refused: it would be stored.")
    file = unquote(parts.path.rpartition("/")[2])
    if host in HUB_HOSTS and parts.scheme == "https":
        return _on_hub(unquote(parts.path).strip("/"), model)
    if not file.lower().endswith(".gguf") or not safe_part(file):
        raise HubError(
            f"{model!r} does not end in the name of a .gguf file: download it yourself and give "
            "its path."
        )
    return Url(model, file)


def check_scheme(url: str, also: str | None = None) -> None:
    """https, or http to this machine or to the origin ``also``."""
    parts = urlsplit(url)
    local = parts.scheme == "http" and parts.hostname in LOCAL_HOSTS
    if parts.scheme != "https" and not local and origin(url) != also:
        raise HubError(f"{url!r} is refused: models are fetched by https, by http only locally.")


def origin(url: str) -> str:
    """What must be the same for credentials to be sent: scheme, host and port."""
    parts = urlsplit(url)
    port = parts.port or {"https": 443, "http": 80}.get(parts.scheme)
    return f"{parts.scheme}://{(parts.hostname or '').lower()}:{port}"


def quant_of(file: str) -> str | None:
    """The quantization that a file name (or its folder) tells, in capitals."""
    split = _SPLIT.fullmatch(file)
    stem = split[1] if split else re.sub(r"\.gguf$", "", file, flags=re.IGNORECASE)
    folder, _, name = stem.rpartition("/")
    found = _QUANT.findall(name) or _QUANT.findall(folder)
    return found[-1].upper() if found else None


def parts_of(file: str) -> list[str]:
    """All files of the model that ``file`` is, or is a part of, in order."""
    match = _SPLIT.fullmatch(file)
    if not match or not 1 <= int(match[2]) <= int(match[3]) <= 1024:
        return [file]
    count = int(match[3])
    end = file[-5:]
    return [f"{match[1]}-{number:05}-of-{count:05}{end}" for number in range(1, count + 1)]


def models_among(files: Iterable[str]) -> list[str]:
    """The files that begin a model: parts after the first, projectors and matrices left out."""
    found = []
    for file in sorted(files):
        name = file.rpartition("/")[2].lower()
        other = name.startswith(("mmproj", "imatrix")) or "mmproj-" in name
        if name.endswith(".gguf") and not other and parts_of(file)[0] == file:
            found.append(file)
    return found


def choose(name: Repo, files: Sequence[str]) -> list[str]:
    """The parts of the file that ``name`` means among those of its repository; HubError if none."""
    models = models_among(files)
    if not models:
        raise HubError(f"{name.repo} holds no GGUF file; look for a repository named ...-GGUF.")
    wanted = [file for file in models if _is_meant(name, file)]
    if not wanted and (name.quant or name.file):
        there = sorted({quant_of(file) or file for file in models})
        asked = name.quant or name.file
        raise HubError(f"{name.repo} has no {asked}; it has {', '.join(there[:40])}.")
    parts = parts_of((wanted or models)[0])
    missing = [part for part in parts if part not in files]
    if missing:
        raise HubError(f"{name.repo} lacks {missing[0]}, a part of {parts[0]}.")
    return parts


def _is_meant(name: Repo, file: str) -> bool:
    if name.file is not None:
        return file == parts_of(name.file)[0]
    asked, quant = (name.quant or DEFAULT_QUANT).upper(), quant_of(file)
    if quant is not None and asked in (quant, quant.removeprefix("UD-")):
        return True
    return name.quant is not None and asked == file.rpartition("/")[2].upper()
