"""`edgellm convert`: what comes out computes and tokenizes as what went in."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from loaded import loader
from tokenizers import Tokenizer as HFTokenizer

from edgellm import LLM
from edgellm.cli.main import run
from edgellm.convert.architectures import TABLE, row_of
from edgellm.convert.errors import ConvertError
from edgellm.convert.model import convert_model
from edgellm.kernels import reference
from edgellm.models import build_graph
from edgellm.quant.gguf import GGUF, GGUFError
from edgellm.tokenizer import Tokenizer

from . import bert, directories, families, forward

FAMILIES = list(directories.CONFIGS)


def reference_logits(path: Path, tokens: Any, n_ctx: int) -> Any:
    """By the specification, from the file's own weights."""
    with GGUF(path) as file:
        if n_ctx:
            file.override({f"{file.architecture}.context_length": n_ctx})
        _, graph = build_graph(file)
        load = loader(file)
        return reference.run(graph, tokens, load, n_ctx or None)


def nmse(found: Any, expected: Any) -> float:
    return float(np.sum((found - expected) ** 2) / np.sum(expected**2))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_a_forward_of_the_original_weights(
    tmp_path: Path, family: str, dtype: str
) -> None:
    weights = directories.write(tmp_path / "hf", family, dtype=dtype, shards=1 + (dtype == "F16"))
    outtype = {"F32": "f32", "F16": "auto", "BF16": "auto"}[dtype]
    path = convert_model(tmp_path / "hf", tmp_path / "out.gguf", outtype=outtype)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    tokens = np.random.default_rng(3).integers(0, 300, 100)
    expected = forward.logits(family, config, weights, tokens)
    n_ctx = 100 if family == "phi3" else 0  # LongRoPE: short factors, as for a text of 100 tokens
    # rounding to float32 alone: 1e-12, and 1e-8 in Gemma, whose rows grow large
    assert nmse(reference_logits(path, tokens, n_ctx), expected) < 1e-7
    if dtype == "F32":
        with LLM(path, n_threads=1, n_ctx=112) as llm:
            assert nmse(llm.logits(tokens.tolist()), expected) < 1e-3


@pytest.mark.parametrize("name", families.FAMILIES)
def test_logits_of_other_architectures(tmp_path: Path, name: str) -> None:
    family = families.FAMILIES[name]
    n_vocab = directories.byte_level(tmp_path, directories.QWEN2)
    (tmp_path / "config.json").write_text(json.dumps(family.config))
    weights = directories.save_weights(tmp_path, families.random_weights(family, n_vocab), "F32")
    path = convert_model(tmp_path, outtype="f32")
    tokens = np.random.default_rng(5).integers(0, 300, 60)
    expected = families.logits(family, weights, tokens)
    assert nmse(reference_logits(path, tokens, 0), expected) < 1e-7


def test_models_that_see_are_those_of_their_text_model() -> None:
    seeing = {"architectures": ["Mistral3ForConditionalGeneration"]}
    for kind, name in (("mistral", "llama"), ("ministral3", "mistral3")):
        row = row_of({**seeing, "text_config": {"model_type": kind}})
        assert row is not None and row.name == name
    assert row_of({**seeing, "text_config": {"model_type": "x"}}) is None
    assert row_of({"architectures": [["LlamaForCausalLM"]]}) is None


def test_layers_behind_the_last_are_left_out_only_as_drafts(tmp_path: Path) -> None:
    family = families.FAMILIES["glm4moe"]
    n_vocab = directories.byte_level(tmp_path, directories.QWEN2)
    weights = families.random_weights(family, n_vocab)
    weights["model.layers.3.input_layernorm.weight"] = np.ones(64, np.float32)
    directories.save_weights(tmp_path, weights, "F32")
    (tmp_path / "config.json").write_text(json.dumps(family.config))
    with pytest.raises(ConvertError, match=r"layers\.3\.input_layernorm\.weight is not known"):
        convert_model(tmp_path)
    edit(tmp_path / "config.json", num_nextn_predict_layers=1)
    with GGUF(convert_model(tmp_path)) as file:
        assert not any(name.startswith("blk.3.") for name in file.tensors)


def test_an_encoder_makes_the_original_embeddings(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    weights, original = bert.write(folder)
    path = convert_model(folder, tmp_path / "out.gguf", outtype="f32")
    ours = Tokenizer.from_gguf(path)
    for text in directories.SAMPLES:
        assert ours.encode(text, add_special=True) == original.encode(text).ids, text
    tokens = original.encode(directories.TEXT).ids
    expected = bert.embedding(weights, tokens)
    with LLM(path, n_threads=1) as llm:
        assert np.abs(llm.embed([directories.TEXT])[0] - expected).max() < 1e-3


def test_every_architecture_of_the_table_is_compared() -> None:
    configs = [*directories.CONFIGS.values(), *(f.config for f in families.FAMILIES.values())]
    others = {"Gemma3ForCausalLM", "BertModel"}
    assert {config["architectures"][0] for config in configs} | others == set(TABLE)


def test_long_texts_take_the_long_factors(tmp_path: Path) -> None:
    weights = directories.write(tmp_path / "hf", "phi3")
    path = convert_model(tmp_path / "hf", tmp_path / "out.gguf", outtype="f32")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    tokens = np.random.default_rng(4).integers(0, 300, 200)
    expected = forward.logits("phi3", config, weights, tokens)
    assert nmse(reference_logits(path, tokens, 0), expected) < 1e-10


def test_q8_0_equals_quantizing_by_the_gguf_package(tmp_path: Path) -> None:
    weights = directories.write(tmp_path / "hf", "qwen2")
    path = convert_model(tmp_path / "hf", outtype="q8_0")
    assert path == tmp_path / "hf/hf-Q8_0.gguf"
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, original in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
        ("blk.2.attn_v.weight", "model.layers.2.self_attn.v_proj.weight"),
    ):
        assert tensors[name].tensor_type == kind
        expected = gguf.quants.quantize(weights[original], kind)
        assert np.array_equal(tensors[name].data.reshape(-1), expected.reshape(-1))
    assert tensors["blk.0.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_byte_pairs_are_those_of_the_tokenizers_package(tmp_path: Path, family: str) -> None:
    directories.write(tmp_path, family)
    path = convert_model(tmp_path)
    original = HFTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_gguf(path)
    for text in directories.SAMPLES:
        expected = original.encode(text).ids
        assert ours.encode(text, add_special=True, parse_special=True) == expected, text
        assert ours.decode(expected[1:], special=True) == text
    with GGUF(path) as file:
        assert file.string("tokenizer.ggml.pre") == {"llama": "llama-bpe"}.get(family, family)
        assert file.integer("tokenizer.ggml.bos_token_id") == original.token_to_id("<|begin|>")
        assert file.integer("tokenizer.ggml.eos_token_id") == original.token_to_id("<|end|>")
        assert file.integer("tokenizer.ggml.eot_token_id") == original.token_to_id("</tool>")
        assert file.string("tokenizer.chat_template") == "{{ messages }}"
        assert file.strings("tokenizer.chat_templates") == [b"tool_use"]
        assert file.string("tokenizer.chat_template.tool_use") == "{{ tools }}"
        assert len(file.strings("tokenizer.ggml.tokens")) == original.get_vocab_size() + 3


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_pieces_are_those_of_the_sentencepiece_package(tmp_path: Path, kind: str) -> None:
    directories.write(tmp_path, "mistral")
    directories.sentencepiece_model(tmp_path, kind, 335)
    path = convert_model(tmp_path)
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = Tokenizer.from_gguf(path)
    for text in directories.SAMPLES:
        if "<|end|>" in text or "<tool>" in text:
            continue  # added tokens are cut out beforehand; the library has none
        assert ours.encode(text) == original.encode(text), text
    assert ours.bos == 1 and ours.add_bos
    end = original.get_piece_size()
    assert ours.encode("a<|end|>", parse_special=True)[-1] == end
    assert ours.is_special(end)
    with GGUF(path) as file:
        assert file.string("tokenizer.chat_template") == "{{ messages[0].content }}"


def test_tokenizer_json_with_marked_spaces_equals_the_package(tmp_path: Path) -> None:
    """As Llama 2 and Gemma come without a tokenizer.model."""
    from tokenizers import decoders, models, normalizers, trainers

    directories.write(tmp_path, "mistral")
    (tmp_path / "tokenizer.model").unlink()
    tokenizer = HFTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([directories.TEXT] * 3, trainer)
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = definition["added_tokens"][:3]  # the trainer's way to add bytes
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    original = HFTokenizer.from_str(json.dumps(definition))
    ours = Tokenizer.from_gguf(convert_model(tmp_path))
    for text in directories.SAMPLES:
        if text:
            assert ours.encode(text) == original.encode(text, add_special_tokens=False).ids, text


# ---- refusals -----------------------------------------------------------------------------------


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"architectures": ["MambaForCausalLM"]}, r"MambaForCausalLM.*supported: Bert"),
        ("llama", {"hidden_size": None}, r"config.json: hidden_size is missing"),
        ("llama", {"hidden_size": "x"}, r"hidden_size is 'x'; a whole number"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, r"is quantized \(gptq\)"),
        ("llama", {"rope_scaling": {"rope_type": "odd"}}, r"rope_scaling is of type 'odd'"),
        ("gemma3", {"text_config": {**directories.CONFIGS["gemma3"]["text_config"],
                                    "query_pre_attn_scalar": 7}}, r"query_pre_attn_scalar is 7"),
        ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [1], "short_factor": [1]}},
         r"long_factor of 8 positive numbers"),
        ("phi3", {"original_max_position_embeddings": 1}, r"embeddings 1; needed: 2 to 16777216"),
        ("phi3", {"original_max_position_embeddings": math.nan}, r"nan; a positive number"),
        ("llama", {"rope_theta": -1}, r"rope_theta is -1.0; a positive number is needed"),
        ("llama", {"rope_theta": 10**400}, r"rope_theta is 10+; a number is needed"),
        ("llama", {"rope_scaling": {"rope_theta": "x"}}, r"rope_theta is 'x'; a positive number"),
        ("llama", {"rope_scaling": {**directories.CONFIGS["llama"]["rope_scaling"],
                                    "high_freq_factor": 1.0}}, r"no high_freq_factor above"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": math.inf}}, r"has factor inf"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 10**400}}, r"has factor 10+; a posi"),
        ("qwen2", {"partial_rotary_factor": 1e308}, r"partial_rotary_factor is 1e\+308"),
        ("qwen2", {"partial_rotary_factor": 1.5}, r"is 1.5; needed: above 0, at most 1"),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act is 'gelu'; .* supported with 'silu' only"),
        ("gemma3", {"layer_types": ["odd"] * 7}, r"layer_types must name the kind of each of 7"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_named(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    directories.write(tmp_path, family)
    edit(tmp_path / "config.json", **fields)
    with pytest.raises(ConvertError, match=message):
        convert_model(tmp_path)
    assert not list(tmp_path.glob("*.gguf*"))


def test_an_unknown_pre_tokenizer_is_refused_with_its_expression(tmp_path: Path) -> None:
    directories.write(tmp_path, "qwen2")
    directories.byte_level(tmp_path, r"\w+|\W")
    with pytest.raises(ConvertError, match=r"pre-tokenizer has no name in GGUF: \\w\+\|\\W"):
        convert_model(tmp_path)


def test_damaged_and_missing_files_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directories.write(tmp_path / "a", "qwen2")
    weights = tmp_path / "a/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert run(["convert", str(tmp_path / "a")]) == 2
    assert "model.safetensors: cannot be read as safetensors" in capsys.readouterr().err
    weights.unlink()
    assert run(["convert", str(tmp_path / "a")]) == 2
    assert "has no model.safetensors and no model.safetensors.index" in capsys.readouterr().err
    (tmp_path / "a/config.json").write_text("{")
    directories.save_weights(tmp_path / "a", {"x": np.zeros((2, 2), np.float32)}, "F32")
    assert run(["convert", str(tmp_path / "a")]) == 2
    assert "config.json: is no JSON" in capsys.readouterr().err
    assert run(["convert", str(tmp_path / "nowhere")]) == 2
    assert "is no directory" in capsys.readouterr().err
    assert run(["convert", str(tmp_path / "a"), "--outtype", "q9"]) == 2
    assert "must be one of auto, f32, f16, bf16, q8_0" in capsys.readouterr().err


def test_tensors_without_a_name_and_numbers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    weights = directories.write(tmp_path, "qwen2")
    directories.save_weights(tmp_path, {**weights, "model.odd.weight": np.zeros((4, 4))}, "F32")
    with pytest.raises(ConvertError, match=r"tensor model\.odd\.weight is not known of qwen2"):
        convert_model(tmp_path)
    for dtype in ("F32", "F16", "BF16"):  # rows of the same type are copied
        weights["model.embed_tokens.weight"][3, 3] = np.nan
        directories.save_weights(tmp_path, weights, dtype)
        with pytest.raises(
            ConvertError, match=r"embed_tokens\.weight has numbers that are not fin"
        ):
            convert_model(tmp_path, outtype=dtype.lower())
    weights["model.embed_tokens.weight"][3, 3] = 70000
    directories.save_weights(tmp_path, weights, "F32")
    with pytest.raises(ConvertError, match=r"embed_tokens\.weight: F16 cannot hold 70000"):
        convert_model(tmp_path)
    assert not list(tmp_path.glob("*.gguf*"))
    convert_model(tmp_path, outtype="bf16")


def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directories.write(tmp_path, "qwen2")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert run(["convert", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "needs the package safetensors: pip install 'edgellm[convert]'" in said


def test_vocabularies_larger_than_the_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Gemma 3's tokenizer has a token for pictures, for which models of text have no row."""
    directories.write(tmp_path, "mistral")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"]["5000"] = {"content": "<image>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with GGUF(convert_model(tmp_path)) as file:
        tokens = file.strings("tokenizer.ggml.tokens")
        assert len(tokens) == file.tensors["token_embd.weight"].rows and b"<image>" not in tokens
    assert "the model has no row for token '<image>'" in caplog.text
    directories.sentencepiece_model(tmp_path, n=350)
    with pytest.raises(ConvertError, match="has 350 tokens, the model only 344 rows"):
        convert_model(tmp_path, force=True)


@pytest.mark.parametrize(
    ("setting", "file", "expected"),
    [("config", None, "config"), ("config", "file", "file"), (None, "file", "file")],
)
def test_templates_in_files_go_before_those_of_the_configuration(
    tmp_path: Path, setting: str | None, file: str | None, expected: str
) -> None:
    directories.write(tmp_path, "qwen2")
    edit(tmp_path / "tokenizer_config.json", chat_template=setting)
    if file is not None:
        (tmp_path / "chat_template.jinja").write_text(file)
    with GGUF(convert_model(tmp_path)) as made:
        assert made.string("tokenizer.chat_template") == expected


def test_a_space_is_put_before_texts_as_the_configuration_says(tmp_path: Path) -> None:
    directories.write(tmp_path, "mistral")
    edit(tmp_path / "tokenizer_config.json", add_prefix_space=False)
    ours = Tokenizer.from_gguf(convert_model(tmp_path))
    assert ours.decode(ours.encode("The fox")) == "The fox"
    with_space = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert ours.encode(" The fox") == with_space.encode("The fox") != ours.encode("The fox")


def test_ends_that_only_config_json_has(tmp_path: Path) -> None:
    directories.write(tmp_path, "qwen2")
    (tmp_path / "generation_config.json").unlink()
    original = HFTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ends = [original.token_to_id(text) for text in ("<|end|>", "</tool>")]
    edit(tmp_path / "config.json", eos_token_id=ends)
    assert Tokenizer.from_gguf(convert_model(tmp_path)).eog == set(ends)


def test_what_no_layer_reads_is_refused(tmp_path: Path) -> None:
    """A bias of a norm without one has a name in GGUF, but models would compute without it."""
    weights = directories.write(tmp_path, "qwen2")
    weights["model.norm.bias"] = np.ones(64, np.float32)
    directories.save_weights(tmp_path, weights, "F32")
    with pytest.raises(ConvertError, match=r"output_norm\.bias is not read by qwen2 models"):
        convert_model(tmp_path)
    assert not list(tmp_path.glob("*.gguf*"))


def test_files_of_the_model_are_not_replaced(tmp_path: Path) -> None:
    directories.write(tmp_path, "qwen2")
    for name in ("model.safetensors", "config.json"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(GGUFError, match="is what is read; write to another name"):
            convert_model(tmp_path, tmp_path / name, force=True)
        assert (tmp_path / name).read_bytes() == before


def test_pieces_that_users_defined_stand_with_spaces(tmp_path: Path) -> None:
    """As Gemma's runs of spaces: they are looked for before the spaces of a text are marked."""
    directories.write(tmp_path, "gemma3")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([directories.TEXT] * 3), model_writer=model, vocab_size=330,
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, hard_vocab_limit=False, minloglevel=2,
        user_defined_symbols=["▁▁", "▁▁▁"], add_dummy_prefix=False,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    original = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    path = convert_model(tmp_path)
    ours = Tokenizer.from_gguf(path)
    for text in ("  The quick", "a   quick    fox", "     ", "x  "):
        assert ours.encode(text) == original.encode(text), text
    with GGUF(path) as file:
        assert file.strings("tokenizer.ggml.tokens")[original.piece_to_id("▁▁")] == b"  "


def test_an_existing_file_is_kept_without_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directories.write(tmp_path / "hf", "qwen2")
    out = tmp_path / "out.gguf"
    out.write_text("mine")
    assert run(["convert", str(tmp_path / "hf"), str(out)]) == 2
    assert "exists; use --force" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert run(["convert", str(tmp_path / "hf"), str(out), "--force"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    with GGUF(out) as file:
        assert file.architecture == "qwen2"
