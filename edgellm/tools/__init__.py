"""Calls of tools in the text of models: the formats, and a parser for answers as they stream."""

from edgellm.tools.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
)
from edgellm.tools.formats import BY_NAME, FORMATS, PLAIN, Format, detect
from edgellm.tools.parser import AnswerParser

__all__ = [
    "BY_NAME", "FORMATS", "PLAIN", "AnswerParser", "CallArguments", "CallEnd", "CallStart",
    "Content", "Event", "Format", "Reasoning", "detect",
]  # fmt: skip
