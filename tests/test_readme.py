"""README says what the registries say."""

from pathlib import Path

from edgellm.what_runs import what_runs

README = Path(__file__).parent.parent / "README.md"


def test_the_table_of_what_runs_is_generated() -> None:
    start, end = "<!-- generated: what runs -->\n", "<!-- end of generated -->"
    block = README.read_text().split(start)[1].split(end)[0]
    assert block == what_runs(), "print it with: edgellm inspect --architectures"
