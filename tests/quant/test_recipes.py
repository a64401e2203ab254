"""Each matrix gets the type that llama.cpp's quantize gives it (recorded by record_recipes.py)."""

import json
import re
from pathlib import Path

import pytest

from edgellm.quant import by_name, recipes

DATA = json.loads((Path(__file__).parents[1] / "data" / "recipes.json").read_text())
SHAPES = {"token_embd.weight": (256, 9), "output.weight": (256, 9), "blk.0.attn_q.weight": (256, 9),
          "blk.0.attn_norm.weight": (256,), "blk.0.ffn_down.weight": (288, 9)}  # fmt: skip
FACTS = recipes.Facts(n_layers=1, n_gqa=1, n_experts=0)


@pytest.mark.parametrize("mix", recipes.MIXES)
@pytest.mark.parametrize("name", DATA["models"])
def test_as_llama_cpp(name: str, mix: str) -> None:
    model = DATA["models"][name]
    want = {
        tensor: DATA["letters"][letter]
        for tensor, letter in zip(model["shapes"], model["types"][mix], strict=True)
    }
    found = recipes.choose(model["shapes"], mix, recipes.Facts(*model["facts"]))
    unchanged = {t: "f32" if len(shape) == 1 else "f16" for t, shape in model["shapes"].items()}
    assert unchanged | {tensor: kind.name for tensor, kind in found.items()} == want


def names(mix: str, **wishes: object) -> dict[str, str]:
    found = recipes.choose(SHAPES, mix, FACTS, recipes.Wishes(**wishes))  # type: ignore[arg-type]
    return {name.removesuffix(".weight").rpartition(".")[2]: k.name for name, k in found.items()}


def test_wishes() -> None:
    plain = {"token_embd": "q4_k", "output": "q6_k", "attn_q": "q4_k", "ffn_down": "q8_0"}
    assert names("Q4_K_M") == plain
    assert names("Q4_K_M", pure=True) == dict.fromkeys(plain, "q4_k") | {"ffn_down": "q5_0"}
    assert names("Q4_K_M", output=by_name("q8_0"))["output"] == "q8_0"
    assert names("Q4_K_M", embedding=by_name("f16"))["token_embd"] == "f16"
    assert "output" not in names("Q4_K_M", leave_output=True)
    patterns = [(re.compile("attn|ffn"), by_name("q8_0")), (re.compile("ffn"), by_name("q6_k"))]
    assert names("Q4_K_M", by_pattern=patterns) == plain | {"attn_q": "q8_0", "ffn_down": "q8_0"}
    assert names("Q2_K", pure=True)["ffn_down"] == "q4_0"


@pytest.mark.parametrize(
    ("asked", "mix"),
    [("q4_k_m", "Q4_K_M"), ("Q4_K", "Q4_K_M"), ("mxfp4", "MXFP4_MOE"), ("Q9", None)],
)
def test_names(asked: str, mix: str | None) -> None:
    assert recipes.mix_of(asked) == mix
