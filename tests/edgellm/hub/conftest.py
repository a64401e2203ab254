"""Servers, and a home in which no program has a model."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgellm.hub import remote

from .fake import Server


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache; nothing of the machine's own settings or models shows."""
    for name in list(os.environ):
        if name.startswith(("EDGELLM_", "HF_", "HUGGING", "OLLAMA", "LLAMA", "XDG_")):
            monkeypatch.delenv(name)
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGELLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "home").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def other() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Pauses of milliseconds."""
    quick = remote.Policy(timeout=0.5, tries=4, first_pause=0.01, longest_pause=0.02)
    monkeypatch.setattr(remote, "POLICY", quick)


@pytest.fixture
def hf(cache, server, monkeypatch, tmp_path) -> Server:
    """Hugging Face is the server; its constants were read when it was imported."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return server
