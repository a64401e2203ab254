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


@pytest.fixture
def model(tmp_path, monkeypatch):
    kernels = ModuleType("edgellm.kernels.cpu.report")
    kernels.kernel_for = lambda name: (f"linear_{name}", name == "q8_0")
    monkeypatch.setitem(sys.modules, "edgellm.kernels.cpu.report", kernels)
    monkeypatch.delenv("EDGELLM_CTX_SIZE", raising=False)
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_name("evil \x1b[2J name")
    writer.add_block_count(N_LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_token_list([f"t{i}" for i in range(N_VOCAB)])
    table = np.zeros((N_VOCAB, N_EMBD), np.float32)
    packed = quantize(table, GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(N_EMBD, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_json(model, capsys):
    assert run(["inspect", model, "--json", "-c", "100"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["metadata"]["general.architecture"] == "llama"
    tokens = facts["metadata"]["tokenizer.ggml.tokens"]
    assert tokens == {"length": N_VOCAB, "first": ["t0", "t1", "t2", "t3", "t4"]}
    q8, f32 = facts["types"]
    assert (q8["type"], q8["bits_per_weight"], q8["kernel"]) == ("q8_0", 8.5, "linear_q8_0")
    assert (q8["packed"], f32["packed"]) == (True, False)
    assert [t["shape"] for t in facts["tensors"]] == [[N_EMBD, N_VOCAB], [N_EMBD]]
    memory = facts["memory"]
    weights = N_VOCAB * N_EMBD * 34 // 32 + N_EMBD * 4
    per_token = N_LAYERS * N_KV_HEADS * 2 * (N_EMBD // N_HEADS) * 2
    assert memory["weights"] == weights
    assert memory["kv_per_token"] == per_token
    assert memory["kv"] == 100 * per_token
    assert memory["total"] == weights + 100 * per_token + memory["arena"]


def test_text(model, capsys, monkeypatch):
    assert run(["inspect", "-m", model]) == 0
    out = capsys.readouterr().out
    for part in ("llama.block_count = 2", "(96 elements)", "q8_0", "8.5", "not packed", "64 x 96"):
        assert part in out
    assert "KV cache for 512 tokens" in out
    assert "\x1b" not in out


def test_a_file_that_is_no_model_is_one_sentence(tmp_path, capsys):
    path = tmp_path / "notes.gguf"
    path.write_text("just text")
    assert run(["inspect", str(path)]) == 2
    err = capsys.readouterr().err
    assert "notes.gguf" in err and err.count("\n") == 1
