// float32 activations to int8: codes, and for each 32 of them a scale and the sums of both halves.
//
// A warp has 32 elements, a lane one: 128 bytes are read and 40 written, once for each matrix input.
// scale = largest / 127; a group with a NaN or an infinity has a NaN for a scale, so that the row's
// results are NaN and nothing else is. With n_copies = 2 a row has a second copy
// behind the first, what the first left over: 15 bits in all, for matrices whose inputs have outliers.
#include "common.cuh"

// The code of x; its group's scale and sums go to meta.
DEVICE int encode(float x, float& scale, int2& meta) {
  const float size = fabsf(x);
  float largest = size;
  int odd = !(size < 3e38f);
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, step));
    odd |= __shfl_xor_sync(ALL_LANES, odd, step);
  }
  scale = odd ? NOT_A_NUMBER : largest / 127.f;
  const float inverse = !odd && scale > 0.f ? 1.f / scale : 0.f;
  const int code = odd ? 0 : max(-127, min(127, __float2int_rn(x * inverse)));
  int sum = code;
#pragma unroll
  for (int step = 8; step; step >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, step);
  const int other = __shfl_xor_sync(ALL_LANES, sum, 16);
  meta = make_int2(__float_as_int(scale), (sum & 0xffff) | (int)((u32)other << 16));  // lane 0's is right
  return code;
}

// A row: codes [n_in], then meta [n_in / 32], up to a multiple of 16 bytes. grid (n_in / 256, rows)
DEVICE void quantize_row(const float* x, u8* out, const int* count, int n_in, int n_copies) {
  const int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
  if (row >= *count || i >= n_in) return;  // n_in is a multiple of 32: warps leave whole
  const int copy_bytes = (n_in + n_in / 4 + 15) & ~15;
  u8* to = out + (size_t)row * copy_bytes * n_copies;
  float v = x[(size_t)row * n_in + i], scale;
  for (int copy = 0; copy < n_copies; copy++) {
    int2 meta;
    const int code = encode(v, scale, meta);
    to[i] = (u8)code;
    if (LANE == 0) ((int2*)(to + n_in))[i >> 5] = meta;
    v -= scale * (float)code;
    to += copy_bytes;
  }
}

extern "C" __global__ void __launch_bounds__(256)
quantize(const float* __restrict__ x, u8* __restrict__ out, const int* __restrict__ count, int n_in, int n_copies) {
  quantize_row(x, out, count, n_in, n_copies);
}
