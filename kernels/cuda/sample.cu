// The best of each row of logits, so that rows need not go to the host whole.
//
// A logit and its place make one key, of which the larger is the better: ties go to the lower place, as on the
// host, and NaN comes before everything, so that whoever looks at the best one sees it. Keys are made of bits
// alone: the order is that of the numbers on the host, also for numbers that -ftz would take for zero.
#include "common.cuh"

enum { SLICE = 2048, THREADS = 256 };

// The bits of a float are ordered like integers once those of negative numbers are turned over.
DEVICE u64 key_of(float x, u32 place) {
  const u32 read = __float_as_uint(x), bits = read == 0x80000000u ? 0u : read;  // both zeros are one
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const u32 ordered = is_nan ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (u64)ordered << 32 | (0xffffffffu - place);
}

// One turn of a bitonic network over runs of `size` among the first n keys. Runs of `width` are falling in the
// first half and rising in the second, so that the halves can be compared one to one; the last one falls.
DEVICE void merge(u64* keys, int n, int size, int width) {
  for (int step = size / 2; step; step /= 2) {
    for (int i = threadIdx.x; i < n / 2; i += THREADS) {
      const int a = 2 * i - (i & (step - 1)), b = a + step;
      const bool falls = size < width ? !(a & size) : n == width || a < n / 2;
      const u64 x = keys[a], y = keys[b];
      if ((x < y) == falls) { keys[a] = y; keys[b] = x; }
    }
    __syncthreads();
  }
}

// The best `width` (a power of two) of SLICE keys, falling, to the front. Of a falling and a rising run the
// larger of each pair are the best of both: half of the keys go with each turn, and only runs of `width` are
// sorted, which for the best alone (width 1) is a tree of maxima. For 64 that is 56 barriers and half of the
// comparisons of a whole sort.
DEVICE void best_to_front(u64* keys, int width) {
  for (int size = 2; size <= width; size *= 2) merge(keys, SLICE, size, width);
  for (int n = SLICE / 2; n >= width; n /= 2) {
    for (int i = threadIdx.x; i < n; i += THREADS)
      if (keys[i] < keys[i + n]) keys[i] = keys[i + n];
    __syncthreads();
    merge(keys, n, width, width);
  }
}

// The best of each strip of a row's n logits or, where these are null, of n keys that were found before:
// out [rows][strips][width], falling; 0 where there are not so many. grid (strips, rows). A block reads its
// strip once, 4 bytes a lane side by side, and keeps the best in front of what it reads next: 16 KB of shared
// memory, whatever the vocabulary.
extern "C" __global__ void __launch_bounds__(256)
best(const float* __restrict__ logits, const u64* __restrict__ found, u64* __restrict__ out,
     const int* __restrict__ count, int n, int strip, int width) {
  __shared__ u64 keys[SLICE];
  const int row = blockIdx.y, end = min(n, (int)(blockIdx.x + 1) * strip);
  if (row >= *count) return;
  const size_t start = (size_t)row * n;
  for (int i = threadIdx.x; i < width; i += THREADS) keys[i] = 0;
  for (int first = blockIdx.x * strip; first < end; first += SLICE - width) {
    for (int i = width + threadIdx.x; i < SLICE; i += THREADS) {
      const int place = first + i - width;
      keys[i] = place >= end ? 0 : logits ? key_of(logits[start + place], (u32)place) : found[start + place];
    }
    __syncthreads();
    best_to_front(keys, width);
  }
  for (int i = threadIdx.x; i < width; i += THREADS)
    out[((size_t)row * gridDim.x + blockIdx.x) * width + i] = keys[i];
}
