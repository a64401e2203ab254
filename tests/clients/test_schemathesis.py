"""schemathesis: whatever the OpenAPI document allows, or forbids, is answered as it says."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from client_env import serving
from offers import HERMES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
# Of each operation: on two cores 200 take more than 5 minutes, 40 about 2.
EXAMPLES = os.environ.get("EDGELLM_SCHEMATHESIS_EXAMPLES", "40")
# What depends on the model (its tokens, its context, whether it is an encoder) or on other fields
# (tool_choice needs tools) no document says: such requests are refused though they fit the schema.
UNCHECKED = "positive_data_acceptance"


def test_replies_are_what_the_document_says(
    python_of: Callable[..., Path], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    python = python_of("schemathesis")
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    model = tiny_model("llama", template=HERMES, n_ctx=2048, controls=marks)
    with serving(model, "-c", "256") as url:
        done = subprocess.run(
            [python.parent / "schemathesis", "run", url.removesuffix("/v1") + "/openapi.json",
             "--max-examples", EXAMPLES, "--request-timeout", "60", "--continue-on-failure",
             "--checks", "all", "--exclude-checks", UNCHECKED, "--no-color"],
            capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
