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

// One element of a row: its code, and by lane 0 its group's meta. A row is codes [n_in], then meta
// [n_in / 32], up to a multiple of 16 bytes, for each copy.
DEVICE void put(float v, u8* row, int i, int n_in, int n_copies) {
  for (int copy = 0; copy < n_copies; copy++) {
    float scale;
    int2 meta;
    const int code = encode(v, scale, meta);
    row[i] = (u8)code;
    if (LANE == 0) ((int2*)(row + n_in))[i >> 5] = meta;
    v -= scale * (float)code;
    row += (n_in + n_in / 4 + 15) & ~15;
  }
}
DEVICE u8* row_of(u8* out, int row, int n_in, int n_copies) {
  return out + (size_t)row * n_copies * ((n_in + n_in / 4 + 15) & ~15);
}

// grid (n_in / 256, rows)
extern "C" __global__ void __launch_bounds__(256)
quantize(const float* __restrict__ x, u8* __restrict__ out, const int* __restrict__ count, int n_in, int n_copies) {
  const int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
  if (row >= *count || i >= n_in) return;  // n_in is a multiple of 32: warps leave whole
  put(x[(size_t)row * n_in + i], row_of(out, row, n_in, n_copies), i, n_in, n_copies);
}

// total = x + y, normed = rms_norm(total) * weight, and normed quantized: what stands between two
// matrices of a layer, in one launch and with the bits of three. y, total and normed may be null. The
// sum has rms_norm's order (rows.cu). grid rows, block 32, 256 or 1024.
extern "C" __global__ void __launch_bounds__(1024)
norm_quantize(const float* x, const float* y, const float* __restrict__ weight, float* total, float* normed,
              u8* __restrict__ out, const int* __restrict__ count, int n, float eps, int n_copies) {
  __shared__ float parts[32];
  const int row = blockIdx.x;
  if (row >= *count) return;
  const size_t at = (size_t)row * n;
  float sum = 0.f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const float v = y ? x[at + i] + y[at + i] : x[at + i];
    sum = fmaf(v, v, sum);
  }
  sum = block_sum(sum, parts);
  const float factor = 1.f / sqrtf(sum / (float)n + eps);
  u8* to = row_of(out, row, n, n_copies);
  for (int i = threadIdx.x; i < n; i += blockDim.x) {  // n is a multiple of 32: warps leave whole
    const float v = y ? x[at + i] + y[at + i] : x[at + i];
    const float scaled = v * factor * weight[i];
    if (total) total[at + i] = v;
    if (normed) normed[at + i] = scaled;
    put(scaled, to, i, n, n_copies);
  }
}
