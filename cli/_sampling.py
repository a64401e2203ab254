"""The one place that maps flags, and names typed in a chat, to SamplingParams.

A new sampler needs a line in FLAGS; commands that sample are declared with ``@with_sampling``.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgellm.cli._output import say
from edgellm.errors import EdgeLLMError

if TYPE_CHECKING:
    from edgellm.sampling import SamplingParams


def _limit(value: int) -> int:
    if value == 0 or value < -1:
        raise typer.BadParameter("must be at least 1, or -1 for no limit")
    return value


@dataclass(frozen=True)
class Flag:
    """``field`` of SamplingParams, the type of its flag, its default there and its option."""

    field: str
    type: Any
    default: Any
    option: Any


def _flag(
    field: str, type_: Any, default: Any, *names: str, env: str | None = None, **more: Any
) -> Flag:
    """The environment variable is EDGELLM_<ENV>, or has the name of the first long flag."""
    if env is None:
        long = next(name for name in names if name.startswith("--"))
        env = long.strip("-").replace("-", "_").upper()
    envvar = f"EDGELLM_{env}" if env else None
    return Flag(field, type_, default, typer.Option(*names, envvar=envvar, **more))


FLAGS = (
    _flag(
        "max_tokens", int, -1, "-n", "--predict", "--n-predict", env="N_PREDICT", callback=_limit,
        help="Most tokens to generate; -1: until the model stops or the context is full.",
    ),
    _flag(
        "samplers", str, "", "--samplers", metavar="NAMES",
        help="The steps to run and their order, as \"top_k;top_p;temperature\"; the default: "
        "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature.",
    ),
    _flag(
        "sampler_seq", str, "", "--sampler-seq", "--sampling-seq", metavar="LETTERS",
        help="The same by a letter each: edskypmxt is the default.",
    ),
    _flag("seed", int, -1, "-s", "--seed", min=-1, help="-1: random."),
    _flag(
        "ignore_eos", bool, False, "--ignore-eos", help="Go on when the model wants to stop.",
    ),
    _flag(
        "reasoning_budget", int, -1, "--reasoning-budget", min=-1,
        help="Most tokens of thinking; 0: none, -1: no limit.",
    ),
    _flag(
        "temperature", float, 0.8, "--temp", "--temperature", min=0, help="0: most likely token.",
    ),
    _flag("top_k", int, 40, "--top-k", min=0, help="0: off."),
    _flag("top_p", float, 0.95, "--top-p", min=0, max=1, help="1: off."),
    _flag("min_p", float, 0.05, "--min-p", min=0, max=1, help="0: off."),
    _flag(
        "top_n_sigma", float, -1.0, "--top-n-sigma", "--top-nsigma",
        help="Keep logits within n standard deviations of the best; -1: off.",
    ),
    _flag("xtc_probability", float, 0.0, "--xtc-probability", min=0, max=1, help="0: off."),
    _flag(
        "xtc_threshold", float, 0.1, "--xtc-threshold", min=0, max=1, help="Above 0.5: off.",
    ),
    _flag("typical_p", float, 1.0, "--typical", "--typical-p", min=0, max=1, help="1: off."),
    _flag(
        "repeat_last_n", int, 64, "--repeat-last-n", min=-1,
        help="Tokens that the penalties look at; 0: none, -1: all.",
    ),
    _flag("repeat_penalty", float, 1.0, "--repeat-penalty", help="1: off."),
    _flag("presence_penalty", float, 0.0, "--presence-penalty", help="0: off."),
    _flag("frequency_penalty", float, 0.0, "--frequency-penalty", help="0: off."),
    _flag(
        "dry_multiplier", float, 0.0, "--dry-multiplier", min=0,
        help="DRY, a penalty that grows with the repetition; 0: off.",
    ),
    _flag("dry_base", float, 1.75, "--dry-base", min=1, help="What the penalty grows by."),
    _flag(
        "dry_allowed_length", int, 2, "--dry-allowed-length", min=0,
        help="Repetitions shorter than this are free.",
    ),
    _flag(
        "dry_penalty_last_n", int, 64, "--dry-penalty-last-n", min=-1,
        help="Tokens that DRY looks at; 0: off, -1: all.",
    ),
    _flag(
        "dry_sequence_breakers", list[str] | None, None, "--dry-sequence-breaker", env="",
        help="A text that no repetition reaches across; may be given several times, and replaces "
        "the default \\n : \" *; none: no breaker.",
    ),
    _flag(
        "dynatemp_range", float, 0.0, "--dynatemp-range", min=0,
        help="Temperature moves by up to this much with the model's doubt; 0: off.",
    ),
    _flag("dynatemp_exponent", float, 1.0, "--dynatemp-exp", min=0, help="How it moves."),
    _flag("mirostat", int, 0, "--mirostat", help="2: mirostat 2; 0: off."),
    _flag("mirostat_eta", float, 0.1, "--mirostat-lr", min=0, help="Learning rate, eta."),
    _flag("mirostat_tau", float, 5.0, "--mirostat-ent", min=0, help="Target entropy, tau."),
    _flag(
        "logit_bias", list[str] | None, None, "-l", "--logit-bias", env="",
        metavar="TOKEN(+/-)BIAS",
        help="Make a token, by id or text, likelier or less likely: 15043+1, \" no-5\", 2-inf; may "
        "be given several times.",
    ),
    _flag(
        "stop", list[str] | None, None, "--stop", "-r", "--reverse-prompt", env="",
        help="Stop before this text; may be given several times.",
    ),
    _flag(
        "json_schema", str | None, None, "-j", "--json-schema", metavar="JSON",
        help="The answer is JSON of this schema; {}: any.",
    ),
    _flag(
        "json_schema_file", str | None, None, "-jf", "--json-schema-file", metavar="FILE",
        help="The schema from a file.",
    ),
    _flag(
        "grammar", str | None, None, "--grammar", metavar="TEXT",
        help="The answer keeps to this grammar in Lark's notation. GBNF (root ::= ...) is "
        "translated as well as can be; it may accept less than llama.cpp does.",
    ),
    _flag(
        "grammar_file", str | None, None, "--grammar-file", metavar="FILE",
        help="The grammar from a file.",
    ),
    _flag(
        "regex", str | None, None, "--regex", metavar="PATTERN",
        help="The answer matches this regular expression, whole.",
    ),
)  # fmt: skip

# Other names for fields that people type: llama.cpp's and Ollama's.
SYNONYMS = {
    "temp": "temperature",
    "predict": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "n": "max_tokens",
    "typical": "typical_p",
    "top_nsigma": "top_n_sigma",
    "dynatemp_exp": "dynatemp_exponent",
    "mirostat_lr": "mirostat_eta",
    "mirostat_ent": "mirostat_tau",
    "dry_sequence_breaker": "dry_sequence_breakers",
}
_SWITCHES = {"1", "true", "on", "enabled", "yes"}


class Sampling:
    """The sampling settings of a command, which a chat may change."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = {"stop": (), **values}
        self._checked: Any = None

    def params(self) -> "SamplingParams":
        """What the engine takes. Raises what it raises for bad values."""
        from edgellm.sampling_params import SamplingParams

        values = dict(self._values)
        values["stop"] = tuple(values["stop"] or ())
        if values["max_tokens"] == -1:
            values["max_tokens"] = None
        _set_order(values)
        _set_breakers(values)
        values["logit_bias"] = tuple(map(_bias, values.pop("logit_bias", None) or ()))
        for field in ("json_schema", "grammar"):
            _read(field, values)
        params = SamplingParams(**values)
        if params.structured:
            self._check_structure(params)
        return params

    def _check_structure(self, params: "SamplingParams") -> None:
        """Say what is wrong with a schema or grammar before a model is loaded for it."""
        from edgellm.structured import compile_grammar, is_gbnf

        wanted = (params.json_schema, params.grammar, params.regex)
        if wanted == self._checked:
            return
        compile_grammar(params)
        self._checked = wanted
        if params.grammar is not None and is_gbnf(params.grammar):
            say("The GBNF grammar is translated to Lark; it may accept less than llama.cpp does.")

    def set(self, name: str, text: str) -> str:
        """Change one by a name and a value as typed; the field's real name. Raises EdgeLLMError."""
        field = self.field(name)
        flag = next(flag for flag in FLAGS if flag.field == field)
        value: Any = text
        try:
            if flag.type in (int, float):
                value = flag.type(text)
            elif flag.type is bool:
                value = text.lower() in _SWITCHES
            elif flag.type == list[str] | None:
                value = (text,) if text else ()
            elif flag.type == str | None:
                value = text or None
        except ValueError:
            kind = "a whole number" if flag.type is int else "a number"
            raise EdgeLLMError(f"{name} must be {kind}, not {text!r}.") from None
        before = self._values[field]
        self._values[field] = value
        try:
            self.params()
        except ValueError:
            self._values[field] = before
            raise
        return field

    @staticmethod
    def field(name: str) -> str:
        """The field that a typed name means."""
        plain = name.strip("-").replace("-", "_").lower()
        plain = SYNONYMS.get(plain, plain)
        if plain not in {flag.field for flag in FLAGS}:
            known = ", ".join(flag.field for flag in FLAGS)
            raise EdgeLLMError(f"There is no parameter {name!r}; there are {known}.")
        return plain

    def as_dict(self) -> dict[str, Any]:
        """Field names and values, as plain data."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in self._values.items()}


def _set_order(values: dict[str, Any]) -> None:
    """``samplers`` from either of its flags; the default is the engine's."""
    from edgellm.samplers.names import ORDER, parse_letters, parse_order

    names, letters = values.pop("samplers", ""), values.pop("sampler_seq", "")
    if names and letters:
        raise EdgeLLMError("--samplers and --sampler-seq cannot both be given.")
    values["samplers"] = parse_letters(letters) if letters else parse_order(names) or ORDER


def _set_breakers(values: dict[str, Any]) -> None:
    """The given breakers take the place of the default ones, with escapes as \\n understood."""
    given = values.pop("dry_sequence_breakers", None)
    if given:
        values["dry_sequence_breakers"] = tuple(_unescaped(t) for t in given if t != "none")


def _unescaped(text: str) -> str:
    escapes = {"n": "\n", "r": "\r", "t": "\t"}
    return re.sub(r"\\(.)", lambda found: escapes.get(found[1], found[1]), text)


def _bias(text: str) -> tuple[int | str, float]:
    """15043+1, " no-5" or 2-inf."""
    found = re.fullmatch(r"(.+)([+-](?:\d+\.?\d*|\.\d+|inf))", text, re.DOTALL)
    if found is None or found[2] == "+inf":
        raise EdgeLLMError(
            f"--logit-bias takes a token, by id or text, and a number with its sign, as 15043-1.5; "
            f"{text!r} is not of that form."
        )
    return int(found[1]) if found[1].isdecimal() else found[1], float(found[2])


def _read(field: str, values: dict[str, Any]) -> None:
    """Put the text of ``<field>_file`` into ``field``."""
    path = values.pop(f"{field}_file", None)
    if path is None:
        return
    flag = "--" + field.replace("_", "-")
    if values.get(field) is not None:
        raise EdgeLLMError(f"{flag} and {flag}-file cannot both be given.")
    try:
        with open(path, encoding="utf-8") as file:
            values[field] = file.read()
    except OSError as error:
        raise EdgeLLMError(f"{flag}-file: {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise EdgeLLMError(f"{flag}-file: {path} is not UTF-8 (byte {error.start}).") from None


def with_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the sampling flags; it gets them as one argument, ``sampling``."""

    @wraps(command)
    def flagged(**given: Any) -> None:
        values = {flag.field: given.pop(flag.field) for flag in FLAGS}
        command(**given, sampling=Sampling(values))

    signature = inspect.signature(command)
    own = [p for name, p in signature.parameters.items() if name != "sampling"]
    added = [
        inspect.Parameter(
            flag.field,
            inspect.Parameter.KEYWORD_ONLY,
            default=flag.default,
            annotation=Annotated[flag.type, flag.option],
        )
        for flag in FLAGS
    ]
    flagged.__signature__ = signature.replace(parameters=own + added)  # type: ignore[attr-defined]
    flagged.__annotations__ = {p.name: p.annotation for p in own + added}
    del flagged.__wrapped__
    return flagged
