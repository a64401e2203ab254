"""The command `edgellm`.

A command is the function `command` of cli/<name>.py. Its file is imported only when it is run (or
listed by --help), and imports the engine only inside the function, so that --version, --help and a
mistyped flag answer at once.

What a user can act on ends as one sentence on stderr and exit code 2; a fault of our own keeps its
traceback.
"""

import contextlib
import os
import pkgutil
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from edgellm import cli
from edgellm.cli._output import visible
from edgellm.errors import EdgeLLMError

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
BROKEN_PIPE = 141  # 128 + SIGPIPE
REFUSED = 2

# ClickException and UsageError, without naming the module, which moved between versions of typer.
_ClickError: Any = typer.BadParameter.__mro__[2]


class _Commands(TyperGroup):
    """Finds commands by file name instead of holding a list of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = (module.name for module in pkgutil.iter_modules(cli.__path__))
        return sorted(n.replace("_", "-") for n in names if n != "main" and not n.startswith("_"))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Also a name of two words: `bench serve-sim` is cli/bench_serve_sim.py."""
        if len(args) > 1 and (name := f"{args[0]}-{args[1]}") in self.list_commands(ctx):
            args = [name, *args[2:]]
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = import_module(f"edgellm.cli.{cmd_name.replace('-', '_')}")
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name)(module.command)
        return get_command(single)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # before the library below answers it in its own way
            # Python flushes stdout once more at exit; that must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None


app = typer.Typer(
    cls=_Commands,
    name="edgellm",
    help="Run quantized language models on the machine you have.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help; the rich one costs 0.1 s
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from edgellm import __version__

        print(f"edgellm {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def run(arguments: list[str]) -> int:
    """Run one command line; the exit code."""
    try:
        result = get_command(app).main(arguments, prog_name="edgellm", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except _ClickError as error:
        ctx = getattr(error, "ctx", None)
        path = ctx.command_path if ctx else "edgellm"
        _complain(f"{path}: {error.format_message()} (see `{path} --help`)")
        return REFUSED
    except ValueError as error:
        if not _for_the_user(error):
            raise
        _complain(f"edgellm: {error}")
        return REFUSED
    except RuntimeError as error:
        code = getattr(error, "exit_code", None)  # of a GPU that failed
        if code is None:
            raise
        _complain(f"edgellm: {error}")
        return int(code)
    except OSError as error:  # a full disk under stdout, most of all
        _complain(f"edgellm: {error.filename or 'the output'}: {error.strerror or error}.")
        return REFUSED
    except MemoryError:
        _complain("edgellm: there is not enough memory; a smaller --ctx-size or model needs less.")
        return REFUSED


def _for_the_user(error: ValueError) -> bool:
    """Typed errors of ours; layers below `edgellm` derive theirs from ValueError directly."""
    return isinstance(error, EdgeLLMError) or type(error).__module__.startswith("edgellm.")


def _complain(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # Names of files and of repositories get into sentences.
    print(visible(" ".join(text.split())), file=sys.stderr)


def main() -> None:
    """Entry point of the installed command."""
    # Closed by the caller (`>&-`): what is written has nowhere to go, and there is nothing to read.
    sys.stdin = sys.stdin or open(os.devnull)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character gets a replacement, not a traceback.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError:  # said already; Python would say it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = code or REFUSED
    sys.exit(code)
