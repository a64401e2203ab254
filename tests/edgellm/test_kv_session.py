"""Keys and values on disk: a restart goes on with the same tokens, and nothing else is accepted."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import architectures
import pytest
from invariance import tokens_of

from edgellm import LLM, SamplingParams
from edgellm.kv_file import KVFileError, Saved, fingerprint, read, write
from edgellm.quant.gguf import GGUF

PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
LAYOUT = {"a": 1}


@pytest.fixture(params=["llama", "gemma3", "qwen35", "lfm2"])
def path(request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Callable[..., Path]) -> Path:
    if request.param in ("qwen35", "lfm2"):
        return architectures.write(tmp_path / "model.gguf", request.param)
    return tiny_model(request.param, n_ctx=1024)


def test_a_restart_goes_on_with_the_same_tokens(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.kv"
    with LLM(path, n_ctx=512) as llm:
        prompt = tokens_of(1, 150, llm.n_vocab)
        done = llm.generate(prompt, PARAMS)
        seen = prompt + done.tokens
        saved = llm.save_cache(file, seen)
        assert saved == len(seen) - 1  # the last token was never computed
        more = llm.generate([*seen, 5, 6], PARAMS)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and llm.is_idle
    with LLM(path, n_ctx=512, n_threads=1) as llm:
        assert llm.load_cache(file) == saved
        again = llm.generate([*seen, 5, 6], PARAMS)
        assert again.tokens == more.tokens and again.n_cached == saved
        assert llm.is_idle and llm.runner.cache.faults() == []
        with pytest.raises(KVFileError, match="cannot be read"):
            llm.load_cache(tmp_path / "none.kv")


def test_what_is_erased_is_computed_anew(path: Path) -> None:
    with LLM(path, n_ctx=512) as llm:
        prompt, other = tokens_of(1, 150, llm.n_vocab), tokens_of(2, 90, llm.n_vocab)
        llm.generate(other, PARAMS)
        done = llm.generate(prompt, PARAMS)
        seen = prompt + done.tokens
        assert llm.erase_cache(seen, "another salt") == 0
        assert llm.erase_cache(seen) == len(seen) - 1
        assert llm.is_idle and llm.runner.cache.faults() == []
        assert llm.erase_cache(seen) == 0
        again = llm.generate(prompt, PARAMS)
        assert again.n_cached == 0 and again.tokens == done.tokens
        assert llm.generate(other, PARAMS).n_cached > 0


def test_other_salts_do_not_find_it(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with LLM(tiny_model("llama")) as llm:
        prompt = tokens_of(1, 90, llm.n_vocab)
        llm.generate(prompt, PARAMS)
        assert llm.save_cache(tmp_path / "a.kv", prompt, "other") == 0
        assert llm.save_cache(tmp_path / "a.kv", prompt) == 90
        llm.runner.cache.start_anew(reuse=True)
        assert llm.load_cache(tmp_path / "a.kv", "other") == 90
        assert llm.generate(prompt, PARAMS).n_cached == 0


def test_another_model_or_layout_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    file, prompt = tmp_path / "a.kv", list(range(90))
    with LLM(tiny_model("llama")) as llm:
        llm.generate(prompt, PARAMS)
        llm.save_cache(file, prompt)
    for other in (
        LLM(tiny_model("gemma3")),
        LLM(tiny_model("llama", seed=7)),
        LLM(tiny_model("llama"), context_policy="ring", n_ctx=128),
    ):
        with other, pytest.raises(KVFileError, match="saved by another model"):
            other.load_cache(file)
    with LLM(tiny_model("llama"), n_ctx=64, max_num_seqs=1) as small, pytest.raises(KVFileError):
        small.load_cache(file)


def test_more_than_the_context_holds_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The context is no part of the layout: it may be smaller than when the file was made."""
    file, prompt = tmp_path / "a.kv", tokens_of(1, 150, 200)
    with LLM(tiny_model("llama"), n_ctx=256) as llm:
        llm.generate(prompt, PARAMS)
        assert llm.save_cache(file, prompt) == 150
    for n_ctx in (64, 128, 150, 151):
        with LLM(tiny_model("llama"), n_ctx=n_ctx) as small:
            if n_ctx > 150:
                assert small.load_cache(file) == 150
                continue
            with pytest.raises(KVFileError, match=f"150 tokens, and the context has {n_ctx}"):
                small.load_cache(file)
            assert small.is_idle and small.runner.cache.faults() == []


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """Any byte changed, any length cut: one sentence, never other data."""
    path, rng = tmp_path / "a.kv", random.Random(1)
    saved = Saved([1, 2, 3], [{0: b"abc" * 20, 3: b"def" * 20}, {}], b"state")
    write(path, LAYOUT, saved)
    whole = path.read_bytes()
    assert read(path, LAYOUT) == saved
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(KVFileError):
            read(path, LAYOUT)
    for _ in range(300):
        at = rng.randrange(len(whole))
        changed = bytearray(whole)
        changed[at] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(KVFileError):
            read(path, LAYOUT)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(KVFileError, match="not a regular file"):
            read(other, LAYOUT)
    path.write_bytes(whole + b"x")
    with pytest.raises(KVFileError):
        read(path, LAYOUT)


def test_a_process_killed_while_saving_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    script = (
        "import sys; from pathlib import Path; from edgellm.kv_file import Saved, write\n"
        "i = 0\n"
        "while True:\n"
        "    saved = Saved([i], [{0: bytes([i % 256]) * 3000000}], b'')\n"
        "    write(Path(sys.argv[1]), {'a': 1}, saved)\n"
        "    i += 1; print(i, flush=True)\n"
    )
    run = [sys.executable, "-c", script, str(path)]
    for i in range(12):
        with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for _ in range(1 + i % 3):
                child.stdout.readline()
            child.kill()
        found = read(path, LAYOUT)
        assert found.blocks[0][0] == bytes([found.tokens[0] % 256]) * 3_000_000


def test_fingerprints_tell_models_apart(tiny_model: Callable[..., Path]) -> None:
    marks = set()
    for path in (tiny_model("llama"), tiny_model("llama", seed=7), tiny_model("gemma3")):
        with GGUF(path) as model:
            assert fingerprint(model) == fingerprint(model)
            marks.add(fingerprint(model))
    assert len(marks) == 3
