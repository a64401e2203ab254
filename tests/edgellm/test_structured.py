"""Answers in a given form: they keep to it, they end, and what cannot be kept to is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import schemas

from edgellm import LLM, SamplingParams
from edgellm.batch import as_completed
from edgellm.errors import EdgeLLMError
from edgellm.sampling import NothingLeft
from edgellm.structured import StructureError, compile_grammar

# Nothing but the grammar guides the choice.
FREE = SamplingParams(max_tokens=1500, temperature=1, top_k=0, top_p=1, min_p=0, seed=1)
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "label": {"type": "string", "maxLength": 5}},
    "required": ["x", "label"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., Path]):  # type: ignore[no-untyped-def]
    with LLM(tiny_model("llama", n_ctx=2048), n_threads=2) as model:
        yield model


def check(llm: LLM, numbers: list[int], params: SamplingParams) -> list[int]:
    """Every answer for these random schemas that came to its end is valid. Returns the others: a
    model may write a number or a key that has no end."""
    wanted = [schemas.schema(number) for number in numbers]
    prompt = llm.tokenize("JSON:")
    requests = [(prompt, replace(params, json_schema=schema)) for schema in wanted]
    cut = []
    for i, found in as_completed(llm, requests):
        assert not isinstance(found, Exception), (wanted[i], found)
        if found.finish_reason == "stop":
            jsonschema.Draft202012Validator(wanted[i]).validate(json.loads(found.text))
        else:
            cut.append(numbers[i])
    return cut


def test_answers_for_200_random_schemas_are_valid(llm: LLM) -> None:
    cut = check(llm, list(range(200)), FREE)
    assert len(cut) <= 5
    for seed in range(2, 6):
        cut = check(llm, cut, replace(FREE, seed=seed))
    assert not cut and llm.is_idle


@pytest.mark.real
@pytest.mark.slow
def test_answers_of_a_real_model_are_valid(real_model: Callable[[str], Path]) -> None:
    with LLM(real_model("SmolLM2"), n_ctx=1024, max_num_seqs=8) as model:
        cut = check(model, list(range(1000, 1060)), SamplingParams(max_tokens=200, temperature=1))
    assert len(cut) < 30  # it likes numbers with hundreds of digits


def test_a_schema_comes_as_an_object_or_as_text(llm: LLM) -> None:
    found = llm.generate("a", replace(FREE, json_schema=POINT))
    assert found.finish_reason == "stop" and set(json.loads(found.text)) == {"x", "label"}
    again = llm.generate("a", replace(FREE, json_schema=json.dumps(POINT)))
    assert again.tokens == found.tokens
    assert json.loads(llm.generate("a", replace(FREE, json_schema={"const": 7})).text) == 7


def test_patterns_and_grammars(llm: LLM) -> None:
    found = llm.generate("a", replace(FREE, regex="[a-c]{3,6}-[0-9]+!"))
    assert re.fullmatch("[a-c]{3,6}-[0-9]+!", found.text) and found.finish_reason == "stop"
    lark = 'start: "I say " (YES | NO)\nYES: "yes"\nNO: /no{1,5}/\n'
    assert re.fullmatch("I say (yes|no{1,5})", llm.generate("a", replace(FREE, grammar=lark)).text)
    gbnf = 'root ::= "<" [xyz]{2,4} ">" end\nend ::= "." | "!"'
    assert re.fullmatch("<[xyz]{2,4}>[.!]", llm.generate("a", replace(FREE, grammar=gbnf)).text)
    assert llm.generate("a", replace(FREE, regex="größe 😀")).text == "größe 😀"


def test_the_answer_ends_when_it_is_complete_and_not_before(llm: LLM) -> None:
    # nothing can follow: no token is spent on the end, and ignoring it changes nothing
    for ignore in (False, True):
        found = llm.generate("a", replace(FREE, regex="abc", ignore_eos=ignore))
        assert (found.text, found.finish_reason, len(found.tokens)) == ("abc", "stop", 3)
    # more may follow: with ignore_eos it does
    found = llm.generate("a", replace(FREE, regex="a+", ignore_eos=True, max_tokens=50))
    assert (found.text, found.finish_reason) == ("a" * 50, "length")
    lengths = {
        len(llm.generate("a", replace(FREE, regex="(a|b)+", seed=s, max_tokens=600)).text)
        for s in range(20)
    }
    assert len(lengths) > 3 and min(lengths) >= 1


def test_end_tokens_and_control_tokens_write_nothing_into_a_text(llm: LLM) -> None:
    schema = {"type": "string", "minLength": 30, "maxLength": 30}
    for seed in range(5):
        found = llm.generate("a", replace(FREE, json_schema=schema, seed=seed))
        assert not set(found.tokens) & llm.tokenizer.eog
        assert len(json.loads(found.text)) == 30


def test_greedy_and_filters_choose_among_what_is_allowed(llm: LLM) -> None:
    for params in (
        replace(FREE, temperature=0),
        replace(FREE, top_k=1),
        SamplingParams(max_tokens=200, seed=3, mirostat=2),
        SamplingParams(max_tokens=200, seed=3, repeat_penalty=1.3, dry_multiplier=0.8,
                       xtc_probability=0.5, typical_p=0.9, top_n_sigma=1),
    ):  # fmt: skip
        found = llm.generate("a", replace(params, regex="[a-e]{20}"))
        assert re.fullmatch("[a-e]{20}", found.text), params
        assert llm.generate("a", replace(params, regex="[a-e]{20}")).tokens == found.tokens


def test_several_forms_at_once_do_not_mix(llm: LLM) -> None:
    forms = ["[a-c]{9}", "[0-9]{30}", "x{5}", "(yes|no)"]
    requests = [([7], replace(FREE, regex=form, seed=i)) for i, form in enumerate(forms)]
    alone = [llm.generate([7], params).tokens for _, params in requests]
    together = {i: found for i, found in as_completed(llm, requests)}
    for i, form in enumerate(forms):
        found = together[i]
        assert not isinstance(found, Exception)
        assert found.tokens == alone[i] and re.fullmatch(form, found.text)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"if": {}, "then": {}}, "if, then"),
        ({"properties": {"a": {"items": {"contains": {}}}}}, "contains"),
        ({"propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"oneOf": [{"type": "string"}, {"const": "a"}]}, "oneOf"),
        ({"type": "string", "format": "nonsense"}, "nonsense"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "thing"}, "thing"),
        ({"$ref": "#/$defs/none"}, "/\\$defs/none"),
        ({"$ref": "http://example.org/schema"}, "http://example.org/schema"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "not"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "minimum"),
        (False, "Unsatisfiable"),
        ("{bad", "not JSON"),
        ("[1]", "object"),
        ('{"a": ' * 100_000, "nested too deeply|not JSON"),
        ({"const": math.nan}, "not JSON"),
        ('{"items":' * 300 + "{}" + "}" * 300, "recursion limit"),
        (
            {"allOf": [{"anyOf": [{"minLength": i}, {"maximum": i}]} for i in range(20)]},
            "too large",
        ),
    ],
)
def test_what_a_schema_cannot_ask_for_is_named(schema: Any, named: str) -> None:
    with pytest.raises(StructureError, match=named) as caught:
        compile_grammar(SamplingParams(json_schema=schema))
    message = str(caught.value)
    assert "--json-schema" in message and "\n" not in message and message.endswith(".")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"grammar": "start: b"}, '--grammar.*unknown name: "b"'),
        ({"grammar": " "}, "--grammar.*empty"),
        ({"grammar": "root ::= foo"}, "--grammar.*foo"),
        ({"grammar": 'root ::= "a'}, "--grammar"),
        ({"regex": "(a"}, "--regex.*unclosed group"),
        ({"regex": "(?!a)b"}, "--regex.*look-around"),
    ],
)
def test_what_a_grammar_cannot_ask_for_is_named(values: dict[str, str], named: str) -> None:
    with pytest.raises(StructureError, match=named) as caught:
        compile_grammar(SamplingParams(**values))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_form_that_nothing_fits_is_an_error_not_an_answer(llm: LLM) -> None:
    for schema in ({"$ref": "#"}, {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"},
                   "minItems": 1}}, "$ref": "#/$defs/a"}):  # fmt: skip
        try:
            found = llm.generate("a", replace(FREE, json_schema=schema, max_tokens=100))
            assert found.finish_reason == "length"  # it never ends, and never claims to have
        except StructureError:
            pass
    assert llm.is_idle


def test_only_one_form_at_a_time() -> None:
    with pytest.raises(EdgeLLMError, match="only one"):
        SamplingParams(regex="a", grammar="start: /a/")


def test_a_request_that_is_refused_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(StructureError):
        llm.generate(["a", "b"], replace(FREE, json_schema={"not": {}}))
    assert llm.is_idle


def test_a_ban_of_all_that_is_allowed_ends_this_request_alone(llm: LLM) -> None:
    banned = replace(FREE, regex="x{5}", logit_bias={"x": -math.inf})
    requests = [([7], banned), ([8], replace(FREE, regex="y{5}"))]
    found = dict(as_completed(llm, requests))
    assert isinstance(found[0], NothingLeft) and "grammar allows" in str(found[0])
    assert not isinstance(found[1], Exception) and found[1].text == "yyyyy"
    with pytest.raises(NothingLeft):
        llm.generate("a", banned)
    with pytest.raises(NothingLeft):
        list(llm.stream("a", banned))
    assert llm.is_idle
