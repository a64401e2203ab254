"""Plans by numbers: worked examples, floors, and what a loaded model makes of them."""

from __future__ import annotations

from pathlib import Path

import architectures
import pytest
import tiny

from edgellm.forecast import Forecast, fit_prompt_curve
from edgellm.gpus import open_gpus
from edgellm.kernels.cuda.emulated import EmulatedDevice
from edgellm.kernels.graph import Graph, Weight
from edgellm.memory import kv_row_bytes
from edgellm.offload import CPU, cpu_only
from edgellm.plan import Planner
from edgellm.quant import by_name
from edgellm.quant.gguf import GGUFError
from edgellm.speeds import Speed, Speeds, measure

SPEEDS = Speeds({CPU: Speed(20e9, 200e9), "cuda0": Speed(400e9, 50e12, 20e9, 10e-6)})


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((32, 32, 128, 2), 512 << 10), ((32, 4, 128, 2), 64 << 10), ((40, 40, 128, 2), 819_200)],
)
def test_bytes_of_keys_and_values(shape: tuple[int, int, int, int], expected: int) -> None:
    n_layers, n_kv_heads, head_dim, _ = shape
    g = Graph()
    x = g.embed(Weight("token_embd.weight", by_name("f16"), (head_dim * n_kv_heads, 8)))
    for g.layer in range(n_layers):
        x = g.attention(x, x, x, n_heads=n_kv_heads, n_kv_heads=n_kv_heads, scale=1.0)
    ops = [op for op in g.ops if op.kind == "attention"]
    assert sum(kv_row_bytes(op, "f16", "f16") for op in ops) == expected
    assert round(819_200 / 2**20, 2) == 0.78


def model_of(n_layers: int, n: int) -> Graph:
    """Layers of one q8_0 matrix and attention."""
    g = Graph()
    x = g.embed(Weight("token_embd.weight", by_name("q8_0"), (n, 64)))
    for g.layer in range(n_layers):
        y = g.linear(x, Weight(f"blk.{g.layer}.attn_output.weight", by_name("q8_0"), (n, n)))
        x = g.attention(y, y, y, n_heads=n // 64, n_kv_heads=n // 64, scale=1.0)
    g.layer = None
    g.linear(g.select(x), Weight("output.weight", by_name("q8_0"), (n, 64)))
    return g


def test_a_token_costs_the_weights_over_the_bandwidth() -> None:
    graph = model_of(4, 1024)
    weights = (4 * 1024 + 64) * 1024 // 32 * 34
    forecast = Forecast(graph, cpu_only(4), "f16", "f16", SPEEDS)
    row = 4 * 2 * 2 * 1024  # bytes of a token's keys and values
    assert forecast.step_seconds(1, 0) == pytest.approx((weights + row) / 20e9)
    assert forecast.step_seconds(3, 999) == pytest.approx((weights + 3 * 1000 * row) / 20e9)
    assert forecast.tokens_per_second(3, 999) == pytest.approx(3 / forecast.step_seconds(3, 999))


def test_layers_on_a_gpu_cost_its_bandwidth_and_two_hops() -> None:
    graph, plan = model_of(4, 1024), cpu_only(4)
    plan.places = [CPU, CPU, "cuda0", "cuda0", "cuda0"]
    one, out, row = 1024 * 1024 // 32 * 34, 64 * 1024 // 32 * 34, 4 * 1024
    forecast = Forecast(graph, plan, "f16", "f16", SPEEDS)
    cpu, gpu = 2 * (one + row) / 20e9, (2 * (one + row) + out) / 400e9
    copies = 4 * (1024 + 64) / 20e9 + 2 * 10e-6
    assert forecast.step_seconds() == pytest.approx(cpu + gpu + copies)


def test_streamed_layers_cost_their_copies_once_a_step() -> None:
    graph, plan = model_of(4, 1024), cpu_only(4)
    plan.places = ["cuda0"] * 5
    plan.streamed = {f"blk.{i}.attn_output.weight" for i in range(3)}
    one, row = 1024 * 1024 // 32 * 34, 4 * (1024 + 64)
    forecast = Forecast(graph, plan, "f16", "f16", SPEEDS)
    step = 3 * one / 20e9 + row / 20e9 + 2 * 10e-6
    assert forecast.step_seconds() == pytest.approx(step)
    crossing = 512 * row / 20e9 + 2 * 2 * 10e-6  # two steps
    assert forecast.first_token_seconds(512) == pytest.approx(2 * 3 * one / 20e9 + crossing)
    assert forecast.request_seconds() == pytest.approx(
        forecast.first_token_seconds(512) + 128 * forecast.step_seconds(1, 512)
    )


def test_lines_with_and_without_streaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = architectures.write(
        tmp_path / "m.gguf", "llama", block_count=8, feed_forward_length=1024
    )
    monkeypatch.setenv("EDGELLM_DEVICE", "emulated:1G")
    (whole,) = Planner(path, speeds=SPEEDS).lines([9], [128], ("f16",))
    total = whole.gpu_bytes["cuda0"] - whole.bill["cuda0 weights"] // 2 >> 10
    monkeypatch.setenv("EDGELLM_DEVICE", f"emulated:{total}K")
    planner = Planner(path, fit_margin=0, speeds=SPEEDS)
    lines = planner.lines([9], [128], ("f16",))
    assert [line.n_streamed > 2 for line in lines] == [False, True]
    cpu, streamed = lines
    assert streamed.n_gpu_layers > cpu.n_gpu_layers and streamed.bill["cuda0 copies"] > 0
    assert sum(streamed.gpu_bytes.values()) <= total << 10
    planner.close()


def test_a_prompt_grows_faster_than_its_length() -> None:
    forecast = Forecast(model_of(8, 512), cpu_only(8), "f16", "f16", SPEEDS)
    times = [forecast.first_token_seconds(n) for n in (1000, 2000, 4000)]
    assert times[1] > 2 * times[0] and times[2] > 2 * times[1]
    a, b = fit_prompt_curve([1000, 2000], times[:2])
    assert a * 4000 + b * 4000**2 == pytest.approx(times[2], rel=0.01)
    assert fit_prompt_curve([10, 20], [1.0, 1.5])[1] == 0.0  # never negative


def test_lines_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = architectures.write(tmp_path / "m.gguf", "qwen3moe")
    monkeypatch.setenv("EDGELLM_DEVICE", "emulated:1G")
    planner = Planner(path, users=2, speeds=SPEEDS)
    lines = planner.lines(contexts=[128, 512], types=("f16",))
    assert [(x.n_gpu_layers, x.n_ctx) for x in lines] == [
        (0, 128), (1, 128), (3, 128), (0, 512), (1, 512), (3, 512),
    ]  # fmt: skip
    assert all(x.fits for x in lines)
    none, _, whole = lines[3:]
    assert none.gpu_bytes == {} and whole.gpu_bytes["cuda0"] > 2 * 512 * 2 * 32 * 2
    assert whole.cpu_bytes < none.cpu_bytes
    assert whole.all_tokens_per_second == pytest.approx(2 * whole.tokens_per_second)
    best = planner.best(lines)
    assert best is not None and best.n_ctx == 512
    assert planner.best([]) is None
    assert {"weights", "keys and values", "rows", "margin", "cuda0 rows"} <= set(whole.bill)
    planner.close()


def test_the_plan_and_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulator: None
) -> None:
    path = tiny.build(tmp_path / "m.gguf")
    monkeypatch.setenv("EDGELLM_DEVICE", "emulated:256M")
    devices, _ = open_gpus()
    speeds = measure(devices, 1)
    monkeypatch.setattr("edgellm.placement.open_gpus", lambda: (devices, ""))
    planner = Planner(path, speeds=speeds, devices=devices)
    assert all(x > 0 for x in (speeds["cuda0"].read, speeds["cuda0"].dots, speeds["cuda0"].copy))
    (line,) = planner.lines([3], [512], ("f16",))
    rows = {row["what"]: row for row in planner.check(line)}
    assert rows["bytes of cuda0"]["planned"] == line.gpu_bytes["cuda0"]
    assert 0.9 <= rows["bytes of cuda0"]["ratio"] <= 1.0
    assert rows["tokens/s of one user"]["measured"] > 0
    planner.close()


def test_what_auto_chose_is_what_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulator: None
) -> None:
    """The output matrix and some layers are not the last layers of a number; and no cache shrinks
    that the plan has counted for each user."""
    path = tiny.build(tmp_path / "m.gguf", n_layers=4)
    device = EmulatedDevice(1 << 28)
    monkeypatch.setattr("edgellm.placement.open_gpus", lambda: ({"cuda0": device}, ""))
    monkeypatch.setattr("edgellm.plan._TIMES", 1)
    speeds = measure({"cuda0": device}, 1)
    whole = Planner(path, 3, speeds=speeds, devices={"cuda0": device})
    (line,) = (x for x in whole.lines([5], [512], ("f16",)) if not x.n_streamed)
    whole.close()
    margin = (1 << 28) - line.gpu_bytes["cuda0"] + line.bill["cuda0 keys and values"] // 3
    planner = Planner(path, 3, fit_margin=margin, speeds=speeds, devices={"cuda0": device})
    line = planner.lines([None], [512], ("f16",))[0]
    assert line.asked is None and 0 < line.n_gpu_layers < 5
    rows = {row["what"]: row for row in planner.check(line)}
    assert 0.98 <= rows["bytes of cuda0"]["ratio"] <= 1.0
    planner.close()


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"GGUF")
    with pytest.raises(GGUFError):
        Planner(tmp_path / "no.gguf", speeds=SPEEDS)
