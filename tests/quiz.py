"""A multiple-choice task for lm-eval, written here: its items, and the files that lm-eval reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# A question, its right answer and two wrong ones.
_ITEMS = """
The capital of France is|Paris|Rome|a spoon
The capital of Japan is|Tokyo|Lima|Oslo
The capital of Italy is|Rome|Cairo|blue
Water freezes into|ice|stone|bread
A cow gives|milk|petrol|letters
Bees make|honey|paper clips|salt
The opposite of hot is|cold|seven|loud
The opposite of up is|down|green|slowly
Two plus two is|four|nine|a river
Ten minus three is|seven|one hundred|two
A week has|seven days|forty days|no days
A year has|twelve months|three months|ninety months
The sun rises in the|east|bottle|north
At night one sees the|moon|breakfast|sun
Birds have|wings|wheels|roots
Fish live in|water|books|fire
A dog likes to|bark|read|photosynthesize
Trees have|leaves|engines|feathers
One writes with a|pen|cloud|shoe
One sleeps in a|bed|kettle|drawer
Snow is|white|black|sour
Grass is|green|metallic|purple
Blood is|red|blue|square
Coal is|black|transparent|sweet
The first letter of the alphabet is|A|Q|Z
The plural of mouse is|mice|mouses|meese
Shakespeare wrote|Hamlet|Python|the telephone book
Newton is known for|gravity|cooking|jazz
A triangle has|three sides|eight sides|no sides
Größe heißt auf Englisch|size|window|“höhe”
""".strip()


def items() -> list[dict[str, Any]]:
    """The right answer stands in turn at each place."""
    found = []
    for i, line in enumerate(_ITEMS.splitlines()):
        question, right, *wrong = line.split("|")
        choices = wrong[: i % 3] + [right] + wrong[i % 3 :]
        found.append({"question": question, "choices": choices, "answer": i % 3})
    return found


def write(folder: Path) -> None:
    """The data, and the task named quiz."""
    data = folder / "quiz.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items()))
    (folder / "quiz.yaml").write_text(f"""\
task: quiz
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
metric_list:
  - metric: acc
""")
