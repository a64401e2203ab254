"""Models of Hugging Face, kept in its cache, where every program that uses the cache finds them.

huggingface_hub answers what a repository holds, knows the token, the endpoint and the cache, and
makes the cache's links. The bytes of large files come by our own download, for huggingface_hub's
begins again at the first byte after a cut process and does not check the content: the file is put
into the cache's folder of blobs under its sha256, where huggingface_hub finds it complete.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edgellm.hub import names, records, remote, store
from edgellm.hub.catalogue import Entry
from edgellm.hub.names import Repo
from edgellm.hub.records import Record
from edgellm.hub.store import HubError, Item, Progress

T = TypeVar("T")


@dataclass(frozen=True)
class Listing:
    """What a repository holds."""

    commit: str
    licence: str | None
    files: dict[str, tuple[int | None, str | None]]  # path -> (size, sha256 of large files)


def find_repo(name: Repo) -> Path | None:
    """The file of ``name``, if edgellm or another program has put it into the cache."""
    for record in records.load_all():
        if record.kind == "hf" and record.repo == name.repo and same(name, record):
            if path := record.path():
                return path
    if name.quant is None and name.file is None:
        return None  # which file is the default, only the repository can tell
    return _in_snapshots(name)


def same(name: Repo, record: Record) -> bool:
    """Whether a record of the repository is what ``name`` means."""
    if name.quant is None and name.file is None:
        return record.default
    try:
        return names.choose(name, names.parts_of(record.file))[0] == record.file
    except HubError:
        return False


def fetched_for(entry: Entry) -> Repo | None:
    """The repository that has given a model of the catalogue, if one has."""
    from edgellm.hub.sources import repo_of

    if entry.file is not None and (store.models_dir() / entry.file).is_file():
        return None
    repos = [repo_of(source) for source in entry.sources if source["kind"] == "hf"]
    return next((repo for repo in repos if find_repo(repo)), None)


def fetch(name: Repo, progress: Progress | None = None, title: str | None = None) -> Path:
    """The file of ``name``, in its newest version; fetched where it is not there."""
    try:
        listing = _listing(name)
    except remote.NetworkError:
        if path := find_repo(name) or _in_snapshots(name):
            return path
        raise
    parts = names.choose(name, list(listing.files))
    folder = repo_folder(name.repo)
    item = Item(title or _name(name, parts[0]), _sum(listing, parts), listing.licence)
    _require_space(name, listing, parts, folder)
    done, paths = 0, []
    for part in parts:
        size, sha256 = listing.files[part]
        if sha256 is not None:
            _fetch_blob(name, listing, part, folder, _reporter(progress, item, done))
        with store.storing(str(name), folder), _answers(name):
            paths.append(_hub().hf_hub_download(name.repo, part, cache_dir=str(cache())))
        done += size or 0
    record = Record(
        name=_name(name, parts[0]),
        kind="hf",
        files=tuple(paths),
        repo=name.repo,
        file=parts[0],
        default=names.choose(Repo(name.repo), list(listing.files)) == parts,
        commit=listing.commit,
        licence=listing.licence or "",
    )
    records.save(record)
    return Path(paths[0])


def cache() -> Path:
    """The cache folder of Hugging Face."""
    return Path(_hub().constants.HF_HUB_CACHE)


def snapshots() -> Iterator[tuple[Repo, Path]]:
    """Every GGUF model in the cache of Hugging Face: (its name, its first file)."""
    for folder in sorted(cache().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/")
        if names.valid_repo(repo):
            snapshot = _snapshot(folder)
            for file in names.models_among(_files(snapshot)):
                if all((snapshot / part).is_file() for part in names.parts_of(file)):
                    quant = names.quant_of(file)
                    name = Repo(repo, quant) if quant else Repo(repo, file=file)
                    yield name, snapshot / file


def _name(name: Repo, file: str) -> str:
    quant = names.quant_of(file)
    if quant and name.file is None:
        return str(Repo(name.repo, quant))
    return str(Repo(name.repo, file=file))


def repo_folder(repo: str) -> Path:
    """The folder of a repository in the cache."""
    return store.inside(cache(), "models--" + repo.replace("/", "--"))


def _snapshot(folder: Path) -> Path:
    """The snapshot that the branch main is at, else the newest."""
    try:
        commit = (folder / "refs" / "main").read_text(encoding="ascii").strip()
        if commit and store.safe_part(commit) and (folder / "snapshots" / commit).is_dir():
            return folder / "snapshots" / commit
    except (OSError, ValueError):
        pass
    there = [path for path in folder.glob("snapshots/*") if path.is_dir()]
    return max(there, key=lambda path: path.stat().st_mtime, default=folder / "snapshots")


def _files(snapshot: Path) -> list[str]:
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")]


def _in_snapshots(name: Repo) -> Path | None:
    """The best file for ``name`` among those that are in the cache."""
    snapshot = _snapshot(repo_folder(name.repo))
    try:
        parts = names.choose(name, _files(snapshot))
    except HubError:
        return None
    return snapshot / parts[0] if (snapshot / parts[0]).is_file() else None


def _hub() -> Any:
    """huggingface_hub, imported when it is needed: it takes a while."""
    import huggingface_hub
    import huggingface_hub.constants

    return huggingface_hub


def _listing(name: Repo) -> Listing:
    with _answers(name):
        info = _hub().HfApi().model_info(name.repo, files_metadata=True, timeout=20)
    files: dict[str, tuple[int | None, str | None]] = {}
    for sibling in info.siblings or []:
        large: Any = sibling.lfs
        digest = store.sha256_digest(getattr(large, "sha256", None))
        path = sibling.rfilename
        if path.lower().endswith(".gguf") and all(map(store.safe_part, path.split("/"))):
            files[path] = (sibling.size, digest)
    commit = info.sha if isinstance(info.sha, str) and store.safe_part(info.sha) else "main"
    return Listing(commit, _licence(info), files)


def _licence(info: Any) -> str | None:
    tags = [tag for tag in info.tags or [] if isinstance(tag, str)]
    licences = [tag.removeprefix("license:") for tag in tags if tag.startswith("license:")]
    return licences[0][:100] if licences and licences[0].isprintable() else None


def _sum(listing: Listing, parts: list[str]) -> int | None:
    sizes = [listing.files[part][0] for part in parts]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _reporter(
    progress: Progress | None, item: Item, before: int
) -> Callable[[int, int | None], None]:
    return lambda done, total: progress(item, before + done) if progress else None


def _require_space(name: Repo, listing: Listing, parts: list[str], folder: Path) -> None:
    """Room for all parts is looked for before the first: a part alone is of no use."""
    needed = 0
    for part in parts:
        size, sha256 = listing.files[part]
        blob = folder / "blobs" / (sha256 or "")
        if size is not None and sha256 is not None and not blob.is_file():
            unfinished = remote.unfinished(blob)[0]
            needed += max(0, size - (unfinished.stat().st_size if unfinished.is_file() else 0))
    if needed:
        with store.storing(str(name), folder):
            store.require_space(folder, needed, str(name))


def _fetch_blob(
    name: Repo,
    listing: Listing,
    part: str,
    folder: Path,
    report: Callable[[int, int | None], None],
) -> None:
    """Put a large file into the blobs of the cache; huggingface_hub links it into the snapshot."""
    size, sha256 = listing.files[part]
    assert sha256 is not None
    hub = _hub()
    token = hub.get_token()
    wanted = remote.Wanted(
        url=hub.hf_hub_url(name.repo, part, revision=listing.commit),
        name=f"{name.repo}/{part}",
        size=size,
        sha256=sha256,
        headers={"Authorization": f"Bearer {token}"} if token else {},
        # Who sets HF_ENDPOINT to plain http has decided so; huggingface_hub obeys it as well.
        http_origin=names.origin(hub.constants.ENDPOINT),
    )
    remote.fetch(wanted, folder / "blobs" / sha256, report, cache() / ".locks" / "edgellm")


@contextmanager
def _answers(name: Repo) -> Iterator[None]:
    """Turn what huggingface_hub raises into one sentence."""
    from huggingface_hub import errors

    where = _hub().constants.ENDPOINT
    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise remote.NetworkError(
            f"{name} is not on this machine and HF_HUB_OFFLINE forbids to fetch it; unset that "
            "variable."
        ) from error
    except errors.GatedRepoError as error:
        raise HubError(
            f"{name.repo} is gated: accept its licence on {where}/{name.repo} and set HF_TOKEN to "
            "a token of that account."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"There is no repository {name.repo} on {where}, or it is private: check the name, or "
            "set HF_TOKEN to a token that may read it."
        ) from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        text = f"{where} answered HTTP {status} for {name.repo}; try again later."
        if status == 429 or (status or 0) >= 500:
            raise remote.NetworkError(text) from error
        raise HubError(text) from error
    except OSError as error:
        if not isinstance(error, ConnectionError | TimeoutError) and error.filename:
            raise  # of the file system
        raise _no_network(name, where, error) from error
    except Exception as error:
        # The errors of its HTTP library, which is another one in each of its major versions.
        if type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "requests"):
            raise _no_network(name, where, error) from error
        raise


def _no_network(name: Repo, where: str, error: Exception) -> HubError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return remote.NetworkError(
        f"{where} could not be reached for {name}: {reason.rstrip('.')}; check the network, or "
        "download the file yourself and give its path."
    )
