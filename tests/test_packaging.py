"""pyproject.toml lists the packages by hand: the list must be the tree."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


def test_the_packages_are_those_of_the_tree():
    found = set()
    for name, folder in SETUP["package-dir"].items():
        for marker in (ROOT / folder).rglob("__init__.py"):
            inside = marker.parent.relative_to(ROOT / folder)
            linked = any(
                (ROOT / folder / parent).is_symlink() for parent in (inside, *inside.parents)
            )
            if not linked:
                found.add(".".join((name, *inside.parts)))
    assert found == set(SETUP["packages"])


def test_the_links_lead_to_the_folders():
    for name, folder in SETUP["package-dir"].items():
        path = ROOT / Path(*name.split("."))
        assert path.resolve() == (ROOT / folder).resolve()
