"""Imports point one way: quant <- kernels <- models <- edgellm <- cli."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("quant", "kernels", "models", "edgellm", "cli")
# Where a library may be imported; the folders are relative to the root.
CONFINED = {"numba": "kernels/cpu", "llvmlite": "kernels/cpu", "cupy": "kernels/cuda"}


def sources() -> list[Path]:
    files: list[Path] = []
    for layer in LAYERS:
        # The links edgellm/quant and so on lead to the other layers: not followed, read once.
        for path in (ROOT / layer).rglob("*.py"):
            inside = path.relative_to(ROOT)
            if not any(parent.is_symlink() for parent in path.parents if parent != ROOT):
                files.append(inside)
    return sorted(set(files))


def imports(path: Path) -> Iterator[str]:
    """Full names of all modules imported anywhere in a file, but for type checking only."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            skipped |= {inner for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> str | None:
    """The layer a module belongs to; None outside this project."""
    first, _, rest = module.partition(".")
    if first != "edgellm":
        return None
    second = rest.partition(".")[0]
    return second if second in LAYERS else "edgellm"


def wrong(path: Path) -> list[str]:
    own = LAYERS.index(path.parts[0])
    # `python -m edgellm` has to be in edgellm/, and is nothing but the command line.
    if path == Path("edgellm/__main__.py"):
        own = LAYERS.index("cli")
    result = []
    for module in imports(path):
        layer = layer_of(module)
        if layer is not None and LAYERS.index(layer) > own:
            result.append(f"{module} lies above {path.parts[0]}")
        home = CONFINED.get(module.partition(".")[0])
        if home is not None and not path.is_relative_to(home):
            result.append(f"{module} belongs into {home}")
    return result


@pytest.mark.parametrize("path", sources(), ids=str)
def test_imports_point_downwards(path):
    assert wrong(path) == []


def test_the_rule_can_fail(monkeypatch, tmp_path):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "quant").mkdir()
    bad = "import numba\nfrom edgellm import sampling\nfrom edgellm.kernels.cpu import team\n"
    (tmp_path / "quant" / "bad.py").write_text(bad)
    assert len(wrong(Path("quant/bad.py"))) == 3
    assert sources() == [Path("quant/bad.py")]
