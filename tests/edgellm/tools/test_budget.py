"""Thoughts end when their tokens are used up."""

from dataclasses import replace

import numpy as np
import pytest

from edgellm import LLM
from edgellm.errors import EdgeLLMError
from edgellm.sampling import Sampler
from edgellm.sampling_params import SamplingParams
from edgellm.tokenizer import BYTE_OF_LETTER, Tokenizer
from edgellm.tools import BY_NAME
from edgellm.tools.budget import ReasoningBudget

HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from gguf import GGUFWriter

    path = tmp_path_factory.mktemp("vocabulary") / "bytes.gguf"
    writer = GGUFWriter(str(path), "llama")
    texts = [*BYTE_OF_LETTER, "[THINK]", "[/THINK]", *HARMONY]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(texts)
    writer.add_token_types([1] * 256 + [3] * (len(texts) - 256))
    writer.add_token_merges([])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Tokenizer.from_gguf(path)


def write(tokenizer, budget, wanted, n):
    """What comes when the model would write ``wanted`` for ever, a token that is forced instead of
    it taking nothing away."""
    sampler = Sampler(SamplingParams(temperature=0), 0, budget=budget)
    left = tokenizer.encode(wanted, parse_special=True)
    tokens = []
    for _ in range(n):
        logits = np.zeros(tokenizer.n_vocab, np.float32)
        logits[left[0]] = 1
        token = sampler.draw(logits, tokens)
        sampler.accept(token)
        tokens.append(token)
        if token == left[0]:
            left = left[1:] or left
    return tokenizer.decode(tokens, special=True)


@pytest.mark.parametrize(
    "limit, prompt, text, expected",
    [
        (3, "<think>", "abcdefgh", "abc</think>defgh"),
        (0, "<think>\n", "abc", "</think>abc"),
        (-1, "<think>", "abcdefgh", "abcdefgh"),
        (10, "<think>", "ab</think>cdefghi", "ab</think>cdefghi"),
        (2, "", "<think>abcd", "<think>ab</think>cd"),
        (0, "", "<think>ab", "<think></think>ab"),
        (1, "", "abc<think>de", "abc<think>de"),
        (2, "", "[THINK]abcd", "[THINK]ab[/THINK]cd"),
    ],
)
def test_budget(tokenizer, limit, prompt, text, expected):
    budget = ReasoningBudget(limit, BY_NAME["hermes"], tokenizer, prompt)
    n = len(tokenizer.encode(expected, parse_special=True))
    assert write(tokenizer, budget, text, n) == expected


def test_harmony_goes_on_to_another_message_and_then_to_the_answer(tokenizer):
    budget = ReasoningBudget(2, BY_NAME["harmony"], tokenizer)
    begin = "<|channel|>analysis<|message|>"
    text = f"{begin}abc{begin}de"
    expected = (
        f"{begin}ab<|end|><|start|>assistantc"  # a header must not begin so; what follows is text
    )
    n = len(tokenizer.encode(expected, parse_special=True))
    assert write(tokenizer, budget, text, n) == expected
    again = ReasoningBudget(2, BY_NAME["harmony"], tokenizer)
    text, end = f"{begin}ab{begin}de", "<|end|><|start|>assistant"
    expected = f"{begin}ab{end}{begin}{end}<|channel|>final<|message|>de"
    n = len(tokenizer.encode(expected, parse_special=True))
    assert write(tokenizer, again, text, n) == expected


def test_limits(tokenizer):
    for limit in (-2, 1.5, True, "3"):
        with pytest.raises(EdgeLLMError, match="reasoning_budget"):
            ReasoningBudget(limit, BY_NAME["hermes"], tokenizer)


def test_a_model_keeps_to_it(tiny_model):
    with LLM(tiny_model("llama", n_ctx=512), n_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=30, reasoning_budget=4, ignore_eos=True)
        free = llm.generate("hm<think>", replace(params, reasoning_budget=-1)).text
        held = llm.generate("hm<think>", params).text
        assert "</think>" not in free and held.index("</think>") <= 4
        assert llm.generate("hm", params).text.count("</think>") == 0
        # a form that has no place for a thought wins over the budget
        form = replace(params, regex="[a-c]{20}", ignore_eos=False)
        assert len(llm.generate("hm<think>", form).text) == 20
    with pytest.raises(EdgeLLMError, match="reasoning_budget"):
        SamplingParams(reasoning_budget=-2)
