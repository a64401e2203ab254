"""A sequence's keys and values: from the cache to a file, and back into the cache.

What is restored lies in the cache as if an earlier request had computed it, so the next prompt
that begins alike goes on from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.kernels.cpu import store
from edgellm.kv_cache import NoRoom
from edgellm.kv_file import KVFileError, Saved, fingerprint
from edgellm.request_options import RequestOptions
from edgellm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from edgellm.llm import LLM
    from edgellm.sequence import Sequence

_PARAMS = SamplingParams(max_tokens=1, temperature=0)


def snapshot(llm: LLM, tokens: list[int], salt: str = "") -> Saved:
    """What the cache has of the tokens. KVFileError."""
    runner, sequence = llm.runner, _sequence(llm, tokens, salt)
    if not runner.cache.admit(sequence):
        raise KVFileError("The cache cannot be saved: all seats of the model are taken.")
    try:
        n = sequence.n_computed
        blocks = [
            {place: runner.read_block(i, block) for place, block in sorted(blocks.items())}
            for i, blocks in enumerate(sequence.blocks)
        ]
        state = runner.read_state(sequence.state) if sequence.state >= 0 else b""
    finally:
        runner.cache.release(sequence)
    return Saved(tokens[:n], blocks, state)


def insert(llm: LLM, saved: Saved, path: Path, salt: str = "") -> None:
    """Put what was read from a file into the cache. KVFileError."""
    runner = llm.runner
    if not saved.tokens:
        return
    if len(saved.tokens) >= llm.max_positions:
        raise KVFileError(
            f"{path} cannot be restored: it holds {len(saved.tokens)} tokens, and the context has "
            f"{llm.max_positions} (-c)."
        )
    sequence = _sequence(llm, saved.tokens, salt)
    if not runner.cache.admit(sequence, reuse=False):
        raise KVFileError(f"{path} cannot be restored: the cache has no room for it.")
    try:
        runner.cache.insert(sequence, saved, runner)
    except NoRoom:
        raise KVFileError(f"{path} cannot be restored: the cache has no room for it.") from None
    finally:
        runner.cache.release(sequence)


def erase(llm: LLM, tokens: list[int], salt: str = "") -> int:
    """Forget what the cache has of the tokens, if no request uses it; returns of how many."""
    return llm.runner.cache.forget(_sequence(llm, tokens, salt))


def _sequence(llm: LLM, tokens: list[int], salt: str) -> Sequence:
    """One more token than is looked for: of a prompt, one is always left to compute."""
    n = min(len(tokens), llm.max_positions - 1)
    return llm.sequence([*tokens[:n], tokens[-1]], _PARAMS, RequestOptions(cache_salt=salt))


def layout(llm: LLM) -> dict[str, Any]:
    """What must be the same for the bytes to mean the same."""
    runner, placed = llm.runner, llm.placement.plan
    is_strict = placed.strict and placed.uses_device
    groups = [[g.window, g.sinks, runner.block_bytes(i)] for i, g in enumerate(runner.cache.groups)]
    return {
        "model": fingerprint(llm.gguf),
        "kernels": store.version_key(),
        "block": runner.cache.block,
        "groups": groups,
        "types": [llm.type_k, llm.type_v],
        "state": runner.state_bytes,
        # they round differently
        "places": [placed.places, placed.matrices, placed.kv_offload, is_strict],
    }
