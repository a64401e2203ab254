"""D15: what becomes of the model's file while it is served. Weights are in the server's own memory;
rows of the embedding table are read from the file as tokens come, with their length checked, so
what is gone from it is an error of the requests that need it and never a signal."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm.quant.gguf import GGUF

BODY = {"prompt": "once upon a time", "temperature": 0, "max_tokens": 300, "ignore_eos": True}
COMPLETIONS = "/v1/completions"


def end_of_embeddings(path: Path) -> int:
    with GGUF(path) as model:
        table = model.tensors["token_embd.weight"]
        return int(table.offset + table.n_bytes)


def cut_behind_embeddings(path: Path, other: Path) -> None:
    os.truncate(path, end_of_embeddings(path))


def remove(path: Path, other: Path) -> None:
    path.unlink()


def replace(path: Path, other: Path) -> None:
    os.replace(shutil.copy(other, path.with_suffix(".new")), path)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def served(
    request: pytest.FixtureRequest, start: Callable[..., Any], tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> Iterator[tuple[Any, Path, Path]]:  # fmt: skip
    """(server, its file, the file of another model)."""
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_model("llama", n_ctx=2048, tied=request.param), path)
    yield start(path=path, n_ctx=1024), path, tiny_model("llama", seed=5)


def text_of(server: Any, stream: bool, meanwhile: Callable[[], None] = lambda: None) -> str:
    """The text of an answer; ``meanwhile`` happens when it has begun."""
    if not stream:
        answer = server.post(COMPLETIONS, BODY)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])
    texts: list[str] = []
    with server.http.stream("POST", COMPLETIONS, json={**BODY, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                texts.append(json.loads(line[6:])["choices"][0]["text"])
                if len(texts) == 3:
                    meanwhile()
    return "".join(texts)


@pytest.mark.parametrize("change", [cut_behind_embeddings, remove, replace])
def test_a_file_that_changes_changes_no_tokens(
    served: tuple[Any, Path, Path], change: Callable[[Path, Path], None]
) -> None:
    server, path, other = served
    expected = text_of(server, stream=False)
    assert text_of(server, True, meanwhile=lambda: change(path, other)) == expected
    assert text_of(server, stream=False) == expected
    assert server.http.get("/livez").status_code == 200


def test_what_the_file_no_longer_has_is_said(served: tuple[Any, Path, Path]) -> None:
    server, path, _ = served
    expected, whole = text_of(server, stream=False), path.read_bytes()
    lines: list[str] = []
    with server.http.stream("POST", COMPLETIONS, json={**BODY, "stream": True}) as answer:
        for line in answer.iter_lines():
            lines += [line] if line else []
            if len(lines) == 3:
                os.truncate(path, 100)
    assert json.loads(lines[-1][6:])["error"]["code"] == "model_file_changed"
    refused = server.post(COMPLETIONS, BODY)
    error = refused.json()["error"]
    assert refused.status_code == 500 and error["code"] == "model_file_changed"
    assert "cut short" in error["message"] and str(path.parent) not in refused.text
    assert server.http.get("/livez").status_code == 200
    path.write_bytes(whole)  # the same file, filled again
    assert text_of(server, stream=False) == expected
    server.until(server.is_idle)
