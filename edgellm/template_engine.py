"""Jinja2 as the transformers library runs it for chat templates: same options, filters, functions.

Templates come from files of unknown origin, so they run in Jinja2's sandbox, with caps on their own
length, on what one operator may allocate and on what they write. The sandbox has no clock: a
template that is not known to be harmless is rendered by this module in a process of its own
(template_helper.py). Nothing here may import the engine.
"""

import json
import traceback
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

MAX_SOURCE = 256 * 1024  # characters of a template; the longest known one has 40,000
MAX_REPEAT = 1_000_000  # elements of a repeated string or list
MAX_PROMPT = 64 << 20  # characters


class Fault(Exception):
    """What a template did wrong, in one sentence. ``undefined``: it missed a variable."""

    def __init__(self, text: str, undefined: bool = False) -> None:
        super().__init__(text)
        self.text, self.undefined = text, undefined


class _Generation(jinja2.ext.Extension):
    """The tag pair {% generation %}, which marks the model's turns for training: no effect here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(SandboxedEnvironment):
    """Jinja2's sandbox with a limit on what one operator may allocate.

    Not the immutable one: some templates call `.append` on lists. They work on a copy.
    """

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**":
            raise SecurityError("powers are not allowed")
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                if len(sequence) * count > MAX_REPEAT:
                    raise SecurityError(f"a repetition of more than {MAX_REPEAT:,} elements")
        return super().call_binop(context, operator, left, right)


class _Refusal(Exception):
    """What a template raises by raise_exception."""


def _raise_exception(message: object) -> None:
    raise _Refusal(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja2's own filter escapes for HTML. Generators become lists."""

    def plain(other: Any) -> Any:
        return list(other) if isinstance(other, Iterable) else str(other)

    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=plain,
    )


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["from_json"] = json.loads
    # The stock filter makes Markup, which then HTML-escapes whatever is joined to it.
    environment.filters["safe"] = lambda value: value
    environment.globals["raise_exception"] = _raise_exception
    return environment


ENVIRONMENT = _environment()


def compile_source(source: str) -> jinja2.Template:
    """The compiled template. Raises Fault."""
    if len(source) > MAX_SOURCE:
        raise Fault(
            f"The chat template has {len(source):,} characters; {MAX_SOURCE:,} are allowed."
        )
    with _faults_named():
        return ENVIRONMENT.from_string(source)


def run(
    template: jinja2.Template,
    context: Mapping[str, Any],
    now: datetime,
    max_prompt: int = MAX_PROMPT,
) -> str:
    """Render. The context is given away: a template may change what is in it. Raises Fault."""
    pieces: list[str] = []
    written = 0
    with _faults_named():
        for piece in template.generate({**context, "strftime_now": now.strftime}):
            written += len(piece)
            if written > max_prompt:
                raise SecurityError(f"it writes more than {max_prompt:,} characters")
            pieces.append(piece)
    return "".join(pieces)


class _faults_named:
    """Turns whatever a template raises into a Fault that names the template's line."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception):
            return
        if isinstance(error, jinja2.TemplateSyntaxError):
            text = f"The chat template cannot be read, line {error.lineno}: {error.message}."
        elif isinstance(error, _Refusal):
            text = f"The chat template refuses these messages: {error}"
        else:
            # Jinja2 rewrites tracebacks so that frames of a template carry its own lines.
            frames = [f for f in traceback.extract_tb(trace) if f.filename == "<template>"]
            line = f" at line {frames[-1].lineno}" if frames else ""
            text = f"The chat template fails{line}: {_reason(error)}."
        raise Fault(text, isinstance(error, jinja2.UndefinedError)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs more memory than a template may use"
    if isinstance(error, RecursionError):
        return "it calls itself without end"
    return str(error)[:500] or type(error).__name__
