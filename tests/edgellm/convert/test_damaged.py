"""Values of a directory's JSON replaced at random: converted, or refused in one sentence."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from edgellm.cli.main import run

from . import directories

ODD = [None, True, -1, 0, 10**12, 0.5, "", "x", [], {}, ["x"], {"x": 1}, [[]], [None]]
FILES = {
    "qwen2": ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
    "phi3": ("config.json", "tokenizer_config.json"),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something can be replaced; of long lists and tables the first few."""
    if isinstance(value, dict):
        inner = list(value.items())[:40]
    elif isinstance(value, list):
        inner = list(enumerate(value))[:3]
    else:
        return [path]
    return [path, *(p for key, below in inner for p in places(below, (*path, key)))]


@pytest.mark.parametrize("family", FILES)
def test_random_values_are_converted_or_refused_in_a_sentence(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(3)
    config = {**directories.CONFIGS[family], "num_hidden_layers": 1}
    directories.write(tmp_path, family, config=config)
    refused = 0
    for _ in range(60):
        path = tmp_path / rng.choice(FILES[family])
        text = path.read_text()
        value = json.loads(text)
        *above, last = rng.choice([p for p in places(value) if p])
        at = value
        for key in above:
            at = at[key]
        at[last] = rng.choice(ODD)
        path.write_text(json.dumps(value))
        code = run(["convert", str(tmp_path), str(tmp_path / "out.gguf"), "--force"])
        error = capsys.readouterr().err
        assert code in (0, 2), (above, last, at[last])
        assert code == 0 or error.startswith("edgellm"), error
        refused += code == 2
        path.write_text(text)
    assert 10 < refused < 60
