"""edgellm run: flags, environment, prompt sources, outputs, refusals. The engine is a fake."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgellm.cli.main import run
from edgellm.offload import ALL, Options

FAKE = Path(__file__).with_name("fake_llm.py")


@pytest.fixture
def refused(fake, capsys):
    """Runs a command line that must be refused in one sentence; returns the sentence."""

    def check(*arguments: str) -> str:
        assert run(list(arguments)) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1 and err.endswith("\n") and "Traceback" not in err
        return err

    return check


def test_text_goes_to_stdout_and_the_rest_to_stderr(fake, capsys):
    assert run(["run", "-m", "m.gguf", "-p", "Hi"]) == 0
    out, err = capsys.readouterr()
    assert out == "".join(fake.ANSWER) + "\n"
    assert "compiling kernels 1/2" in err
    assert "answer 5 tokens, 100.0 tokens/s" in err
    assert fake.SEEN["closed"]
    run(["run", "-m", "m.gguf", "-p", "Hi", "--no-show-timings"])
    assert "tokens/s" not in capsys.readouterr().err


def test_the_chat_template_is_applied_unless_raw(fake, capsys):
    run(["run", "m.gguf", "Hi", "-sys", "Be brief."])
    assert fake.SEEN["prompt"] == "<s>[system]Be brief.[user]Hi[assistant]"
    assert fake.SEEN["tokens"][:2] == [0, ord("[")]
    Path("system.txt").write_text("From a file.\n")
    run(["run", "m.gguf", "Hi", "-sysf", "system.txt"])
    assert fake.SEEN["prompt"] == "<s>[system]From a file.[user]Hi[assistant]"
    run(["run", "m.gguf", "Hi", "--raw"])
    assert fake.SEEN["prompt"] == "Hi"
    assert (fake.SEEN["add_special"], fake.SEEN["parse_special"]) == (True, False)


def test_a_model_without_template_continues_the_text_and_says_so(fake, capsys, monkeypatch):
    monkeypatch.setattr(fake.LLM, "chat_template", None)
    assert run(["run", "m.gguf", "Hi"]) == 0
    assert fake.SEEN["prompt"] == "Hi"
    assert "no chat template" in capsys.readouterr().err


def test_json_output(fake, capsys):
    assert run(["run", "m.gguf", "Hi", "--output", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] == "".join(fake.ANSWER)
    assert [fake.TEXTS[token] for token in answer["tokens"]] == list(fake.ANSWER)
    assert answer["finish_reason"] == "stop"
    assert answer["prompt_tokens"] == len(fake.SEEN["tokens"])
    assert answer["timings"] == fake.LLM.timings
    assert answer["seed"] == fake.SEEN["params"].seed >= 0


@pytest.mark.parametrize(
    "flags, field, value",
    [
        (["-n", "7"], "max_tokens", 7),
        (["--predict", "7"], "max_tokens", 7),
        (["--n-predict", "-1"], "max_tokens", None),
        ([], "max_tokens", None),
        (["--temp", "0"], "temperature", 0),
        (["--temperature", "1.5"], "temperature", 1.5),
        (["--top-k", "0"], "top_k", 0),
        (["--top-p", "0.5"], "top_p", 0.5),
        (["--min-p", "0.1"], "min_p", 0.1),
        (["-s", "42"], "seed", 42),
        (["--seed", "-1"], "seed", -1),
        (["--stop", "a", "--stop", "b"], "stop", ("a", "b")),
        (["--ignore-eos"], "ignore_eos", True),
        (["-ngl", "0"], "top_k", 40),
        (["--n-gpu-layers", "auto"], "top_p", 0.95),
    ],
)
def test_sampling_flags(fake, flags, field, value):
    assert run(["run", "m.gguf", "Hi", *flags]) == 0
    assert getattr(fake.SEEN["params"], field) == value


def test_flags_beat_the_environment(fake, monkeypatch):
    monkeypatch.setenv("EDGELLM_TEMP", "0.3")
    monkeypatch.setenv("EDGELLM_CTX_SIZE", "100")
    monkeypatch.setenv("EDGELLM_THREADS", "2")
    monkeypatch.setenv("EDGELLM_N_PREDICT", "9")
    monkeypatch.setenv("EDGELLM_MODEL", "m.gguf")
    assert run(["run", "-p", "Hi"]) == 0
    seen = fake.SEEN
    assert (seen["path"], seen["n_ctx"], seen["n_threads"]) == ("m.gguf", 100, 2)
    assert (seen["params"].temperature, seen["params"].max_tokens) == (0.3, 9)
    Path("other.gguf").write_bytes(b"GGUF")
    assert run(["run", "other.gguf", "Hi", "--temp", "0.4", "-c", "200", "-t", "-1"]) == 0
    assert (seen["path"], seen["n_ctx"], seen["n_threads"]) == ("other.gguf", 200, None)
    assert seen["params"].temperature == 0.4


def test_switches_by_environment(fake, monkeypatch, capsys):
    monkeypatch.setenv("EDGELLM_RAW", "1")
    monkeypatch.setenv("EDGELLM_IGNORE_EOS", "true")
    monkeypatch.setenv("EDGELLM_SHOW_TIMINGS", "off")
    assert run(["run", "m.gguf", "Hi"]) == 0
    assert fake.SEEN["prompt"] == "Hi" and fake.SEEN["params"].ignore_eos
    assert "tokens/s" not in capsys.readouterr().err


def test_prompt_sources(fake, monkeypatch):
    def prompt_of(*arguments: str) -> str:
        assert run(["run", "--raw", *arguments]) == 0
        return fake.SEEN["prompt"]

    Path("p.txt").write_text("from a file\n")
    assert prompt_of("m.gguf", "argument") == "argument"
    assert prompt_of("-m", "m.gguf", "argument") == "argument"
    assert prompt_of("m.gguf", "-p", "flag") == "flag"
    assert prompt_of("m.gguf", "-f", "p.txt") == "from a file"
    for flags in ([], ["-f", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("vön stdin\n".encode())))
        assert prompt_of("m.gguf", *flags) == "vön stdin"


@pytest.mark.parametrize(
    "arguments, names",
    [
        (["--temp", "-1"], ["--temp"]),
        (["--temp", "nan"], ["temp"]),
        (["--top-p", "1.1"], ["--top-p"]),
        (["--min-p", "2"], ["--min-p"]),
        (["--top-k", "-1"], ["--top-k"]),
        (["-n", "0"], ["--predict"]),
        (["-c", "-1"], ["--ctx-size"]),
        (["-t", "0"], ["--threads"]),
        (["-t", "many"], ["--threads"]),
        (["--seed", "-2"], ["--seed"]),
        (["--output", "xml"], ["--output", "text or json"]),
        (["-ts", "3;1"], ["--tensor-split", "3,1"]),
        (["-ot", "ffn"], ["--override-tensor", "PATTERN=cpu"]),
        (["-ngl", "some"], ["--ngl", "auto"]),
        (["--stop", ""], ["stop"]),
        (["--frobnicate"], ["--frobnicate"]),
        (["-p", "again"], ["twice", "--prompt"]),
        (["-f", "absent.txt"], ["twice"]),
        (["--raw", "--system", "x"], ["--system", "--raw"]),
        (["-sysf", "absent.txt"], ["--system-prompt-file", "absent.txt"]),
        (["-sysf", "m.gguf", "-sys", "x"], ["--system-prompt-file", "twice"]),
    ],
)
def test_bad_flags_are_named(refused, arguments, names):
    message = refused("run", "m.gguf", "Hi", *arguments)
    assert all(name in message for name in names), message


def test_bad_environment_is_named(refused, monkeypatch):
    monkeypatch.setenv("EDGELLM_TOP_K", "few")
    assert "EDGELLM_TOP_K" in refused("run", "m.gguf", "Hi")


def test_bad_files_are_named(refused):
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("empty.txt").write_bytes(b"")
    Path("damaged.gguf").write_bytes(b"")
    assert "absent.txt" in refused("run", "m.gguf", "-f", "absent.txt")
    assert "latin.txt is not UTF-8 text (byte 3)" in refused("run", "m.gguf", "-f", "latin.txt")
    assert "empty.txt is empty" in refused("run", "m.gguf", "-f", "empty.txt")
    assert "damaged.gguf is cut short" in refused("run", "damaged.gguf", "Hi")
    assert "neither a file nor" in refused("run", "absent.gguf", "Hi")
    assert "named twice" in refused("run", "m.gguf", "Hi", "-m", "m.gguf")


def test_without_a_prompt_on_a_terminal(refused, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert "use -p TEXT" in refused("run", "m.gguf")
    assert "use -p TEXT" in refused("run", "Name three colours.")


def test_a_fault_of_our_own_keeps_its_traceback(fake, monkeypatch):
    def broken(*arguments):
        raise ValueError("a bug")
        yield

    monkeypatch.setattr(fake.LLM, "stream", broken)
    with pytest.raises(ValueError, match="a bug"):
        run(["run", "m.gguf", "Hi"])


def process(tmp_path, setup: str, *arguments: str, **options) -> subprocess.Popen:
    """The real command in a process of its own, with the fake engine set up by ``setup``."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    code = (
        f"import sys; sys.path.insert(0, {str(FAKE.parent)!r}); import fake_llm; "
        f"fake_llm.install(); {setup}; from edgellm.cli.main import main; main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def test_a_broken_pipe_ends_quietly(tmp_path):
    with process(tmp_path, "fake_llm.LLM.repeat = 100_000", "run", "m.gguf", "Hi") as running:
        assert running.stdout.read(3) == b"Red"
        running.stdout.close()
        assert running.stderr.read() == b"compiling kernels 1/2\n"
        assert running.wait(20) == 141


def test_ctrl_c_ends_with_130(tmp_path):
    with process(tmp_path, "fake_llm.LLM.pause = 0.5", "run", "m.gguf", "Hi") as running:
        assert running.stdout.read(3) == b"Red"  # each piece comes as soon as it is there
        start = time.monotonic()
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 130
        assert time.monotonic() - start < 10
        assert running.stderr.read() == b"compiling kernels 1/2\n"


def test_characters_the_terminal_lacks_do_no_harm(tmp_path):
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    setup = "fake_llm.ANSWER = ('caf\\u00e9',)"
    with process(tmp_path, setup, "run", "m.gguf", "Hi", env=env) as running:
        assert running.stdout.read() == b"caf?\n"
        assert running.wait(20) == 0


def test_types_of_keys_and_values_reach_the_engine(fake, refused, capsys, monkeypatch):
    assert run(["run", "m.gguf", "Hi"]) == 0 and fake.SEEN["types"] == ("f16", "f16")
    assert run(["run", "m.gguf", "Hi", "-ctk", "q8_0", "--cache-type-v", "q4_0"]) == 0
    assert fake.SEEN["types"] == ("q8_0", "q4_0")
    monkeypatch.setenv("EDGELLM_CACHE_TYPE_K", "f32")
    assert run(["run", "m.gguf", "Hi"]) == 0 and fake.SEEN["types"] == ("f32", "f16")
    capsys.readouterr()
    said = refused("run", "m.gguf", "Hi", "-ctv", "q5_1")
    assert "'q5_1' is none of f32, f16, q8_0, q4_0" in said and "-ctv" in said


def test_flags_that_go_before_the_file_reach_the_engine(fake, refused, capsys):
    flags = ["--rope-freq-base", "5e5", "--rope-scaling", "yarn", "--yarn-orig-ctx", "4096"]
    kv = ["--override-kv", "llama.context_length=int:99", "--override-kv", "a.b=bool:false"]
    assert run(["run", "m.gguf", "Hi", *flags, *kv]) == 0
    assert fake.SEEN["overrides"] == {
        "rope_freq_base": 5e5,
        "rope_scaling": "yarn",
        "yarn_orig_ctx": 4096,
        "kv_overrides": {"llama.context_length": 99, "a.b": False},
    }
    capsys.readouterr()
    assert "takes KEY=TYPE:VALUE" in refused("run", "m.gguf", "Hi", "--override-kv", "a=1")


def test_flags_of_offload_reach_the_engine(fake, monkeypatch):
    assert run(["run", "m.gguf", "Hi"]) == 0 and fake.SEEN["offload"] == Options()
    flags = ["-ngl", "20", "--fit-margin", "512", "-ot", r"ffn_(up|gate)=cpu,attn=cuda1",
             "-ot", "output=cuda0", "--n-cpu-moe", "3", "-nkvo", "-ts", "3,1",
             "--stream-layers", "on", "--strict-bits"]  # fmt: skip
    assert run(["run", "m.gguf", "Hi", *flags]) == 0
    assert fake.SEEN["offload"] == Options(
        20, 512 << 20, ((r"ffn_(up|gate)", "cpu"), ("attn", "cuda1"), ("output", "cuda0")), 3,
        False, (3.0, 1.0), "on", True,
    )  # fmt: skip
    monkeypatch.setenv("EDGELLM_N_GPU_LAYERS", "all")
    assert run(["run", "m.gguf", "Hi", "--cpu-moe"]) == 0
    assert fake.SEEN["offload"] == Options(ALL, n_cpu_moe=ALL)
