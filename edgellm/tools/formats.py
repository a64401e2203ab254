"""The formats in which models write tool calls: one table, and how a chat template tells them.

A model learned its format in training and its chat template writes the same, so the template says
which one it is. The order of FORMATS matters: the first whose signs are all there is taken, and
what is common to many (``<tool_call>``) stands behind what is particular.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from edgellm.tools.events import Call, Offered
from edgellm.tools.json_bodies import Named, read_json, several
from edgellm.tools.python_bodies import read_gemma, read_python
from edgellm.tools.tagged_bodies import Tagged

Reader = Callable[[str, Offered], list[Call] | None]
Viable = Callable[[str, Offered], bool]


def _fits(pattern: str) -> Viable:
    """Whether a text may still become a call: the pattern matches every beginning of one."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda text, offered: compiled.fullmatch(text) is not None


@dataclass(frozen=True)
class Region:
    """Where a call stands. ``open`` begins it; one of ``closes`` ends it, or, where there is none,
    the bracket that ``bracket`` finds when it is closed again.

    ``keep_open``: the opening text belongs to the call (there is no mark). ``stray``: a mark that
    may follow and says nothing. ``rest``: of a list that is cut off the complete calls count.
    """

    open: str
    closes: tuple[str, ...]
    read: Reader
    viable: Viable
    bracket: str = r"[{\[]"
    quotes: str = '"'
    keep_open: bool = False
    stray: str = ""
    rest: bool = False


@dataclass(frozen=True)
class Format:
    """One way of writing calls. ``signs``: alternatives of texts that a template all has.

    ``section``: pairs of marks around all calls; what stands between two calls in there is nothing.
    ``silent``: marks without a meaning of their own. ``gap``: characters before and between calls
    that are no content. ``breaks``: marks that end a thought nobody closed. ``ids``: how the
    family writes its ids, as prefix and length.
    """

    name: str
    signs: tuple[tuple[str, ...], ...]
    regions: tuple[Region, ...] = ()
    section: tuple[tuple[str, str], ...] = ()
    silent: tuple[str, ...] = ()
    gap: str = "\n"
    breaks: tuple[str, ...] = ()
    ids: tuple[str, int] = ("call_", 24)
    is_harmony: bool = False
    marks: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        found = {*self.silent, *(mark for pair in self.section for mark in pair)}
        for region in self.regions:
            found |= {region.open, *region.closes} if not region.keep_open else set()
        object.__setattr__(self, "marks", frozenset(found))


_QWEN_XML = Tagged(
    head=r"(?:\s*<function=)?(?P<name>[^>\n]+)>",
    item=r"\s*<parameter=(?P<key>[^>\n]+)>",
    end=r"</parameter>",
    tail=r"\s*(?:</function>\s*)?",
    trim=True,
)


def _tool_call(body: str, offered: Offered) -> list[Call] | None:
    """JSON or XML: models of either kind at times write the other."""
    reader: Reader = _QWEN_XML if body.lstrip().startswith("<function=") else read_json
    return reader(body, offered)


def _mistral(body: str, offered: Offered) -> list[Call] | None:
    if body.lstrip().startswith(("[", "{")):
        return list(several(body, offered))
    return _MISTRAL_NAMED(body, offered)


_MISTRAL_NAMED = Named(
    r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\](?P<id>\w+))?\s*(?:\[ARGS\])?\s*(?=\{)"
)


def _bare_json(body: str, offered: Offered) -> list[Call] | None:
    return list(several(body, offered, bare=True))


_KEY = re.compile(r'\{\s*(?:"(\w*)(")?.*)?', re.DOTALL)
_NAME = re.compile(r'\{\s*"name"\s*:\s*"([^"]*)"')


def _bare_viable(text: str, offered: Offered) -> bool:
    """A JSON object in the middle of a text is a call only if its first key and its name say so."""
    found = _KEY.fullmatch(text)
    if found is None:
        return False
    keys = ("name", "parameters", "arguments", "type", "id", "function")
    if found[1] is not None and not any(
        key == found[1] if found[2] else key.startswith(found[1]) for key in keys
    ):
        return False
    name = _NAME.match(text)
    return name is None or name[1] in offered


def _python_viable(text: str, offered: Offered) -> bool:
    found = re.fullmatch(r"\[\s*(?:([A-Za-z_][\w.]*)\s*(\(.*)?)?", text, re.DOTALL)
    return found is not None and (found[2] is None or found[1] in offered)


def _name_viable(text: str, offered: Offered) -> bool:
    name, closed, _ = text.partition(">")
    return name in offered if closed else any(one.startswith(name) for one in offered)


def _lfm2(body: str, offered: Offered) -> list[Call] | None:
    is_json = body.lstrip().startswith(("{", "[{"))
    return read_json(body, offered) if is_json else read_python(body, offered)


def _json_list(body: str, offered: Offered) -> list[Call] | None:
    return list(several(body, offered))


def _tags(call: str, close: str, read: Reader, viable: str) -> Region:
    return Region(call, (close,), read, _fits(viable))


_JSON = r"\s*(?:[\[{].*)?"
_NAMED_TAG = r"\s*(?:n(?:a(?:m(?:e(?:=.*)?)?)?)?)?"


def _invoke(prefix: str) -> Tagged:
    return Tagged(
        head=r'\s*name="(?P<name>[^"]*)"\s*(?:>|\Z)',  # \Z: the call was closed by />
        item=rf'\s*<{prefix}parameter name="(?P<key>[^"]*)"(?: string="(?P<kind>true|false)")?\s*>',
        end=rf"</{prefix}parameter>",
        loose=False,  # /> is a common text
    )


def _invoke_region(prefix: str) -> Region:
    closes = (f"</{prefix}invoke>", "/>")
    return Region(f"<{prefix}invoke ", closes, _invoke(prefix), _fits(_NAMED_TAG))


_NAME_THEN_TAGS = r"\s*(?:[\w.-]+\s*(?:<.*)?)?"  # GLM: a name, then tags
_DEEPSEEK = Named(
    r"\s*(?:function\s*<｜tool▁sep｜>\s*)?(?P<name>[^\s<]+)\s*(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?\s*(?=\{)",
    tail=r"\s*(?:```)?\s*",
)
_KIMI = Named(
    r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)
_XTML = Tagged(
    head=r'\s*tool="(?P<name>[^"]*)"[^<]*<\|sep\|>',
    item=r'\s*<\|open\|>argument key="(?P<key>[^"]*)"(?: type="(?P<kind>\w+)")?[^<]*<\|sep\|>',
    end=r"<\|close\|>argument<\|sep\|>",
)
_GLM = Tagged(
    head=r"\s*(?P<name>[^\s<]+)",
    item=r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>",
    end=r"</arg_value>",
)
_TOOL_CALL = _tags("<tool_call>", "</tool_call>", _tool_call, r"\s*(?:[\[{<].*)?")
_FUNCTION = Region(  # without the marks around it
    "<function=", ("</function>",), _QWEN_XML, _name_viable, stray="</tool_call>"
)
_FUNCTION_JSON = Region(
    "<function=", ("</function>",), Named(r"(?P<name>[^>\s]+)>\s*(?=\{)"), _name_viable
)

FORMATS = (
    Format("harmony", (("<|channel|>", "<|message|>"),), is_harmony=True),
    Format(
        "kimi-k3",
        (("<|open|>", "<|close|>", "<|sep|>"),),
        (_tags("<|open|>call ", "<|close|>call<|sep|>", _XTML, r"\s*(?:t.*)?"),),
        section=(("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),),
        silent=(
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
            "<|end_of_msg|>",
        ),
        breaks=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
    ),
    Format(
        "kimi",
        (("<|tool_calls_section_begin|>",),),
        (_tags("<|tool_call_begin|>", "<|tool_call_end|>", _KIMI, r"\s*(?:[\w.:-]+\s*(?:<.*)?)?"),),
        section=(("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
        breaks=("<|tool_calls_section_begin|>",),
    ),
    Format(
        "deepseek-dsml",
        (("｜DSML｜",),),
        (_invoke_region("｜DSML｜"), _invoke_region("｜DSML｜ ")),
        section=tuple(
            (f"<｜DSML｜{name}>", f"</｜DSML｜{name}>")
            for name in ("function_calls", "tool_calls", " calls", " tool_calls")
        ),
    ),
    Format(
        "deepseek",
        (("tool▁calls▁begin",), ("tool▁call▁begin",)),
        (_tags("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _DEEPSEEK, r"\s*(?:[^\s<]+.*)?"),),
        section=(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
    ),
    Format(
        "gemma4",
        (("<|tool_call>",),),
        (_tags("<|tool_call>", "<tool_call|>", read_gemma, r"\s*(?:c.*)?"),),
        silent=("<|tool_response>", "<turn|>"),
    ),
    Format(
        "mistral",
        (("[TOOL_CALLS]",),),
        (
            Region(
                "[TOOL_CALLS]",
                (),
                _mistral,
                _fits(r"\s*(?:[\[{].*|[\w.-]+\s*(?:\[.*|\{.*)?)?"),
                bracket=r"\{|\[\s*[{\]]",
                rest=True,
            ),
        ),
        ids=("", 9),
    ),
    Format(
        "glm",
        (("<arg_key>",),),
        (_tags("<tool_call>", "</tool_call>", _GLM, _NAME_THEN_TAGS),),
    ),
    Format(
        "minimax",
        (("<minimax:tool_call>",),),
        (_invoke_region(""),),
        section=(("<minimax:tool_call>", "</minimax:tool_call>"),),
    ),
    Format(
        "seed",
        (("<seed:tool_call>",),),
        (_tags("<seed:tool_call>", "</seed:tool_call>", _tool_call, r"\s*(?:[\[{<].*)?"),),
    ),
    Format("qwen-xml", (("<function=", "<parameter="),), (_TOOL_CALL, _FUNCTION)),
    Format(
        "cohere",
        (("<|START_ACTION|>",),),
        (_tags("<|START_ACTION|>", "<|END_ACTION|>", read_json, _JSON),),
        silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        breaks=("<|START_ACTION|>", "<|START_RESPONSE|>"),
    ),
    Format(
        "lfm2",
        (("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        (_tags("<|tool_call_start|>", "<|tool_call_end|>", _lfm2, r"\s*(?:[\[{A-Za-z_].*)?"),),
    ),
    Format(
        "granite",
        (("<|tool_call|>",),),
        (Region("<|tool_call|>", (), _json_list, _fits(_JSON), stray="<|/tool_call|>", rest=True),),
    ),
    Format("nemotron", (("<TOOLCALL>",),), (_tags("<TOOLCALL>", "</TOOLCALL>", read_json, _JSON),)),
    Format(
        "apriel", (("<tool_calls>",),), (_tags("<tool_calls>", "</tool_calls>", read_json, _JSON),)
    ),
    Format("functionary", (("<function=example_function_name>",),), (_FUNCTION_JSON,)),
    Format("hermes", (("<tool_call>", '"arguments"'),), (_TOOL_CALL,)),
    Format(
        "pythonic",
        (("<|python_start|>",), ("[func_name1(",)),
        (Region("[", (), read_python, _python_viable, quotes="\"'", keep_open=True),),
        silent=("<|python_start|>", "<|python_end|>"),
    ),
    Format(
        "llama-json",
        (
            ("<|python_tag|>",),
            ('"parameters": dictionary of argument name',),
            ("Environment: ipython",),
        ),
        (Region("{", (), _bare_json, _bare_viable, keep_open=True),),
        silent=("<|python_tag|>", "<|eom_id|>"),
        gap=" \n;",
    ),
)
PLAIN = Format("plain", ())  # no calls; thinking is told apart all the same
BY_NAME = {one.name: one for one in (*FORMATS, PLAIN)}


def detect(template: str) -> Format:
    """The format that a chat template writes; PLAIN where it knows of no tools."""
    for one in FORMATS:
        if any(all(sign in template for sign in signs) for signs in one.signs):
            return one
    return PLAIN
