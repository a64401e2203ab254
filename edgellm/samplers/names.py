"""Names of the sampling steps and the order they run in: llama.cpp's, so that a recipe from there
works here."""

from collections.abc import Iterable

from edgellm.errors import EdgeLLMError

ORDER = (
    "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
)  # fmt: skip
ALIASES = {
    "typical": "typ_p",
    "typical_p": "typ_p",
    "typ": "typ_p",
    "nucleus": "top_p",
    "temp": "temperature",
    "top_nsigma": "top_n_sigma",
    "penalty": "penalties",
}
LETTERS = dict(zip("edskypmxt", ORDER, strict=True))  # of --sampler-seq


def parse_order(value: str | Iterable[str]) -> tuple[str, ...]:
    """Steps from "top_k;temperature" or a list of names, in any spelling llama.cpp takes."""
    names = value.split(";") if isinstance(value, str) else list(value)
    result = []
    for name in names:
        if not isinstance(name, str):
            raise EdgeLLMError(f"samplers must hold names, not {name!r}.")
        plain = name.strip().lower().replace("-", "_")
        plain = ALIASES.get(plain, plain)
        if not plain and isinstance(value, str):
            continue  # a ; too many, or none at all
        if plain not in ORDER:
            raise EdgeLLMError(
                f"There is no sampler {name!r} (samplers); there are {', '.join(ORDER)}."
            )
        result.append(plain)
    return tuple(result)


def parse_letters(text: str) -> tuple[str, ...]:
    """Steps from one letter each, as in "edskypmxt"."""
    for letter in text:
        if letter not in LETTERS:
            known = ", ".join(f"{short} {name}" for short, name in LETTERS.items())
            raise EdgeLLMError(f"There is no sampler for the letter {letter!r}; there are {known}.")
    return tuple(LETTERS[letter] for letter in text)
