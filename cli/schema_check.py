"""edgellm schema-check: whether answers can be held to a JSON schema."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from edgellm.cli._output import write
from edgellm.errors import EdgeLLMError


def command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A JSON schema; - reads stdin.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check a JSON schema: whether answers can be held to it (exit code 2: what cannot, where)."""
    schema = _read(file)

    from edgellm.schema_check import check_schema

    fault = check_schema(schema)
    if as_json:
        found = {"file": file, "supported": fault is None, "pointer": None, "message": None}
        if fault is not None:
            found |= {"pointer": fault.pointer, "message": fault.message}
        write(json.dumps(found, ensure_ascii=False) + "\n")
        if fault is not None:
            raise typer.Exit(2)
    elif fault is None:
        write(f"{file}: the schema is supported.\n")
    else:
        where = f"at {fault.pointer}" if fault.pointer else "at the top"
        raise EdgeLLMError(f"{file}, {where}: {fault.message}")


def _read(file: str) -> Any:
    """What the file holds. EdgeLLMError."""
    try:
        text = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return json.loads(text)
    except OSError as error:
        raise EdgeLLMError(f"{file} cannot be read: {error.strerror or error}.") from None
    except RecursionError:
        raise EdgeLLMError(f"{file} is nested too deeply.") from None
    except ValueError as error:
        raise EdgeLLMError(f"{file} is not JSON: {error}.") from None
