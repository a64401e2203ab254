"""Lists of numbers as llama-bench takes them: 512,1024 and 1-16 and 0-4096+1024 and 1-64*2."""

import re

import typer

_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?")
_MOST = 1000  # numbers of a list


def numbers(text: str) -> list[int]:
    """The numbers a list names, in its order, each once."""
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise typer.BadParameter(
                f"{part!r} is no number and no range; write 512,1024 or 1-16 or 0-4096+1024"
            )
        first, last, sign, by = match.groups()
        found += _range(int(first), int(last or first), sign or "+", int(by or 1), part)
    return list(dict.fromkeys(found))


def _range(first: int, last: int, sign: str, by: int, part: str) -> list[int]:
    if last < first or by < (2 if sign == "*" else 1) or (sign == "*" and first == 0):
        raise typer.BadParameter(f"the range {part!r} does not get from its first to its last")
    values = [first]
    while (following := values[-1] * by if sign == "*" else values[-1] + by) <= last:
        values.append(following)
        if len(values) > _MOST:
            raise typer.BadParameter(f"the range {part!r} has more than {_MOST} numbers")
    return values
