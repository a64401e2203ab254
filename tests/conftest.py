"""Where tests find models and vectors, and the tiny models they build."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import edgellm  # noqa: F401  before tests/ is on the path: tests/edgellm would pass for it

sys.path.insert(0, str(Path(__file__).parent))  # tests import tiny.py from any folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=("emulated", "cuda"), default="emulated",
        help="where tests of the CUDA back end run: on the CPU (needs g++), or on a GPU",
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function (architecture, **options) -> path of a tiny model, built once for each."""
    import tiny  # needs the gguf package, which a machine that only runs the GPU's tests may lack

    folder = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def get(architecture: str = "llama", **options: object) -> Path:
        name = f"{architecture} {sorted(options.items(), key=str)}"
        if name not in made:
            path = folder / f"{architecture}-{len(made)}.gguf"
            made[name] = tiny.build(path, architecture, **options)  # type: ignore[arg-type]
        return made[name]

    return get


@pytest.fixture(scope="session")
def emulator() -> None:
    """Skips where GPUs cannot be emulated."""
    from edgellm.kernels.cuda.emulator import has_compiler

    if not has_compiler():
        pytest.skip("the emulated GPU needs g++")


@pytest.fixture(scope="session")
def vectors() -> Path:
    """The folder of independent expected values; skips where there is none."""
    folder = os.environ.get("EDGELLM_VECTORS", "")
    if not folder:
        pytest.skip("EDGELLM_VECTORS names no folder of expected values")
    return Path(folder)


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """A function from a part of a file name to a real model; skips where it was not fetched."""
    default = Path.home() / ".cache/edgellm/test-models"
    folder = Path(os.environ.get("EDGELLM_TEST_MODELS", default))

    def get(part: str) -> Path:
        for path in sorted(folder.glob("*.gguf")):
            if part in path.name:
                return path
        pytest.skip(f"no model {part} in the folder of test models")

    return get
