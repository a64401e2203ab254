"""Models of Ollama, LM Studio and llama.cpp, as those programs lay them down."""

import json
from pathlib import Path

import pytest

from edgellm import hub
from edgellm.hub import HubError, held, shelf

from .fake import gguf, sha256

MODEL = gguf("held")


def ollama(root: Path, name: str, layers: object) -> None:
    path = root / "manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    (root / "blobs").mkdir(exist_ok=True)


def layer(digest: object, kind: str = held.OLLAMA_MODEL) -> dict[str, object]:
    return {"mediaType": kind, "digest": digest, "size": len(MODEL)}


@pytest.fixture
def machine(cache, tmp_path) -> Path:
    """A home with a model of each program; each has something wrong beside it."""
    home = tmp_path / "home"
    root = home / ".ollama/models"
    digest = f"sha256:{sha256(MODEL)}"
    template = layer("sha256:" + "b" * 64, "application/vnd.ollama.image.template")
    library = "registry.ollama.ai/library"
    ollama(root, f"{library}/tiny/latest", [layer(digest), template])
    ollama(root, "registry.ollama.ai/ann/mine/1b", [layer(digest)])
    ollama(root, "hf.co/ann/tiny-GGUF/Q4_K_M", [layer(digest)])
    (root / "blobs" / digest.replace(":", "-")).write_bytes(MODEL)
    # CVE-2024-37032 and CVE-2026-7020: a digest is not a path
    (root / "secret").write_bytes(MODEL)
    for number, evil in enumerate(["sha256:../secret", "../secret", f"{digest}/../../secret", 7]):
        ollama(root, f"{library}/evil{number}/latest", [layer(evil)])
    ollama(root, f"{library}/absent/latest", [layer("sha256:" + "c" * 64)])
    ollama(root, f"{library}/none/latest", {"a": 1})
    ollama(root, f"{library}/two/latest", [layer(digest), layer(digest)])
    (root / f"manifests/{library}/deep").mkdir()
    (root / f"manifests/{library}/deep/latest").write_text("[" * 100_000)

    studio = home / "elsewhere/ann/tiny"
    studio.mkdir(parents=True)
    (studio / "tiny-Q4_K_M.gguf").write_bytes(MODEL)
    (studio / "mmproj-tiny.gguf").write_bytes(MODEL)
    (studio / "half-00001-of-00002.gguf").write_bytes(MODEL)
    (home / ".lmstudio").mkdir()
    settings = {"downloadsFolder": str(home / "elsewhere")}
    (home / ".lmstudio/settings.json").write_text(json.dumps(settings))

    llama = home / ".cache/llama.cpp"
    llama.mkdir(parents=True)
    (llama / "ann_tiny_t-Q8_0.gguf").write_bytes(MODEL)
    (llama / "t.gguf.downloadInProgress").write_bytes(MODEL)
    (llama / "text.gguf").write_text("no model")
    return home


NAMES = [
    "ollama:hf.co/ann/tiny-GGUF:Q4_K_M",
    "ollama:ann/mine:1b",
    "ollama:tiny:latest",
    "lmstudio:ann/tiny/tiny-Q4_K_M.gguf",
    "llama.cpp:ann_tiny_t-Q8_0.gguf",
]


def test_all_are_found_and_used_in_place(machine):
    assert [found.name for found in held.everything()] == NAMES
    assert [model.name for model in shelf.everything()] == NAMES and shelf.fetched() == []
    for name in [*NAMES, "ollama:tiny"]:
        path = hub.resolve(name)
        assert path.read_bytes() == MODEL and path.is_relative_to(machine)


@pytest.mark.parametrize("name", NAMES)
def test_they_are_not_removed(machine, name):
    with pytest.raises(HubError, match="is held by (Ollama|LM Studio|llama.cpp): remove it there"):
        shelf.remove(name)
    assert hub.find(name).exists()


def test_what_they_do_not_hold(machine):
    for name in ("ollama:evil0", "ollama:../tiny", "lmstudio:../x", "llama.cpp:/etc/passwd"):
        with pytest.raises(HubError, match="holds no model .* it has"):
            hub.resolve(name)


def test_folders_by_environment(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "none"))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "l"))
    (tmp_path / "l").mkdir()
    (tmp_path / "l" / "own.gguf").write_bytes(MODEL)
    names = [found.name for found in held.everything()]
    assert names == [NAMES[3], "llama.cpp:own.gguf"]
    with pytest.raises(HubError, match="no GGUF file of it was found"):
        hub.resolve("ollama:tiny")


def test_special_files_are_not_opened(machine):
    import os

    pipe = machine / ".cache/llama.cpp/pipe.gguf"
    os.mkfifo(pipe)
    assert not held.is_gguf(pipe) and len(held.everything()) == len(NAMES)
