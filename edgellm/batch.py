"""Many prompts from a JSONL file, their answers to another, so that it can be stopped and resumed.

A line of the input is an object with ``prompt`` or ``messages``, an ``id`` if you like, and any
fields of SamplingParams, which go before those of the command. Each answer is a line of the output,
written when it is finished and whole: after a crash nothing but the last line can be torn, and the
next run cuts it off. A line whose answer (or error) is there already is not computed again; what
has no id is known by the number of its line.

What a line answers does not depend on its company, nor on where the run before was killed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.errors import EdgeLLMError
from edgellm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from edgellm.llm import LLM, Completion
    from edgellm.prompts import Prompt
    from edgellm.sequence import Sequence

FIELDS = {field.name for field in fields(SamplingParams)}
# Other names that requests written for llama.cpp or OpenAI use.
SYNONYMS = {"n_predict": "max_tokens", "max_completion_tokens": "max_tokens", "temp": "temperature"}
FORMS = ("json_schema", "grammar", "regex")
_BEGINNING = b'{"id": '  # of every line that is written here


class BatchError(EdgeLLMError):
    """A batch cannot be run: something is wrong with its files."""


class BatchFailed(EdgeLLMError):
    """Some lines of a batch that ran to its end failed."""


class LineError(EdgeLLMError):
    """One line of the input cannot be answered."""


@dataclass(frozen=True, slots=True)
class Line:
    """One request. ``key`` tells it from all others of the file."""

    number: int  # from 1
    id: str | int | None
    body: dict[str, Any]

    @property
    def key(self) -> str:
        return key_of(self.id, self.number)


def key_of(id: str | int | None, number: int) -> str:
    """What a line is known by: its id (1 and "1" are two) or its number."""
    return json.dumps(id) if id is not None else f"line {number}"


def parse(raw: bytes, number: int) -> Line:
    """A line of the input. Raises LineError."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise LineError(f"Line {number} is not JSON.") from None
    if not isinstance(body, dict):
        raise LineError(f"Line {number} is not a JSON object.")
    id = body.pop("id", None)
    if not isinstance(id, str | int | None) or isinstance(id, bool):
        raise LineError(f"Line {number}: id must be a text or a whole number, not {id!r}.")
    return Line(number, id, body)


def params_of(line: Line, given: SamplingParams) -> SamplingParams:
    """``given`` with what the line says of sampling. Raises EdgeLLMError."""
    values: dict[str, Any] = {}
    for name, value in line.body.items():
        if name in ("prompt", "messages"):
            continue
        field = SYNONYMS.get(name, name)
        if field not in FIELDS:
            raise LineError(f"Line {line.number}: there is no field {name!r}.")
        values[field] = value
    if values.get("max_tokens") == -1:
        values["max_tokens"] = None
    if any(values.get(form) is not None for form in FORMS):
        values = {form: None for form in FORMS} | values  # one of them replaces another
    try:
        params = replace(given, **values)
        return replace(params, seed=params.resolved_seed())  # it is part of the answer
    except EdgeLLMError as error:
        raise LineError(f"Line {line.number}: {error}") from None
    except TypeError:
        raise LineError(f"Line {line.number}: a field has a value of the wrong type.") from None


class Results:
    """The output file. Opening it cuts a torn last line off and reads which answers are there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.keys: set[str] = set()
        self.n_failed = 0  # of those that were there
        try:
            if os.path.exists(self.path) and not os.path.isfile(self.path):
                raise BatchError(f"{self.path} (--out): it is not a regular file.")
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise BatchError(f"{self.path} (--out): {error.strerror or error}.") from None
        try:
            self._lock()
            self._read()
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BatchError(f"{self.path} is being written by another batch.") from None

    def _read(self) -> None:
        end = 0
        with open(self.path, "rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n") and _is_torn(raw):
                    os.ftruncate(self._file, end)
                    return
                try:
                    record = json.loads(raw)
                    key = key_of(record["id"], record["line"])
                except (ValueError, KeyError, TypeError, RecursionError):
                    raise BatchError(
                        f"{self.path} (--out): line {number} is not an answer of a batch; "
                        "name another file."
                    ) from None
                end += len(raw)
                self.keys.add(key)
                self.n_failed += "error" in record

    def write(self, line: Line, record: dict[str, Any]) -> None:
        """Append one answer, whole."""
        record = {"id": line.id, "line": line.number, **record}
        try:
            data = json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # half a surrogate pair in an id
            data = json.dumps(record).encode()
        data += b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise BatchError(f"{self.path} (--out): {error.strerror or error}.") from None
        self.keys.add(line.key)

    def close(self) -> None:
        os.close(self._file)


def _is_torn(tail: bytes) -> bool:
    """Whether what stands after the last line end is the beginning of an answer: somebody else's
    text must not be cut."""
    return tail.startswith(_BEGINNING[: len(tail)])


@dataclass(slots=True)
class Progress:
    """How far a batch is."""

    done: int = 0
    failed: int = 0
    skipped: int = 0  # were there already
    tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.done} answered"]
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.skipped:
            parts.append(f"{self.skipped} were there already")
        speed = f"; {self.tokens / self.seconds:.1f} tokens/s" if self.tokens else ""
        return ", ".join(parts) + speed


def run(
    llm: LLM,
    source: Iterable[bytes],
    results: Results,
    params: SamplingParams,
    encode: Callable[[dict[str, Any]], list[int]],
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Answer every line of ``source`` that has no answer yet. ``encode`` makes the token ids of a
    request's ``prompt`` or ``messages``."""
    progress, begun = Progress(), time.perf_counter()
    lines: dict[int, tuple[Line, SamplingParams]] = {}  # on their way, by number of the request
    numbers = count()

    def fail(line: Line, error: Exception) -> None:
        results.write(line, {"error": str(error)})
        progress.failed += 1

    def requests() -> Iterator[tuple[Prompt, SamplingParams]]:
        there, seen = frozenset(results.keys), set[str]()
        for number, raw in enumerate(source, 1):
            if not raw.strip():
                continue
            line = Line(number, None, {})  # until its id is known
            try:
                line = parse(raw, number)
                if line.key in seen:
                    twice = line
                    line = Line(number, None, {})  # or its error would pass for the other's answer
                    raise LineError(f"Line {number}: the id {twice.key} was used before.")
                seen.add(line.key)
                if line.key in there:
                    progress.skipped += 1
                    continue
                own = params_of(line, params)
                prompt = encode(_checked(line))
            except EdgeLLMError as error:
                if line.key in there:
                    progress.skipped += 1
                else:
                    fail(line, error)
                continue
            lines[next(numbers)] = line, own
            yield prompt, own

    for number, result in as_completed(llm, requests()):
        line, own = lines.pop(number)
        if isinstance(result, Exception):
            fail(line, result)
        else:
            results.write(line, _record(result, own))
            progress.done += 1
            progress.tokens += len(result.tokens)
        progress.seconds = time.perf_counter() - begun
        report(progress)
    return progress


def _checked(line: Line) -> dict[str, Any]:
    """The body, if it asks one thing."""
    body = line.body
    if ("prompt" in body) == ("messages" in body):
        raise LineError(f"Line {line.number} must have either prompt or messages.")
    if "prompt" in body and not (isinstance(body["prompt"], str) and body["prompt"]):
        raise LineError(f"Line {line.number}: prompt must be a text that is not empty.")
    messages = body.get("messages", [{}])
    if not (isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)):
        raise LineError(f"Line {line.number}: messages must be a list of objects.")
    if "messages" in body and not all(isinstance(m.get("role"), str) for m in messages):
        raise LineError(f"Line {line.number}: every message needs a role.")
    return body


def _record(completion: Completion, params: SamplingParams) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "seed": params.seed,
        "prompt_tokens": completion.n_prompt,
        "completion_tokens": len(completion.tokens),
    }
    if completion.logprobs is not None:
        record["tokens"] = completion.tokens
        record["logprobs"] = completion.logprobs
    return record


def as_completed(
    llm: LLM, requests: Iterable[tuple[Prompt, SamplingParams]]
) -> Iterator[tuple[int, Completion | Exception]]:
    """(number, completion) of each request when it is finished, or the error that it ended with;
    as many at once as the model has seats. A request is taken from the iterable when there is room
    for it."""
    from edgellm.request_options import RequestOptions
    from edgellm.sequence import completion_of

    numbered, options = enumerate(requests), RequestOptions(priority="batch")
    running: dict[int, Sequence] = {}
    more = True
    try:
        while more or running:
            while more and len(running) < llm.max_num_seqs:
                taken = next(numbered, None)
                if taken is None:
                    more = False
                    break
                number, (prompt, params) = taken
                try:
                    [sequence] = llm.submit(prompt, params, options)
                except EdgeLLMError as error:
                    yield number, error
                else:
                    running[number] = sequence
            if running:
                llm.step()
            for number in [n for n, s in running.items() if s.finish_reason is not None]:
                sequence = running.pop(number)
                yield number, sequence.error or completion_of(sequence)
    finally:
        for sequence in running.values():
            llm.forget(sequence)
