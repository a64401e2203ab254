"""The emulator on AArch64: its fibers, faults and halves under qemu (Debian's g++-aarch64-linux-gnu
libc6-dev-arm64-cross qemu-user)."""

import shutil
import subprocess

import pytest

from edgellm.kernels.cuda import emulator
from edgellm.kernels.cuda.source import Source

COMPILER, MACHINE = "aarch64-linux-gnu-g++", "qemu-aarch64"
KERNELS = r"""
#include <cuda_fp16.h>
extern "C" __global__ void total(const float* x, float* y, int n) {
  __shared__ float parts[8];
  float sum = 0.f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += __half2float(__float2half_rn(x[i]));
  for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = sum;
  __syncthreads();
  if (threadIdx.x == 0) { sum = 0.f; for (int w = 0; w < 8; w++) sum += parts[w]; y[0] = sum; }
}
extern "C" __global__ void wrong_index(const float* x, float* y, int n) {
  __shared__ float s[32];
  s[threadIdx.x + n] = 1.f;
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void null_pointer(const float* x, float* y, int n) {
  y[0] = *(const float*)(size_t)(n & 1);
}
"""
MAIN = r"""
int main() {
  emu_stacks(nullptr);
  static float x[1000], y[256];
  for (int i = 0; i < 1000; i++) x[i] = i % 7;
  const float *px = x, *py = y;
  int n = 1000;
  void* args[] = {&px, &py, &n};
  unsigned grid[] = {1, 1, 1}, size[] = {256, 1, 1};
  for (int order = 0; order < 3; order++) {
    int code = emu_launch(0, args, grid, size, 0, order, 1, 1);
    printf("%d %g\n", code, y[0]);
  }
  for (int kernel = 1; kernel < 3; kernel++) {
    int code = emu_launch(kernel, args, grid, size, 0, 0, 1, 1);
    printf("%d %s\n", code, emu_message());
  }
}
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(MACHINE)), reason=f"needs {COMPILER} and {MACHINE}"
)
def test_kernels_run_and_faults_are_caught(tmp_path):
    source = Source("arm", KERNELS)
    text = emulator.wrapped(source, list(source.kernels)) + MAIN
    cpp, program = tmp_path / "kernel.cpp", tmp_path / "kernel"
    cpp.write_text(text, encoding="utf-8")
    flags = [flag for flag in emulator.FLAGS if flag not in ("-shared", "-fPIC")]
    command = [COMPILER, *flags, "-static", "-I", str(emulator.HEADERS), "-o", program, cpp]
    subprocess.run(command, check=True)
    run = subprocess.run([MACHINE, program], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert lines[:3] == [f"0 {sum(i % 7 for i in range(1000))}"] * 3
    assert "undefined behaviour" in lines[3] and "illegal memory access" in lines[4]
