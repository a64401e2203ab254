"""Thinking told from the answer, in any cut of the text."""

import pytest

from edgellm.thinking import ANSWER, THINKING, ThinkingParser

CASES = [
    ("", "Just an answer.", "", "Just an answer."),
    ("", "  leading space stays", "", "  leading space stays"),
    ("", "<think>\nhm\n</think>\n\nYes.", "\nhm\n", "Yes."),
    ("", "\n<think></think>Yes.", "", "Yes."),
    ("...<think>\n", "hm</think>\nYes.", "hm", "Yes."),
    ("<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
    ("", "In HTML <think> is no tag.", "", "In HTML <think> is no tag."),
    ("", "<b>bold</b> <think>", "", "<b>bold</b> <think>"),
    ("", "<think>cut short", "cut short", ""),
    ("", "<think>a </thin b</think>c", "a </thin b", "c"),
    ("", "[THINK]hm[/THINK]Yes.", "hm", "Yes."),
    ("", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes.", "hm", "Yes."),
    ("", "<|channel>thought\nhm<channel|>Yes.", "hm", "Yes."),
    ("", "<", "", "<"),
    ("", "", "", ""),
]


@pytest.mark.parametrize("prompt, text, thought, answer", CASES)
@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_the_cut_does_not_matter(prompt, text, thought, answer, step):
    parser = ThinkingParser(prompt)
    parts = [p for n in range(0, len(text), step) for p in parser.push(text[n : n + step])]
    parts += parser.flush()
    assert "".join(p.text for p in parts if p.kind == THINKING) == thought
    assert "".join(p.text for p in parts if p.kind == ANSWER) == answer


def test_an_answer_is_not_held_back():
    parser = ThinkingParser()
    assert [p.text for p in parser.push("Hel")] == ["Hel"]
    assert [p.text for p in parser.push("<think>")] == ["<think>"]
