"""The fake engine, for every command that loads a model."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

FAKE = Path(__file__).with_name("fake_llm.py")


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """The fake engine in place, a model file at hand, no EDGELLM_* variables."""
    spec = importlib.util.spec_from_file_location("fake_llm", FAKE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fake_llm", module)
    monkeypatch.setitem(sys.modules, "edgellm.llm", None)  # so that it is put back afterwards
    spec.loader.exec_module(module)
    module.install()
    for name in [name for name in os.environ if name.startswith("EDGELLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    Path("m.gguf").write_bytes(b"GGUF")
    return module
