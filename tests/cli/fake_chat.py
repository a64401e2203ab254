"""Answers of the fake engine that depend on the question, for tests of whole chats."""

import re

import fake_llm

MARKDOWN = """# Tea

Some **bold** words, a `code` word and a [link](https://example.org/a).

1. First boil the water, then wait until it has cooled down a little before you pour it over.
2. Second

```python
def brew(cups: int) -> str:
    return "tea" * cups
```

| leaf | minutes |
|---|---|
| green | 2 |
| black | 4 |

That is *all* there is.
"""


def words(text):
    return re.findall(r"\s*\S+|\s+$", text)


def answer(self, prompt):
    control = fake_llm.Tokenizer.control
    text = "".join(
        control[t] if t < 2 else fake_llm.TEXTS.get(t) or chr(min(t, 0x10FFFF)) for t in prompt
    )
    question = text.rpartition("[user]")[2].removesuffix("[assistant]").removesuffix("<think>\n")
    turn = text.count("[user]")
    if "markdown" in question:
        return words(MARKDOWN)
    if "count" in question:
        return [f"{n} " for n in range(1, 500)]
    if "think" in question:
        return words("<think>\nLet me see.\nIt is easy.\n</think>\n\nThe answer is **four**.")
    if "evil" in question:
        return ["a\x1b[2Jb", "\x1b]0;title\x07c", "\x9b31md", " [x](javascript:1)", "\x1b[31m end"]
    if "code" in question:
        return words("```\n" + "\n".join(f"line {n}" for n in range(60)) + "\n```\nDone.")
    return words(f"Turn {turn}: you said {question!r}, seed {fake_llm.SEEN['params'].seed}.")


fake_llm.LLM.answer = answer
