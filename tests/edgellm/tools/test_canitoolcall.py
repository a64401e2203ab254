"""The fixtures of the canitoolcall package: outputs of real models, and what they say.

Half of them, by the sum of their id, are left for others to try.
"""

import hashlib
import random

import pytest

from edgellm.tools import BY_NAME, AnswerParser, CallArguments, CallStart, Content, Reasoning

canitoolcall = pytest.importorskip("canitoolcall")
from canitoolcall.checks import case_status, run_checks  # noqa: E402
from canitoolcall.fixtures import load_families, load_fixtures  # noqa: E402
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status  # noqa: E402

FAMILIES = load_families()
# Fixtures that fail, by id, with the reason. The share of a family must stay above 90 %.
KNOWN: dict[str, str] = {}
# family -> format, or pairs of a part of the model's name and the format
FORMAT = {
    "qwen3-hermes": "hermes",
    "qwen3-xml": "qwen-xml",
    "gpt-oss": "harmony",
    "llama": (("Llama-4", "pythonic"), ("", "llama-json")),
    "kimi": (("K3", "kimi-k3"), ("", "kimi")),
    "deepseek": (("V3-", "deepseek"), ("V3.1", "deepseek"), ("", "deepseek-dsml")),
}


def is_ours(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2 == 0


def format_of(fixture):
    found = FORMAT.get(fixture.family, fixture.family)
    if not isinstance(found, str):
        found = next(name for part, name in found if part in fixture.models[0])
    return BY_NAME[found]


def cut(text: str, longest: int, seed: int) -> list[str]:
    sizes, pieces, at = random.Random(seed), [], 0
    while at < len(text):
        size = sizes.randint(1, longest)
        pieces.append(text[at : at + size])
        at += size
    return pieces


def parse(fixture, pieces: list[str]) -> ParseResult:
    reference = FAMILIES[fixture.family].reference_for(fixture.models[0])
    prompt = fixture.generation_prompt
    if prompt is None:
        prompt = reference.default_generation_prompt or ""
    parser = AnswerParser(format_of(fixture), fixture.tools, prompt)
    events = [event for piece in pieces for event in parser.push(piece)]
    events += parser.finish(complete=not fixture.truncated)
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[event.index][1] += event.text
    return ParseResult(
        content="".join(e.text for e in events if isinstance(e, Content)) or None,
        reasoning_content="".join(e.text for e in events if isinstance(e, Reasoning)) or None,
        tool_calls=tuple(ParsedToolCall(*call) for call in calls),
    )


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_family(family):
    failed, n = [], 0
    for fixture in load_fixtures(families=[family]):
        if not is_ours(fixture.id):
            continue
        text = fixture.raw_output
        seen = Observation(
            nonstream=parse(fixture, [text]),
            streams={
                "token": parse(fixture, list(text)),
                **{f"rand:{s}:8": parse(fixture, cut(text, 4**s, s)) for s in (1, 2, 3)},
            },
        )
        n += 1
        rows = run_checks(fixture, FAMILIES[family], seen)
        if case_status(rows) not in (Status.PASS, Status.SOFT_PASS):
            failed.append(fixture.id)
    assert failed == [name for name in failed if name in KNOWN]
    assert n and len(failed) <= 0.1 * n
