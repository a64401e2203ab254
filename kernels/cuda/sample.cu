// The best of a row of logits, and the k best. Ties go to the lower number; NaN is less than anything.
#include "common.cuh"

enum { SLICE = 2048, THREADS = 256 };

// A number and its place as one key: larger is better. The bits of a float are ordered like integers
// once those of negative numbers are turned over.
DEVICE u64 key_of(float x, u32 place) {
  const u32 bits = __float_as_uint(x == 0.f ? 0.f : x);  // both zeros are one
  const u32 ordered = x != x ? 0u : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (u64)ordered << 32 | (0xffffffffu - place);
}
DEVICE u32 place_of(u64 key) { return 0xffffffffu - (u32)key; }

// grid rows, block 1024: 512 KB of a vocabulary of 128k are read once.
extern "C" __global__ void __launch_bounds__(1024)
argmax(const float* __restrict__ x, int* __restrict__ out, const int* __restrict__ count, int n) {
  __shared__ u64 best_of[32];
  const int row = blockIdx.x;
  if (row >= *count) return;
  u64 best = 0;
  for (int i = threadIdx.x; i < n; i += 1024) {
    const u64 key = key_of(x[(size_t)row * n + i], (u32)i);
    best = key > best ? key : best;
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    const u64 other = __shfl_xor_sync(ALL_LANES, best, step);
    best = other > best ? other : best;
  }
  if (LANE == 0) best_of[WARP] = best;
  __syncthreads();
  if (threadIdx.x) return;
  for (int w = 1; w < 32; w++) best = best_of[w] > best ? best_of[w] : best;
  out[row] = (int)place_of(best);
}

// keys, best first: a bitonic network over 2048 of them in shared memory (16 KB)
DEVICE void sort(u64* keys) {
  for (int size = 2; size <= SLICE; size *= 2)
    for (int step = size / 2; step; step /= 2) {
      for (int i = threadIdx.x; i < SLICE / 2; i += THREADS) {
        const int a = 2 * i - (i & (step - 1)), b = a + step;
        const bool falls = !(a & size);
        const u64 x = keys[a], y = keys[b];
        if ((x < y) == falls) { keys[a] = y; keys[b] = x; }
      }
      __syncthreads();
    }
}

// The k best of each slice of 2048 numbers, as keys [rows][slices][k]. grid (slices, rows)
extern "C" __global__ void __launch_bounds__(256)
top_of_numbers(const float* __restrict__ x, u64* __restrict__ out, const int* __restrict__ count, int n, int k) {
  __shared__ u64 keys[SLICE];
  const int row = blockIdx.y, first = blockIdx.x * SLICE;
  if (row >= *count) return;
  for (int i = threadIdx.x; i < SLICE; i += THREADS)
    keys[i] = first + i < n ? key_of(x[(size_t)row * n + first + i], (u32)(first + i)) : 0;
  __syncthreads();
  sort(keys);
  for (int i = threadIdx.x; i < k; i += THREADS) out[((size_t)row * gridDim.x + blockIdx.x) * k + i] = keys[i];
}

// The same of n keys a row.
extern "C" __global__ void __launch_bounds__(256)
top_of_keys(const u64* __restrict__ x, u64* __restrict__ out, const int* __restrict__ count, int n, int k) {
  __shared__ u64 keys[SLICE];
  const int row = blockIdx.y, first = blockIdx.x * SLICE;
  if (row >= *count) return;
  for (int i = threadIdx.x; i < SLICE; i += THREADS)
    keys[i] = first + i < n ? x[(size_t)row * n + first + i] : 0;
  __syncthreads();
  sort(keys);
  for (int i = threadIdx.x; i < k; i += THREADS) out[((size_t)row * gridDim.x + blockIdx.x) * k + i] = keys[i];
}

// Keys [rows][k] as numbers of the row and their values. grid (k / 256, rows)
extern "C" __global__ void __launch_bounds__(256)
chosen(const u64* __restrict__ keys, const float* __restrict__ x, int* __restrict__ numbers, float* __restrict__ values,
       const int* __restrict__ count, int n, int k) {
  const int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
  if (row >= *count || i >= k) return;
  const int number = (int)place_of(keys[(size_t)row * k + i]);
  numbers[(size_t)row * k + i] = number;
  values[(size_t)row * k + i] = x[(size_t)row * n + number];
}
