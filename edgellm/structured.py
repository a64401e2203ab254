"""Answers that keep to a JSON schema, a grammar or a regular expression, through llguidance.

``Grammars`` belongs to a model and makes a ``Matcher`` for each sequence. Before every draw the
matcher says which tokens may follow; the end of the text is among them only when what was written
is complete. Whatever the library cannot hold to is an error that names it: an answer that was asked
for in a form never comes in another one.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgellm.errors import EdgeLLMError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from edgellm.sampling_params import SamplingParams
    from edgellm.tokenizer import Tokenizer

# Between JSON's tokens: as in llama.cpp, so that a model cannot write blanks for ever.
WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"
REMEMBERED = 32  # grammars of a model, ready for the next request


class StructureError(EdgeLLMError):
    """The schema, grammar or pattern cannot be used, or the answer cannot keep to it."""


def is_gbnf(grammar: str) -> bool:
    """Whether a grammar is written in llama.cpp's notation, not in Lark's."""
    return "::=" in grammar


def compile_grammar(params: SamplingParams) -> str:
    """The library's form of what the answer has to keep to. Raises StructureError for what can be
    found wrong without a model."""
    from llguidance import LLMatcher

    grammar = _translated(params)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise StructureError(_sentence(params, messages[0]))
    return grammar


def _translated(params: SamplingParams) -> str:
    from llguidance import LLMatcher

    if params.json_schema is not None:
        text = _schema_text(params.json_schema)
        try:
            return LLMatcher.grammar_from_json_schema(
                text,
                defaults={"whitespace_pattern": WHITESPACE},
                overrides={"lenient": False},  # an unknown keyword must not be passed over
            )
        except ValueError as error:  # nested beyond the library's limit
            raise StructureError(_sentence(params, str(error))) from None
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    text = params.grammar or ""
    if not text.strip():
        raise StructureError("The grammar (--grammar) is empty.")
    return LLMatcher.grammar_from_lark(_from_gbnf(text) if is_gbnf(text) else text)


def _schema_text(schema: Mapping[str, Any] | bool | str) -> str:
    if not isinstance(schema, str):
        try:
            schema = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise StructureError(f"The JSON schema (--json-schema) is not JSON: {error}.") from None
    try:
        parsed = json.loads(schema)
    except ValueError as error:
        raise StructureError(f"The JSON schema (--json-schema) is not JSON: {error}.") from None
    except RecursionError:
        raise StructureError("The JSON schema (--json-schema) is nested too deeply.") from None
    if not isinstance(parsed, dict | bool):
        raise StructureError(
            f"A JSON schema (--json-schema) is an object, not {json.dumps(parsed)[:40]}."
        )
    return json.dumps({} if parsed is True else {"enum": []} if parsed is False else parsed)


def _from_gbnf(grammar: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except RecursionError:
        raise StructureError("The grammar (--grammar) is nested too deeply.") from None
    except Exception as error:  # of its own kind, or none in particular
        raise StructureError(f"The GBNF grammar (--grammar) cannot be read: {error}.") from None


def _sentence(params: SamplingParams, error: str) -> str:
    """An error of the library in one sentence that names the flag and what it cannot do."""
    unsupported = re.search(r"Unimplemented keys: (\[.*?\])", error)
    if unsupported:
        words = ", ".join(json.loads(unsupported[1]))
        return f"The JSON schema (--json-schema) uses {words}, which is not supported."
    if params.json_schema is not None:
        if "oneOf constraints are not supported" in error:
            return (
                "The JSON schema (--json-schema) uses oneOf with alternatives that may overlap, "
                "which is not supported; anyOf is."
            )
        what = "The JSON schema (--json-schema)"
    else:
        what = "The pattern (--regex)" if params.regex is not None else "The grammar (--grammar)"
    if "look-around" in error:
        return f"{what} uses look-around, which is not supported."
    reason = re.search(r"^error: (.*)$", error, re.MULTILINE)
    text = reason[1] if reason else next(iter(error.strip().splitlines()), "no reason is given")
    return f"{what} cannot be used: {text.strip().rstrip('.')}."


class Grammars:
    """The structured output of one model; what it needs of the vocabulary is built once, when it
    is first asked for."""

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        self._tokenizer = tokenizer
        self._n_vocab = min(n_vocab, tokenizer.n_vocab)
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._known: dict[str, LLMatcher] = {}  # a copy costs a hundredth of reading a grammar

    def matcher(self, params: SamplingParams) -> Matcher:
        """For one sequence from its beginning. Raises StructureError."""
        from llguidance import LLMatcher

        if not self._tokenizer.has_text:
            raise StructureError("The model has no tokenizer, so its answer cannot keep to a form.")
        grammar = _translated(params)
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self._n_vocab)
            first = self._known.pop(grammar, None)
            if first is None:
                first = LLMatcher(self._vocabulary, grammar, log_level=0)
                if first.is_error():
                    raise StructureError(_sentence(params, first.get_error()))
            self._known[grammar] = first  # the latest is the last
            if len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]
            matcher = first.deep_copy()
        return Matcher(matcher, self._n_vocab, self._tokenizer.eog)


def _vocabulary(tokenizer: Tokenizer, n_vocab: int) -> Any:
    """The library's view of the tokens: the bytes of each that writes text; those that write none
    are special ones, which no text can call for."""
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens, special = [], []
    for token in range(n_vocab):
        piece = b"" if tokenizer.is_special(token) else tokenizer.piece(token)
        if not piece:
            special.append(token)
            piece = tokenizer.token_text(token).encode() or f"<{token}>".encode()
        tokens.append(piece)

    class Source(SimpleNamespace):
        def __call__(self, text: str | bytes) -> list[int]:
            plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
            return tokenizer.encode(plain)

    ends = sorted(token for token in tokenizer.eog if token < n_vocab)
    if not ends:
        raise StructureError(
            "The model has no end-of-text token, so an answer in a given form could not end."
        )
    source = Source(
        eos_token_id=ends[0], bos_token_id=None, tokens=tokens, special_token_ids=special
    )
    return LLTokenizer(TokenizerWrapper(source), n_vocab=n_vocab, eos_token=ends)


class Matcher:
    """Where one sequence stands in its grammar."""

    def __init__(self, matcher: LLMatcher, n_vocab: int, ends: frozenset[int]) -> None:
        self._matcher, self._n_vocab = matcher, n_vocab
        self._ends = np.array(sorted(ends), np.int64)
        self._words = np.zeros(-(-n_vocab // 32), np.int32)

    def allowed(self, n_logits: int, go_on: bool = False) -> npt.NDArray[np.int64]:
        """Ids of the tokens that may follow, rising. ``go_on``: no end where anything else may
        follow."""
        words = self._words
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: self._n_vocab]
        ids = np.flatnonzero(bits.view(np.bool_))
        if self._matcher.is_error():
            reason = _line(self._matcher.get_error())
            raise StructureError(f"The answer cannot go on in the form asked for: {reason}.")
        if go_on:
            others = ids[~np.isin(ids, self._ends)]
            ids = others if len(others) else ids
        if len(ids) == 0:
            raise StructureError("No token of the model can go on in the form asked for.")
        return ids

    def n_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow, one after the other; nothing changes."""
        return self._matcher.validate_tokens(list(tokens)) if tokens else 0

    def accept(self, token: int) -> bool:
        """Take a token; True when nothing but the end may follow."""
        if not self._matcher.consume_token(token):
            reason = _line(self._matcher.get_error()) or "the token is not allowed"
            raise StructureError(f"The answer left the form asked for: {reason}.")
        return bool(self._matcher.is_stopped())


def _line(error: str) -> str:
    line = next(iter(error.strip().splitlines()), "").strip().rstrip(".")
    return "nothing that ends can have it" if line.startswith("NoExtension") else line
