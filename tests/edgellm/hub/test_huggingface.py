"""Repositories of a hub that the tests play: choice, splits, resume, token, offline reuse."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from edgellm import hub
from edgellm.hub import HubError, huggingface, records, shelf, store
from edgellm.hub.catalogue import Entry
from edgellm.hub.sources import fetch_entry

from .fake import Fault, blob, gguf, sha256

REPO = "ann/tiny-GGUF"


@pytest.fixture
def repo(hf) -> dict[str, bytes]:
    names = ["t-Q4_K_M.gguf", "t-Q8_0.gguf", "t-BF16-00001-of-00002.gguf"]
    names += ["t-BF16-00002-of-00002.gguf", "mmproj-t-f16.gguf"]
    hf.repos[REPO] = {name: blob(200_000 + i) for i, name in enumerate(names)}
    return hf.repos[REPO]


def test_the_default_and_a_quantization(hf, repo):
    seen = []
    path = hub.resolve(REPO, lambda item, done: seen.append((item.title, item.licence, done)))
    assert path.read_bytes() == repo["t-Q4_K_M.gguf"]
    assert seen[-1] == (f"{REPO}:Q4_K_M", "apache-2.0", 200_000)
    assert path.name == "t-Q4_K_M.gguf" and f"snapshots/{hf.commit}" in path.as_posix()
    assert hub.resolve(f"hf.co/{REPO}:q8_0").read_bytes() == repo["t-Q8_0.gguf"]
    assert hub.resolve(f"hf.co/{REPO}/t-Q8_0.gguf").read_bytes() == repo["t-Q8_0.gguf"]
    before = len(hf.log)
    assert hub.resolve(REPO) == path and hub.resolve(f"{REPO}:Q4_K_M") == path
    assert hub.find(f"{REPO}:bf16") is None and hub.find("ann/other:Q4_0") is None
    assert len(hf.log) == before  # without the network


def test_all_parts_of_a_split_file(hf, repo, tmp_path):
    path = hub.resolve(f"{REPO}:BF16")
    assert path.name == "t-BF16-00001-of-00002.gguf"
    for part in ("t-BF16-00001-of-00002.gguf", "t-BF16-00002-of-00002.gguf"):
        assert (path.parent / part).read_bytes() == repo[part]
    blobs = sorted(p.name for p in (tmp_path / "hf").glob("models--*/blobs/*"))
    assert blobs == sorted(sha256(repo[part]) for part in repo if "BF16" in part)


def test_huggingface_hub_finds_it(hf, repo, tmp_path):
    from huggingface_hub import hf_hub_download

    path = hub.resolve(REPO)
    found = hf_hub_download(
        REPO, "t-Q4_K_M.gguf", cache_dir=str(tmp_path / "hf"), local_files_only=True
    )
    assert found == str(path)


def test_a_cut_is_continued_in_the_next_process(hf, repo):
    file = f"/{REPO}/resolve/{hf.commit}/t-Q4_K_M.gguf"
    hf.fault(file, Fault("cut", 70_000), Fault("status", status=400))
    with pytest.raises(HubError):
        hub.resolve(REPO)
    assert hub.resolve(REPO).read_bytes() == repo["t-Q4_K_M.gguf"]
    gets = [h for method, path, h, _ in hf.log if path == file and method == "GET"]
    assert [h.get("range") for h in gets] == [None, "bytes=70000-", "bytes=70000-"]


def test_the_token_goes_to_the_hub_alone(hf, repo, other, monkeypatch):
    hf.elsewhere, hf.token = other, "hf_secret"
    with pytest.raises(HubError, match="gated: accept its licence.*HF_TOKEN"):
        hub.resolve(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    other.fault(f"/blob/{sha256(repo['t-Q4_K_M.gguf'])}", Fault("cut", 50_000))
    assert hub.resolve(REPO).read_bytes() == repo["t-Q4_K_M.gguf"]
    assert len(other.log) >= 2 and "hf_secret" not in repr(other.log)


def test_a_host_that_gives_other_bytes_is_found_out(hf, repo, other):
    hf.elsewhere = other
    place = f"/blob/{sha256(repo['t-Q4_K_M.gguf'])}"
    other.fault(place, Fault("other", data=blob(200_000)))
    with pytest.raises(HubError, match="another checksum"):
        hub.resolve(REPO)
    assert hub.find(REPO) is None


def test_room_for_all_parts_is_looked_for_before_the_first(hf, repo, monkeypatch, tmp_path):
    room = type("U", (), {"free": (16 << 20) + 300_000})()
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: room)
    with pytest.raises(HubError, match="HF_HUB_CACHE"):
        hub.resolve(f"{REPO}:BF16")
    assert not list((tmp_path / "hf").rglob("*.partial"))
    assert hub.resolve(f"{REPO}:Q8_0").is_file()


def test_refusals(hf, repo):
    with pytest.raises(HubError, match="no repository ann/absent .*HF_TOKEN"):
        hub.resolve("ann/absent")
    with pytest.raises(HubError, match="has no Q2_K; it has BF16, Q4_K_M, Q8_0"):
        hub.resolve(f"{REPO}:Q2_K")
    hf.repos["ann/none"] = {"model.safetensors": b"x"}
    with pytest.raises(HubError, match="no GGUF file"):
        hub.resolve("ann/none")


def test_names_of_files_that_lead_out_are_not_seen(hf):
    hf.repos["ann/evil"] = {"../../x-Q4_K_M.gguf": blob(10), "/etc/y.gguf": blob(10)}
    with pytest.raises(HubError, match="no GGUF file"):
        hub.resolve("ann/evil")


def test_offline(hf, repo, monkeypatch):
    from huggingface_hub import constants

    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(HubError, match="HF_HUB_OFFLINE forbids"):
            hub.resolve(REPO)
    path = hub.resolve(f"{REPO}:Q8_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.resolve(f"{REPO}:Q8_0") == path
    assert hub.resolve(REPO) == path  # what is there is better than nothing
    assert hub.pull(f"{REPO}:Q8_0") == path


def test_no_hub(hf, repo, monkeypatch):
    from huggingface_hub import constants

    path = hub.resolve(REPO)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.resolve(REPO) == hub.pull(REPO) == path
    with pytest.raises(HubError, match="could not be reached.*check the network"):
        hub.resolve(f"{REPO}:Q8_0")


def test_pull_looks_for_a_newer_file(hf, repo):
    old = hub.pull(REPO)
    assert hub.pull(REPO) == old
    hf.commit = "d00d" * 10
    repo["t-Q4_K_M.gguf"] = blob(1000)
    assert hub.resolve(REPO) == old
    new = hub.pull(REPO)
    assert new.read_bytes() == repo["t-Q4_K_M.gguf"] and hub.resolve(REPO) == new


def test_what_another_program_has_fetched_is_used(hf, repo, tmp_path):
    from huggingface_hub import hf_hub_download

    path = hf_hub_download(REPO, "t-Q8_0.gguf", cache_dir=str(tmp_path / "hf"))
    before = len(hf.log)
    assert str(hub.resolve(f"{REPO}:Q8_0")) == path and len(hf.log) == before
    names = {model.name: model.where for model in shelf.everything()}
    assert names == {f"{REPO}:Q8_0": "hf"} and shelf.fetched() == []
    with pytest.raises(HubError, match="another program fetched it"):
        shelf.remove(f"{REPO}:Q8_0")


def test_remove(hf, repo, tmp_path):
    hub.resolve(REPO)
    hub.resolve(f"{REPO}:BF16")
    assert [m.name for m in shelf.fetched()] == [f"{REPO}:BF16", f"{REPO}:Q4_K_M"]
    shelf.remove(f"{REPO}:bf16")
    assert hub.find(f"{REPO}:BF16") is None and hub.find(REPO) is not None
    shelf.remove(REPO)
    assert not (tmp_path / "hf" / "models--ann--tiny-GGUF").exists()
    with pytest.raises(HubError, match="not among what edgellm has fetched"):
        shelf.remove(REPO)


def test_a_blob_that_another_snapshot_needs_stays(hf, repo, tmp_path):
    from huggingface_hub import hf_hub_download

    hub.resolve(REPO)
    hf.commit = "d00d" * 10
    later = hf_hub_download(REPO, "t-Q4_K_M.gguf", cache_dir=str(tmp_path / "hf"))
    shelf.remove(REPO)
    with open(later, "rb") as file:
        assert file.read() == repo["t-Q4_K_M.gguf"]


def test_the_next_source_and_the_sum_of_errors(hf, repo, cache):
    entry = Entry(
        title="Tiny",
        size=None,
        licence="MIT",
        name="tiny",
        sources=(
            {"kind": "hf", "repo": "ann/absent", "quant": "Q4_K_M"},
            {"kind": "hf", "repo": REPO, "quant": "Q8_0"},
        ),
    )
    assert fetch_entry(entry).read_bytes() == repo["t-Q8_0.gguf"]
    del hf.repos[REPO]
    shelf.remove(f"{REPO}:Q8_0")
    with pytest.raises(HubError, match=r"any of its sources: \(1\) .*absent.*; \(2\) .*tiny") as e:
        fetch_entry(entry)
    assert "\n" not in str(e.value)


def test_a_source_that_is_a_url(server, cache):
    data = server.files["/x"] = blob()
    url = {"kind": "url", "url": f"{server.url}/x"}
    entry = Entry("Tiny", len(data), "MIT", "tiny", (url,), "tiny.gguf", sha256(data))
    assert fetch_entry(entry).read_bytes() == data
    with pytest.raises(HubError, match="lacks file, size or sha256"):
        fetch_entry(replace(entry, sha256=None, file=None))


def test_records_that_are_damaged_are_no_records(hf, repo):
    path = hub.resolve(REPO)
    folder = records._folder()
    (folder / "x.json").write_text("{")
    (folder / "y.json").write_text('{"name": "a"}')
    good = next(iter(records.load_all()))
    other = replace(good, name="z", files=("/etc/passwd",))
    records.save(other)
    assert [record.name for record in records.load_all()] == [good.name, "z"]
    assert shelf._with_blobs(other, path.parent.parent) == []


def test_a_record_cannot_make_rm_delete_elsewhere(hf, repo, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    hub.resolve(REPO)
    (record,) = records.load_all()
    link = tmp_path / "hf/models--ann--tiny-GGUF/snapshots/../../../victim"
    records.save(replace(record, files=(str(victim), str(link))))
    with pytest.raises(HubError, match="another program|not among"):
        shelf.remove(REPO)
    assert victim.exists()


def test_by_environment_in_a_process_of_its_own(server, cache, tmp_path):
    """HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE as a user sets them."""
    server.repos[REPO] = {"t-Q4_K_M.gguf": gguf(size=100_000)}
    server.token = "hf_secret"
    settings = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "h"), "HF_TOKEN": "hf_secret"}
    first = edgellm("pull", REPO, **settings)
    path = tmp_path / "h/hub/models--ann--tiny-GGUF/snapshots" / server.commit / "t-Q4_K_M.gguf"
    assert first.stdout.strip() == str(path) and first.returncode == 0
    server.close()
    again = edgellm("pull", REPO, **{**settings, "HF_HUB_OFFLINE": "1"})
    assert again.stdout == first.stdout and again.stderr == ""
    listed = edgellm("list", **settings).stdout
    assert f"{REPO}:Q4_K_M" in listed and "100.0 kB" in listed and "llama" in listed


def edgellm(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "edgellm", *arguments]
    return subprocess.run(
        command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=60
    )


def test_the_cache_is_huggingfaces(hf, tmp_path):
    assert huggingface.cache() == tmp_path / "hf"
