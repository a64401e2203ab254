"""The engine as its users meet it: requests, limits, errors, and that nothing is left behind."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from edgellm import LLM, SamplingParams
from edgellm.errors import EdgeLLMError
from edgellm.llm import ContextFull, EngineError

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., Path]):  # type: ignore[no-untyped-def]
    with LLM(tiny_model("llama"), n_ctx=256, n_threads=2, max_num_seqs=4) as model:
        yield model


def test_one_prompt_or_several(llm: LLM) -> None:
    one = llm.generate("abc", GREEDY)
    assert len(one.tokens) == 12 and one.finish_reason == "length"
    assert one.text == llm.detokenize(one.tokens)
    several = llm.generate(["abc", [97, 98, 99], "xyz"], GREEDY)
    assert several[0].tokens == one.tokens and len(several) == 3
    assert llm.generate([97, 98], GREEDY).tokens == llm.generate([[97, 98]], GREEDY)[0].tokens
    assert llm.generate([], GREEDY) == []
    assert llm.is_idle


def test_streams_equal_completions_and_end_with_a_reason(llm: LLM) -> None:
    pieces = list(llm.stream("hello", GREEDY))
    assert "".join(p.text for p in pieces) == llm.generate("hello", GREEDY).text
    assert [p.finish_reason for p in pieces] == [None] * 12 + ["length"]
    assert pieces[-1].token is None


def test_a_stream_left_early_frees_its_sequence(llm: LLM) -> None:
    stream = llm.stream("hello", GREEDY)
    next(stream)
    assert not llm.is_idle
    stream.close()  # type: ignore[attr-defined]
    assert llm.is_idle


def test_stop_strings_end_the_text_and_never_show(llm: LLM) -> None:
    whole = llm.generate("stop here", GREEDY).text
    stop = whole[4:7]
    first = whole.index(stop)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop=[stop])
    cut = llm.generate("stop here", params)
    assert cut.finish_reason == "stop" and cut.text == whole[:first]
    assert "".join(p.text for p in llm.stream("stop here", params)) == whole[:first]


def test_the_end_token_stops_and_is_not_shown(llm: LLM) -> None:
    params = SamplingParams(max_tokens=None, temperature=3.0, top_k=0, top_p=1, min_p=0, seed=1)
    for seed in range(40):
        found = llm.generate("a", SamplingParams(**_fields(params) | {"seed": seed}))
        if found.finish_reason == "stop":
            assert 256 not in found.tokens and "<|end|>" not in found.text
            return
    pytest.fail("no end token in 40 random completions")


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def test_logprobs_are_those_of_the_logits(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=4)
    found = llm.generate([1, 2, 3], params)
    assert found.logprobs is not None
    logits = llm.logits([1, 2, 3, *found.tokens]).astype(np.float64)
    for i, (logprob, top) in enumerate(found.logprobs):
        row = logits[2 + i]
        expected = row - np.log(np.exp(row).sum())
        assert logprob == pytest.approx(expected[found.tokens[i]], abs=1e-5)
        assert [t for t, _ in top] == np.argsort(-row, kind="stable")[:4].tolist()


def test_logits_are_of_a_fresh_sequence(llm: LLM) -> None:
    tokens = list(range(200))
    first = llm.logits(tokens)
    assert first.shape == (200, llm.n_vocab) and first.dtype == np.float32
    llm.generate("something else", GREEDY)
    assert np.array_equal(first, llm.logits(tokens))
    assert np.array_equal(first[:3], llm.logits(tokens[:3]))


def test_timings_use_the_known_names(llm: LLM) -> None:
    timings = llm.generate("0z9", GREEDY).timings
    assert timings["prompt_n"] == 3 and timings["predicted_n"] == 12
    assert timings["prompt_ms"] > 0 and timings["predicted_per_second"] > 0
    assert set(llm.timings) == set(timings)


def test_a_full_context_is_said_clearly(llm: LLM) -> None:
    with pytest.raises(ContextFull, match="257 tokens and the context 256.*-c"):
        llm.generate([1] * 257, GREEDY)
    params = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    found = llm.generate([1] * 250, params)
    assert found.finish_reason == "length" and found.context_full and len(found.tokens) == 6
    assert llm.context_full and llm.is_idle


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([5, 258], "258 is not in the vocabulary of 258"),
        ([-1], "-1 is not"),
        ([[1], [2.5]], "text or a list of token ids"),
        ([[1], []], "empty"),
    ],
)
def test_bad_prompts_are_one_sentence(llm: LLM, prompt: object, message: str) -> None:
    with pytest.raises(EdgeLLMError, match=message):
        llm.generate(prompt, GREEDY)  # type: ignore[call-overload]
    assert llm.is_idle


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 0},
        {"n_threads": -1},
        {"n_threads": 10**20},
        {"type_k": "q9"},
        {"type_v": "q5_0"},
        {"cpu_mask": "x"},
    ],  # fmt: skip
)
def test_bad_options_are_refused(tiny_model: Callable[..., Path], options: dict) -> None:  # type: ignore[type-arg]
    with pytest.raises(EdgeLLMError, match=next(iter(options)).replace("cpu_m", "CPU m")):
        LLM(tiny_model("llama"), **options)


def test_a_context_beyond_memory_is_refused_with_what_would_fit(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.context.available_bytes", lambda: 40 << 20)
    path = tiny_model("llama", n_ctx=1 << 20)
    with pytest.raises(EdgeLLMError, match="ask for at most"):
        LLM(path, n_ctx=1 << 20)
    with LLM(path, n_threads=1) as small:
        assert small.n_ctx < 1 << 20 and "would not fit into memory" in small.notices[0]


def test_more_requests_than_seats_all_finish(llm: LLM) -> None:
    prompts = [[i + 1] * (5 * i + 1) for i in range(20)]
    found = llm.generate(prompts, GREEDY)
    assert [len(c.tokens) for c in found] == [12] * 20
    assert llm.is_idle


def test_callers_in_several_threads_take_turns(llm: LLM) -> None:
    expected = [llm.generate([i + 1], GREEDY).tokens for i in range(6)]
    found: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        found[i] = llm.generate([i + 1], GREEDY).tokens

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(6)] == expected


def test_a_closed_model_says_so(tiny_model: Callable[..., Path]) -> None:
    model = LLM(tiny_model("llama"), n_threads=1)
    model.close()
    model.close()
    with pytest.raises(EngineError, match="closed"):
        model.generate("a", GREEDY)


def test_use_after_fork_is_refused_in_one_sentence(tiny_model: Callable[..., Path]) -> None:
    script = (
        "import os, sys; from edgellm import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], n_threads=2); llm.generate('a', SamplingParams(max_tokens=2))\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: llm.generate('a', SamplingParams(max_tokens=2))\n"
        "    except ValueError as error: print(type(error).__name__, error, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(len(llm.generate('b', SamplingParams(max_tokens=2, ignore_eos=True)).tokens))"
    )
    run = [sys.executable, "-W", "ignore", "-c", script, str(tiny_model("llama"))]
    out = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert "EngineError edgellm cannot be used after a fork" in out.stdout, out.stderr
    assert out.stdout.strip().endswith("2")


@pytest.mark.slow
def test_a_hundred_models_leave_no_thread_and_no_memory(tiny_model: Callable[..., Path]) -> None:
    path, process = tiny_model("llama"), psutil.Process()

    def use() -> None:
        with LLM(path, n_threads=2) as model:
            model.generate("abc", GREEDY)

    for _ in range(10):
        use()
    gc.collect()
    threads, memory = process.num_threads(), process.memory_info().rss
    files = process.num_fds()
    for _ in range(90):
        use()
    gc.collect()
    assert process.num_threads() <= threads
    assert process.num_fds() <= files
    assert process.memory_info().rss - memory < 8 << 20


def test_a_model_that_is_dropped_stops_its_threads(tiny_model: Callable[..., Path]) -> None:
    before = threading.active_count()
    model = LLM(tiny_model("llama"), n_threads=2)
    model.generate("a", GREEDY)
    assert threading.active_count() >= before + 2
    del model
    gc.collect()
    assert threading.active_count() <= before


@pytest.mark.real
def test_ctrl_c_in_a_long_prefill_stops_quickly(real_model: Callable[[str], Path]) -> None:
    script = (
        "import sys, time; from edgellm import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], n_ctx=8192, n_threads=2)\n"
        "print('go', flush=True)\n"
        "try: llm.generate([7] * 8000, SamplingParams(max_tokens=1))\n"
        "except KeyboardInterrupt: print('stopped', llm.is_idle, flush=True)\n"
        "print(len(llm.generate([7] * 8, SamplingParams(max_tokens=2, ignore_eos=True)).tokens))"
    )
    run = [sys.executable, "-c", script, str(real_model("SmolLM2"))]
    with subprocess.Popen(run, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "go\n"
        time.sleep(0.7)
        os.kill(child.pid, signal.SIGINT)
        sent = time.perf_counter()
        assert child.stdout.readline() == "stopped True\n"
        assert time.perf_counter() - sent < 2  # reading the prompt would take longer
        assert child.stdout.readline() == "2\n"


def test_metadata_and_report(llm: LLM, tiny_model: Callable[..., Path]) -> None:
    assert llm.metadata["general.architecture"] == "llama" and llm.chat_template is None
    rows = llm.report()
    assert {row["tensor"] for row in rows} >= {"blk.0.attn_q.weight", "output.weight"}
    assert all(row["packed"] for row in rows)
    with LLM(tiny_model("llama", template="{{ messages }}"), n_threads=1) as other:
        assert other.chat_template == "{{ messages }}"


def test_a_stream_nobody_reads_takes_no_seat(llm: LLM) -> None:
    for _ in range(10):
        llm.stream("hello", SamplingParams(max_tokens=None, ignore_eos=True))
    assert llm.is_idle
    with pytest.raises(EdgeLLMError, match="not in the vocabulary"):
        llm.stream([999], GREEDY)  # said at once, not when it is read


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(None), "A prompt is a text"),
        (lambda llm: llm.generate({"a": 1}), "A prompt is a text"),
        (lambda llm: llm.generate("a", {"max_tokens": 3}), "params must be SamplingParams"),
        (lambda llm: SamplingParams(stop=5), "stop must be"),
        (lambda llm: LLM(None), "path of a model file"),
        (lambda llm: LLM(llm.path, n_ctx=True), "n_ctx must be"),
        (lambda llm: pickle.dumps(llm), "cannot be copied or pickled"),
        (lambda llm: copy.copy(llm), "cannot be copied or pickled"),
    ],
)
def test_misuse_is_one_sentence(llm: LLM, call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(EdgeLLMError, match=message):
        call(llm)


def test_kind_options_are_taken(llm: LLM) -> None:
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    with LLM(llm.path, n_ctx=np.int64(64), n_threads=1) as other:  # type: ignore[arg-type]
        assert other.n_ctx == 64


@pytest.mark.parametrize("tensor", ["blk.0.ffn_down", "blk.1.attn_k", "output", "output_norm"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_a_number_in_a_file_reaches_the_user(
    tiny_model: Callable[..., Path], tmp_path: Path, tensor: str, value: float
) -> None:
    from edgellm.quant.gguf import GGUF

    data = bytearray(tiny_model("llama").read_bytes())
    with GGUF(tiny_model("llama")) as file:
        info = file.tensors[f"{tensor}.weight"]
    kind = np.float32 if info.type.name == "f32" else np.float16  # a scale comes first in a block
    for row in range(info.rows):
        at = info.offset + row * info.row_bytes
        data[at : at + kind().itemsize] = kind(value).tobytes()
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with LLM(path, n_threads=1) as damaged, pytest.raises(EdgeLLMError, match="not numbers"):
        damaged.generate(list(range(50)), GREEDY)
