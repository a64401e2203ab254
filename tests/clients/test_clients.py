"""The server with clients that people use: each in an environment of its own, on a real model."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from client_env import serving

pytestmark = [pytest.mark.real, pytest.mark.slow]
HERE = Path(__file__).parent
PINS = tomllib.loads((HERE / "requirements.toml").read_text())
OFFLINE = {"HF_HUB_OFFLINE": "1", "LLM_USER_PATH": "", "PYTHONPATH": ""}


@pytest.fixture(scope="module")
def url(real_model: Callable[[str], Path]) -> Iterator[str]:
    """Of a server of its own process."""
    with serving(real_model("SmolLM2"), "-c", "2048") as address:
        yield address


def run(command: list[str | Path], **more: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **OFFLINE, **more}, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", ["langchain", "pydantic_ai"])
def test_python_clients(url: str, python_of: Callable[..., Path], name: str) -> None:
    python = python_of(name)
    assert run([python, HERE / f"{name}.py", url, "smol"]).strip().endswith("ok")


def test_llm(url: str, python_of: Callable[..., Path], tmp_path: Path) -> None:
    """Simon Willison's llm, streaming and not."""
    python = python_of("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: smol\n  model_name: smol\n  api_base: {url}\n  api_key_name: none\n"
    )
    for flags in ([], ["--no-stream"]):
        command = [
            python,
            "-m",
            "llm",
            "-m",
            "smol",
            "-o",
            "max_tokens",
            "12",
            *flags,
            "Say hello.",
        ]
        assert run(command, LLM_USER_PATH=str(tmp_path), OPENAI_API_KEY="none").strip()


@pytest.mark.parametrize("name", ["openai", "ai_sdk"])
def test_node_clients(url: str, tmp_path: Path, name: str) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("there is no Node here")
    install = subprocess.run(
        [npm, "install", "--silent", *PINS["node"][name]], cwd=tmp_path, capture_output=True,
        text=True,
    )  # fmt: skip
    if install.returncode:
        pytest.skip(f"{name} cannot be installed: {install.stderr[-200:]}")
    script = tmp_path / f"{name}.mjs"
    shutil.copy(HERE / f"{name}.mjs", script)
    assert run([node, script, url, "smol"]).strip().endswith("ok")
