"""What a GPU would answer with garbage, a fault or a hang is an error on the emulator."""

import numpy as np
import pytest

from edgellm.kernels.cuda.device import Buffer, DeviceError, OutOfDeviceMemory
from edgellm.kernels.cuda.emulated import POLICIES
from edgellm.kernels.cuda.emulator import ORDERS, EmulatorError
from edgellm.kernels.cuda.source import Source

TEXT = r"""
#include <cuda_fp16.h>
struct packed { half d; signed char codes[32]; };
extern "C" __global__ void scale(const float* x, float* y, float a, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = a * x[i]; }
extern "C" __global__ void misaligned(const packed* w, int* y) { y[threadIdx.x] = *(const int*)w[threadIdx.x].codes; }
extern "C" __global__ void past_the_end(const float* x, float* y) { y[0] = x[threadIdx.x]; }
extern "C" __global__ void past_static(float* y) { __shared__ float s[32]; s[threadIdx.x + 1] = 1.f; __syncthreads(); y[threadIdx.x] = s[threadIdx.x]; }
extern "C" __global__ void past_dynamic(float* y) { extern __shared__ float s[]; s[threadIdx.x + 1] = 1.f; __syncthreads(); y[threadIdx.x] = s[threadIdx.x]; }
extern "C" __global__ void no_barrier(const float* x, float* y) { __shared__ float s[64]; s[threadIdx.x] = x[threadIdx.x]; y[threadIdx.x] = s[63 - threadIdx.x]; }
extern "C" __global__ void no_second_barrier(const float* x, float* y) {
  __shared__ float s[64]; float sum = 0;
  for (int r = 0; r < 4; r++) { s[threadIdx.x] = x[r * 64 + threadIdx.x]; __syncthreads(); sum += s[63 - threadIdx.x]; }
  y[threadIdx.x] = sum; }
extern "C" __global__ void two_barriers(float* y) { if (threadIdx.x < 32) { __syncthreads(); } else { y[threadIdx.x] = 1; __syncthreads(); } }
extern "C" __global__ void half_a_barrier(float* y) { if (threadIdx.x < 40) { __syncthreads(); } y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.f, 1); }
extern "C" __global__ void exited_lanes(const float* x, float* y, int n) { if (threadIdx.x >= n) return; y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, x[threadIdx.x], 16); }
extern "C" __global__ void foreign_mask(float* y) { y[threadIdx.x] = __shfl_sync(0xffffu, 1.f, 3); }
extern "C" __global__ void never_written(float* y) { __shared__ float s[64]; if (threadIdx.x < 63) s[threadIdx.x] = 1.f; __syncthreads(); y[threadIdx.x] = s[threadIdx.x]; }
extern "C" __global__ void big_frame(float* y) { volatile float a[16384]; for (int i = 16383; i >= 0; i--) a[i] = i; y[0] = a[threadIdx.x]; }
extern "C" __global__ void copy_slowly(const float* x, float* y, int n) { for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = x[i]; }
"""  # noqa: E501
PLANTED = Source("planted", TEXT)


@pytest.fixture
def device(emulated):
    made = emulated(policy="eager")
    made.load(PLANTED)
    return made


def floats(device, values) -> Buffer:
    array = np.ascontiguousarray(values, np.float32)
    buffer = device.alloc(array.nbytes)
    device.copy_to(buffer, array)
    return buffer


def read(device, buffer, n) -> np.ndarray:
    out = np.empty(n, np.float32)
    device.copy_from(buffer, out)
    return out


@pytest.mark.parametrize(
    ("name", "block", "shared", "message"),
    [
        ("past_the_end", 128, 0, r"illegal memory access .* thread \(\d+,0,0\) of block"),
        ("past_static", 32, 0, "array bound"),
        ("past_dynamic", 32, 128, "illegal memory access"),
        ("two_barriers", 64, 0, "divergent barrier"),
        ("half_a_barrier", 64, 0, "deadlock"),
        ("exited_lanes", 32, 0, "12 exited"),
        ("foreign_mask", 32, 0, "mask 0000ffff that lacks it"),
        ("big_frame", 1, 0, "illegal memory access"),
        ("scale", 2048, 0, "invalid block size"),
    ],
)
def test_a_fault_is_an_error_that_says_where(device, name, block, shared, message):
    x, y = floats(device, np.zeros(64)), floats(device, np.zeros(64))
    args = {
        "past_the_end": (x, y), "exited_lanes": (x, y, np.int32(20)),
        "scale": (x, y, np.float32(1), np.int32(64)),
    }.get(name, (y,))  # fmt: skip
    with pytest.raises(EmulatorError, match=message):
        device.kernel(f"planted/{name}")((1,), (block,), args, shared)


def test_a_misaligned_load_is_an_error(device):
    w = device.alloc(34 * 32)
    with pytest.raises(EmulatorError, match="misaligned"):
        device.kernel("planted/misaligned")((1,), (32,), (w, device.alloc(128)))


@pytest.mark.parametrize("name", ["no_barrier", "no_second_barrier"])
def test_a_missing_barrier_is_seen_in_some_order(emulated, name):
    x = np.arange(256, dtype=np.float32)
    expected = x[:64][::-1] if name == "no_barrier" else x.reshape(4, 64).sum(0)[::-1]
    wrong = []
    for order in ORDERS:
        device = emulated(policy="eager", order=order)
        device.load(PLANTED)
        y = device.alloc(256)
        device.kernel(f"planted/{name}")((1,), (64,), (floats(device, x), y))
        wrong.append(not np.array_equal(read(device, y, 64), expected))
    assert any(wrong)


def test_memory_that_was_never_written_is_nan(device):
    y = device.alloc(256)
    device.kernel("planted/never_written")((1,), (64,), (y,))
    assert np.isnan(read(device, y, 64)).tolist() == [False] * 63 + [True]
    assert np.isnan(read(device, device.alloc(256), 64)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({2: 2.0}, "must be numpy.float32"),
        ({3: 64}, "must be numpy.int32"),
        ({3: np.int64(64)}, "must be numpy.int32"),
        ({0: np.zeros(64, np.float32)}, "must be a Buffer"),
    ],
)
def test_arguments_have_the_kernels_types(device, change, message):
    x, y = floats(device, np.ones(64)), floats(device, np.ones(64))
    args = [x, y, np.float32(2), np.int32(64)]
    for i, value in change.items():
        args[i] = value
    with pytest.raises(EmulatorError, match=message):
        device.kernel("planted/scale")((1,), (64,), args)
    with pytest.raises(EmulatorError, match="3 arguments for 4 parameters"):
        device.kernel("planted/scale")((1,), (64,), args[:3])


def test_buffers_are_not_read_by_accident(device):
    with pytest.raises(TypeError, match="copy_from"):
        np.asarray(device.alloc(64))
    with pytest.raises(ValueError, match="leave a buffer"):
        device.alloc(64).at(60, 8)
    with pytest.raises(DeviceError, match="leaves a buffer"):
        device.copy_to(device.alloc(64), np.zeros(17, np.float32))


def test_memory_is_accounted_and_ends(emulated):
    device = emulated(total=4096)
    buffer = device.alloc(1000)
    assert device.memory() == (3072, 4096)
    with pytest.raises(OutOfDeviceMemory, match="3073 bytes asked for, 3072 free"):
        device.alloc(3073)
    device.free(buffer)
    assert device.memory() == (4096, 4096)
    with pytest.raises(DeviceError, match="freed"):
        device.copy_to(buffer, np.zeros(4, np.float32))


def streamed(device, *, waits: bool, waits_for_slot: bool) -> np.ndarray:
    """Two layers through one slot of memory, as weights are streamed, added up in order."""
    device.load(PLANTED)
    side, results = device.stream(), []
    slot = device.alloc(256)
    host = device.pinned(512).view(np.float32).reshape(2, 64)
    host[:] = np.arange(128).reshape(2, 64)
    used = None
    for layer in range(2):
        out = device.alloc(256)
        if used is not None and waits_for_slot:
            side.wait(used)
        device.copy_to(slot, host[layer], side)
        if waits:
            device.main.wait(side.record())
        args = (slot, out, np.float32(1), np.int32(64))
        device.kernel("planted/scale")((1,), (64,), args)
        used = device.main.record()
        results.append(out)
    device.synchronize()
    return np.stack([read(device, out, 64) for out in results])


@pytest.mark.parametrize("policy", POLICIES)
def test_waits_make_every_policy_right(emulated, policy):
    for seed in range(5):
        found = streamed(emulated(policy=policy, seed=seed), waits=True, waits_for_slot=True)
        assert np.array_equal(found, np.arange(128, dtype=np.float32).reshape(2, 64))


@pytest.mark.parametrize("missing", ["waits", "waits_for_slot"])
def test_a_missing_wait_is_seen_under_some_policy(emulated, missing):
    wanted = np.arange(128, dtype=np.float32).reshape(2, 64)
    wrong = 0
    for policy in POLICIES:
        for seed in range(5):
            given = {"waits": True, "waits_for_slot": True, missing: False}
            found = streamed(emulated(policy=policy, seed=seed), **given)
            wrong += not np.array_equal(found, wanted)
    assert wrong


def test_a_graph_repeats_with_what_is_in_memory(device):
    x, y = floats(device, np.ones(64)), device.alloc(256)
    with device.capture(device.main) as graph:
        args = (x, y, np.float32(3), np.int32(64))
        device.kernel("planted/scale")((1,), (64,), args)
    assert np.isnan(read(device, y, 64)).all()
    graph.launch(device.main)
    assert (read(device, y, 64) == 3).all()
    device.copy_to(x, np.full(64, 2, np.float32))
    graph.launch(device.main)
    assert (read(device, y, 64) == 6).all()


def test_what_cannot_be_captured_is_refused(device):
    buffer = device.alloc(64)
    with device.capture(device.main):
        with pytest.raises(DeviceError, match="can be captured"):
            device.copy_to(buffer, np.zeros(4, np.float32))
        with pytest.raises(DeviceError, match="can be captured"):
            device.copy_to(buffer, np.zeros(4, np.float32), device.main)
        with pytest.raises(DeviceError, match="cannot be waited for"):
            device.synchronize()


def test_a_module_that_does_not_compile_shows_where(emulated):
    bad = Source("bad", 'extern "C" __global__ void f(int* x) { *x = INFINITY; }')
    with pytest.raises(EmulatorError, match="INFINITY"):
        emulated().load(bad)
