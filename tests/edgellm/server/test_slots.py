"""llama-server's slot actions: a cache saved by one server and restored by the next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgellm.server.safety import Guard

LONG = {"prompt": "a long prompt " * 20, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
OPTIONS: dict[str, Any] = {"n_ctx": 1024, "max_num_seqs": 2}


def cached(answer: Any) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def act(server: Any, action: str, filename: str | None = None, slot: int = 0, **more: Any) -> Any:
    body = {} if filename is None else {"filename": filename}
    return server.post(f"/slots/{slot}?action={action}", body, **more)


def test_another_server_goes_on_from_a_saved_slot(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    first = start(slot_dir=tmp_path, **OPTIONS)
    whole = first.post("/v1/completions", LONG).json()
    n = whole["usage"]["total_tokens"]
    saved = act(first, "save", "talk.kv").json()
    assert saved["id_slot"] == 0 and saved["filename"] == "talk.kv" and saved["n_saved"] == n - 1
    assert saved["n_written"] == (tmp_path / "talk.kv").stat().st_size
    assert saved["timings"]["save_ms"] > 0
    second = start(slot_dir=tmp_path, **OPTIONS)
    restored = act(second, "restore", "talk.kv", slot=1).json()
    assert restored["n_restored"] == n - 1 and restored["n_read"] == saved["n_written"]
    again = second.post("/v1/completions", LONG)
    assert cached(again) == again.json()["usage"]["prompt_tokens"] - 1
    assert again.json()["choices"][0]["text"] == whole["choices"][0]["text"]


def test_an_erased_slot_is_computed_anew(start: Callable[..., Any], tmp_path: Path) -> None:
    server = start(slot_dir=tmp_path, host_cache_bytes=1 << 20, **OPTIONS)
    before = server.post("/v1/completions", LONG).json()
    other = {**LONG, "prompt": "of somebody else " * 20}
    server.post("/v1/completions", {**other, "cache_salt": "s"})
    server.post("/v1/completions", LONG)  # now the last one in slot 0 again
    assert act(server, "erase").json() == {
        "id_slot": 0, "n_erased": before["usage"]["total_tokens"] - 1}  # fmt: skip
    assert act(server, "erase").json()["n_erased"] == 0
    again = server.post("/v1/completions", LONG)
    assert cached(again) == 0 and again.json()["choices"] == before["choices"]
    assert cached(server.post("/v1/completions", {**other, "cache_salt": "s"})) > 300
    assert server.llm.runner.cache.faults() == []


def test_clients_share_neither_slots_nor_files(start: Callable[..., Any], tmp_path: Path) -> None:
    server = start(Guard(keys=("a", "b")), slot_dir=tmp_path, **OPTIONS)
    headers = {key: {"authorization": f"Bearer {key}"} for key in "ab"}
    server.post("/v1/completions", LONG, headers=headers["a"])
    refused = act(server, "save", "x.kv", headers=headers["b"])
    assert refused.status_code == 400 and "of yours" in refused.json()["error"]["message"]
    assert act(server, "erase", headers=headers["b"]).json()["n_erased"] == 0
    assert act(server, "save", "x.kv", headers=headers["a"]).status_code == 200
    assert act(server, "restore", "x.kv", headers=headers["b"]).status_code == 404
    assert act(server, "restore", "x.kv", headers=headers["a"]).status_code == 200


@pytest.fixture(scope="module")
def saving(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A server with something to save, and where it may."""
    folder = tmp_path_factory.mktemp("saving") / "slots"
    folder.mkdir()
    server = start(slot_dir=folder, **OPTIONS)
    server.post("/v1/completions", {**LONG, "max_tokens": 1})
    return server, folder


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "x\0", "é", "con", "a.", "x" * 65]
)
def test_a_name_that_is_a_path_is_refused(saving: tuple[Any, Path], name: str) -> None:
    """S20"""
    server, folder = saving
    for action in ("save", "restore"):
        answer = act(server, action, name)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "filename"
    assert list(folder.parent.rglob("*")) == [folder]


def test_what_cannot_be_done_is_said(
    server: Any, start: Callable[..., Any], tmp_path: Path
) -> None:
    without = act(server, "save", "x.kv")
    assert without.status_code == 403 and "--slot-save-path" in without.json()["error"]["message"]
    with_dir = start(slot_dir=tmp_path, **OPTIONS)
    assert act(with_dir, "save", "x.kv").status_code == 400  # nothing has ended there
    assert act(with_dir, "restore", "none.kv").status_code == 404
    assert act(with_dir, "save").json()["error"]["param"] == "filename"
    assert act(with_dir, "reset").json()["error"]["param"] == "action"
    assert act(with_dir, "erase", slot=2).status_code == 404
    assert with_dir.post("/slots/x?action=erase", {}).status_code == 404
    (tmp_path / "bad.kv").write_bytes(b"nothing of the kind")
    bad = act(with_dir, "restore", "bad.kv")
    message = bad.json()["error"]["message"]
    assert bad.status_code == 400 and message.startswith("bad.kv is not") and str(tmp_path) not in (
        message)  # fmt: skip
