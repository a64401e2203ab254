"""Sessions on disk."""

import json
import os
import stat

import pytest

from edgellm import session
from edgellm.session import SessionError

STATE = {"system": None, "messages": [{"role": "user", "content": "é\ud83d"}], "seen": None}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("EDGELLM_CACHE", str(tmp_path))
    return tmp_path


def test_saved_and_loaded(cache):
    path = session.save("trip-1", STATE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert session.load("trip-1")["messages"][0]["content"] == "é?"
    assert session.load("other") is None
    assert session.names() == ["trip-1"]
    session.save("trip-1", STATE | {"system": "x"})
    assert session.load("trip-1")["system"] == "x"
    assert os.listdir(path.parent) == ["trip-1.json"]  # nothing half-written


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "../a", "a\\b", "a\0", "-rf", ".hidden", "a.", "con", "NUL.x", "a" * 65,
     "a b", "ä", "a\n"],
)  # fmt: skip
def test_names_that_could_lead_elsewhere(name):
    with pytest.raises(SessionError, match="cannot be the name"):
        session.path_of(name)


def test_a_failed_write_leaves_the_old_file(monkeypatch):
    path = session.save("a", STATE)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SessionError, match="No space left"):
        session.save("a", STATE | {"system": "new"})
    assert json.loads(path.read_text())["system"] is None
    assert os.listdir(path.parent) == ["a.json"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "[" * 100_000, '{"messages": {}}', '{"messages": [{"role": "x"}]}',
     '{"messages": [{"role": "user", "content": 1}]}', '{"messages": [], "system": 1}',
     '{"messages": [], "seen": {"text": "", "tokens": [true]}}', "\ud83d"],
)  # fmt: skip
def test_damage_is_said(text):
    path = session.path_of("a")
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(SessionError, match="damaged"):
        session.load("a")


def test_another_version_is_said():
    session.path_of("a").write_text('{"version": 99}')
    with pytest.raises(SessionError, match="another version"):
        session.load("a")


def test_no_place_for_sessions(cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setenv("EDGELLM_CACHE", str(cache / "file"))
    with pytest.raises(SessionError, match="EDGELLM_CACHE"):
        session.save("a", STATE)
