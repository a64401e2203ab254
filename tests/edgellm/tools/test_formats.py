"""Which format a chat template gives away."""

import os
from pathlib import Path

import pytest

from edgellm.template_source import built_in, choose
from edgellm.tools import detect

ROOT = Path(os.environ.get("EDGELLM_VECTORS", "")) / "vectors" / "chat" / "templates"
EXPECTED = {
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "ibm-granite-granite-4.0": "hermes",
    "Qwen3-Coder": "qwen-xml",
    "Qwen3.5-4B": "qwen-xml",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen-xml",
    "meta-llama-Llama-3.1-8B-Instruct": "llama-json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama-json",
    "meta-llama-Llama-3.3-70B-Instruct": "llama-json",
    "openai-gpt-oss-120b": "harmony",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
    "GLM-4.6": "glm",
    "GLM-4.7-Flash": "glm",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek",
    "deepseek-ai-DeepSeek-V3.1": "deepseek",
    "deepseek-ai-DeepSeek-V3.2": "deepseek-dsml",
    "deepseek-ai-DeepSeek-V4": "deepseek-dsml",
    "LFM2-8B-A1B": "lfm2",
    "Cohere2MoE": "cohere",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "cohere",
    "Kimi-K2-Thinking": "kimi",
    "moonshotai-Kimi-K2": "kimi",
    "Kimi-K3": "kimi-k3",
    "google-gemma-4-31B-it": "gemma4",
    "MiniMax-M2": "minimax",
    "ByteDance-Seed-OSS": "seed",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "unsloth-Apriel-1.5": "apriel",
    "meetkai-functionary-medium-v3.1": "functionary",
    # formats that are not in the table: no calls rather than wrong ones
    "MiniMax-M3": "plain",
    "Apertus-8B-Instruct": "plain",
    "google-gemma-2-2b-it": "plain",
    "microsoft-Phi-3.5-mini-instruct": "plain",
}


@pytest.mark.skipif(not ROOT.is_dir(), reason="EDGELLM_VECTORS is not set")
@pytest.mark.parametrize("name", EXPECTED)
def test_a_template_gives_its_format_away(name):
    source = (ROOT / f"{name}.jinja").read_text(encoding="utf-8")
    assert detect(source).name == EXPECTED[name]


def test_llama_4_writes_python():
    assert detect("... [func_name1(params_name1=params_value1)] ...").name == "pythonic"


@pytest.mark.parametrize("name", sorted(built_in()))
def test_our_own_templates_know_no_tools(name):
    found = choose({}, name)
    assert found is not None and detect(found.text).name in ("plain", "mistral")
