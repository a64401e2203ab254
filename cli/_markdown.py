"""Markdown as a chat shows it: rich's, quieter, and nothing of it can be clicked.

A link shows its address: a model's text must not hide one behind words.
"""

from functools import cache
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown
from rich.padding import Padding
from rich.syntax import Syntax
from rich.text import Text


class _Heading(Heading):
    """At the left, and no box around the first one."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text: Text = self.text
        text.justify = "left"
        yield text


class _Code(CodeBlock):
    """Indented, in the terminal's own colours and on its own background."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        syntax = Syntax(
            code, self.lexer_name, theme="ansi_dark", word_wrap=True, background_color="default"
        )
        yield Padding(syntax, (0, 0, 0, 2))


class _Markdown(Markdown):
    elements: ClassVar[Any] = {
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
    }


@cache
def parser() -> MarkdownIt:
    """The parser that rich uses."""
    return MarkdownIt().enable("strikethrough").enable("table")


def markdown(text: str) -> Markdown:
    """Something that a rich console can print."""
    return _Markdown(text, code_theme="ansi_dark", hyperlinks=False)
