"""The command as a whole: finding commands, version, what it imports."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from edgellm.cli._output import visible
from edgellm.cli.main import run


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"edgellm {version('edgellm')}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_the_commands(capsys, arguments):
    assert run(arguments) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("run", "inspect", "warmup"))
    assert "_options" not in out and "main" not in out


def test_an_unknown_command_is_named(capsys):
    assert run(["frobnicate"]) == 2
    assert "frobnicate" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "-n", "0"],
        ["chat", "-n", "0"],
        ["chat", "--help"],
        ["inspect", "-c", "x"],
        ["--version"],
    ],
)
def test_an_answer_that_needs_no_engine_loads_nothing_heavy(arguments):
    code = (
        f"import sys; from edgellm.cli.main import run; run({arguments!r}); "
        "heavy = {'numpy', 'numba', 'jinja2', 'rich', 'tokenizers'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["chat", "run", "inspect", "warmup"])
def test_help_of_a_command(command, capsys):
    assert run([command, "--help"]) == 0
    assert "--model" in capsys.readouterr().out


def test_python_m_edgellm():
    done = subprocess.run(
        [sys.executable, "-m", "edgellm", "--version"], capture_output=True, text=True
    )
    assert done.stdout.startswith("edgellm ")


def test_control_characters_are_shown_not_obeyed():
    assert visible("a\x1b[31mb\tc\nd\x9b\r") == "a\\x1b[31mb\tc\nd\\x9b\\x0d"
