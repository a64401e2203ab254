"""edgellm inspect on a file made here; the kernel names come from a stand-in."""

import json
import sys
from types import ModuleType

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from edgellm.cli.main import run

N_EMBD, N_LAYERS, N_HEADS, N_KV_HEADS, N_VOCAB, N_FF = 64, 2, 4, 2, 96, 128
N_KV = N_KV_HEADS * N_EMBD // N_HEADS


def write_model(path, tensors: dict[str, tuple[int, ...]]) -> str:
    """A llama with these tensors, Q8_0 where they are matrices, all zero."""
    writer = GGUFWriter(path, "llama")
    writer.add_name("evil \x1b[2J name")
    writer.add_block_count(N_LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"t{i}" for i in range(N_VOCAB)])
    for name, shape in tensors.items():
        values = np.zeros(shape, np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            packed = quantize(values, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The names of kernels are not this command's business."""
    report = ModuleType("edgellm.kernels.cpu.report")
    report.kernel_for = lambda name: (f"linear_{name}", name == "q8_0")
    monkeypatch.setitem(sys.modules, "edgellm.kernels.cpu.report", report)
    monkeypatch.delenv("EDGELLM_CTX_SIZE", raising=False)


@pytest.fixture
def model(tmp_path):
    tensors = {"token_embd.weight": (N_VOCAB, N_EMBD), "output_norm.weight": (N_EMBD,)}
    for layer in range(N_LAYERS):
        shapes = {
            "attn_norm": (N_EMBD,),
            "attn_q": (N_EMBD, N_EMBD),
            "attn_k": (N_KV, N_EMBD),
            "attn_v": (N_KV, N_EMBD),
            "attn_output": (N_EMBD, N_EMBD),
            "ffn_norm": (N_EMBD,),
            "ffn_gate": (N_FF, N_EMBD),
            "ffn_up": (N_FF, N_EMBD),
            "ffn_down": (N_EMBD, N_FF),
        }
        tensors |= {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    return write_model(tmp_path / "tiny.gguf", tensors)


def test_json(model, capsys):
    assert run(["inspect", model, "--json", "-c", "100"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["metadata"]["general.architecture"] == "llama"
    tokens = facts["metadata"]["tokenizer.ggml.tokens"]
    assert tokens == {"length": N_VOCAB, "first": ["t0", "t1", "t2", "t3", "t4"]}
    q8, f32 = facts["types"]
    assert (q8["type"], q8["bits_per_weight"], q8["kernel"]) == ("q8_0", 8.5, "linear_q8_0")
    assert (q8["packed"], f32["packed"]) == (True, False)
    assert facts["tensors"][0]["shape"] == [N_EMBD, N_VOCAB]
    memory = facts["memory"]
    per_token = N_LAYERS * 2 * N_KV * 2
    assert memory["weights"] == sum(tensor["bytes"] for tensor in facts["tensors"])
    assert memory["kv_per_token"] == per_token
    assert memory["kv"] == 100 * per_token
    assert memory["total"] == memory["weights"] + 100 * per_token + memory["arena"]


def test_text(model, capsys):
    assert run(["inspect", "-m", model]) == 0
    out = capsys.readouterr().out
    for part in ("llama.block_count = 2", "(96 elements)", "q8_0", "8.5", "not packed", "64 x 96"):
        assert part in out
    assert "KV cache for 512 tokens" in out
    assert "\x1b" not in out


def test_a_file_that_cannot_be_run_is_shown_with_the_reason(tmp_path, capsys):
    path = write_model(tmp_path / "half.gguf", {"token_embd.weight": (N_VOCAB, N_EMBD)})
    assert run(["inspect", path]) == 0
    out = capsys.readouterr().out
    assert "cannot be run" in out and "blk.0.attn_norm.weight is missing" in out


def test_a_file_that_is_no_model_is_one_sentence(tmp_path, capsys):
    path = tmp_path / "notes.gguf"
    path.write_text("just text")
    assert run(["inspect", str(path)]) == 2
    err = capsys.readouterr().err
    assert "notes.gguf" in err and err.count("\n") == 1
