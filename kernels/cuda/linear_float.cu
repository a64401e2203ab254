// Matrices of plain floats (WEIGHTS is f32, f16 or bf16) times float32 activations: what linear.cu
// does for quantized ones, under the same names. Products and sums are float32, so that activations
// keep their range; what is small (a router) or precise by choice is stored like this.
//
// Rows are read 8 elements at a time by a lane, 16 or 32 bytes, neighbouring lanes side by side.
#include "common.cuh"

struct f32 { enum { BYTES = 4 }; };
struct f16 { enum { BYTES = 2 }; };
struct bf16 { enum { BYTES = 2 }; };
typedef WEIGHTS W;

DEVICE void load8(f32, const u8* at, float (&x)[8]) {
  const float4 a = ((const float4*)at)[0], b = ((const float4*)at)[1];
  x[0] = a.x; x[1] = a.y; x[2] = a.z; x[3] = a.w;
  x[4] = b.x; x[5] = b.y; x[6] = b.z; x[7] = b.w;
}
DEVICE void load8(f16, const u8* at, float (&x)[8]) {
  const uint4 v = *(const uint4*)at;
  const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) { x[2 * i] = half_bits(w[i] & 0xffff); x[2 * i + 1] = half_bits(w[i] >> 16); }
}
DEVICE void load8(bf16, const u8* at, float (&x)[8]) {
  const uint4 v = *(const uint4*)at;
  const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) { x[2 * i] = bf16_bits(w[i] & 0xffff); x[2 * i + 1] = bf16_bits(w[i] >> 16); }
}

DEVICE const float* row_of(const u8* x, size_t stride, int row) { return (const float*)(x + row * stride); }

template <int N>
DEVICE void dot_rows(const u8* row, int n_in, const float* const (&x)[N], float (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) sums[i] = 0.f;
#pragma unroll 2
  for (int k = 8 * LANE; k < n_in; k += 256) {
    float w[8];
    load8(W(), row + (size_t)k * W::BYTES, w);
#pragma unroll
    for (int i = 0; i < N; i++) {
      float v[8];
      load8(f32(), (const u8*)(x[i] + k), v);
#pragma unroll
      for (int j = 0; j < 8; j++) sums[i] = fmaf(w[j], v[j], sums[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < N; i++) sums[i] = warp_sum(sums[i]);
}

template <int N>
DEVICE void products(const u8* matrix, const u8* x, int x_stride, int n_in, int n_out, int out_row, int n_heads,
                     int head, const int (&rows)[N], float (&sums)[N]) {
  const float* at[N];
#pragma unroll
  for (int i = 0; i < N; i++) at[i] = row_of(x, x_stride, rows[i]) + head * n_in;
  dot_rows<N>(matrix + (size_t)out_row * n_in * W::BYTES, n_in, at, sums);
}
#include "matvec.cuh"

// See linear.cu, also for the grids.
extern "C" __global__ void __launch_bounds__(128)
expert_matvec(const u8* __restrict__ matrix, int matrix_units, const u8* __restrict__ x, int x_stride,
              const float* __restrict__ bias, float* __restrict__ out, const int* __restrict__ count,
              const float* __restrict__ route, int n_in, int n_out, int n_used, int per_rank) {
  const int out_row = blockIdx.x * 4 + WARP, row = blockIdx.y / n_used, rank = blockIdx.y % n_used;
  if (out_row >= n_out || row >= *count) return;
  const int expert = (int)route[(size_t)row * 2 * n_used + rank];
  const float* const rows[1] = {row_of(x, x_stride, per_rank ? (int)blockIdx.y : row)};
  float sums[1];
  dot_rows<1>(matrix + (size_t)matrix_units * 256 * expert + (size_t)out_row * n_in * W::BYTES, n_in, rows, sums);
  if (LANE == 0)
    out[(size_t)blockIdx.y * n_out + out_row] = sums[0] + (bias ? bias[(size_t)expert * n_out + out_row] : 0.f);
}

// A block has 64 outputs times 64 tokens, a thread 4 x 4 of them, from 16 elements at a time in
// shared memory (8.5 KB): 16 multiply-adds for 8 words read.
enum { SIDE = 64, DEPTH = 16, PITCH = SIDE + 4 };
struct Tile {
  __align__(16) float weights[DEPTH * PITCH], x[DEPTH * PITCH];
  int x_row[SIDE], out_row[SIDE];
};

DEVICE void multiply(Tile& tile, const u8* matrix, int n_in, int n_out, int first_out, const u8* x,
                     size_t x_stride, const float* bias, float* out, int out_stride, int accumulate) {
  const int thread = threadIdx.x, to_out = 4 * (thread & 15), to_token = 4 * (thread >> 4);
  float sums[4][4];
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) sums[i][j] = 0.f;
  const int row = (thread & 127) >> 1, k = 8 * (thread & 1);  // 128 threads fetch weights, 128 tokens
  const int source = thread < 128 ? min(first_out + row, n_out - 1) : tile.x_row[row];
  for (int step = 0; step < n_in; step += DEPTH) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = 0.f;
    if (step + k < n_in) {
      if (thread < 128) load8(W(), matrix + ((size_t)source * n_in + step + k) * W::BYTES, v);
      else if (source >= 0) load8(f32(), x + source * x_stride + (step + k) * 4, v);
    }
    float* to = (thread < 128 ? tile.weights : tile.x) + k * PITCH + row;
#pragma unroll
    for (int j = 0; j < 8; j++) to[j * PITCH] = v[j];
    __syncthreads();
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      const float4 w = *(const float4*)(tile.weights + d * PITCH + to_out);
      const float4 t = *(const float4*)(tile.x + d * PITCH + to_token);
      const float a[4] = {w.x, w.y, w.z, w.w}, b[4] = {t.x, t.y, t.z, t.w};
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const int out_row = tile.out_row[to_token + j];
    if (out_row < 0) continue;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int o = first_out + to_out + i;
      if (o >= n_out) break;
      float* y = out + (size_t)out_row * out_stride + o;
      const float sum = bias ? sums[i][j] + bias[o] : sums[i][j];
      *y = accumulate ? *y + sum : sum;
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
matmul(const u8* __restrict__ matrix, int matrix_units, const u8* __restrict__ x, int x_stride,
       const float* __restrict__ bias, float* __restrict__ out, const int* __restrict__ count, int n_in,
       int n_out, int n_heads, int accumulate) {
  __shared__ Tile tile;
  const int n_rows = *count, first = blockIdx.y * SIDE, head = blockIdx.z;
  if (first >= n_rows) return;
  if (threadIdx.x < SIDE) {
    const int row = first + threadIdx.x;
    tile.x_row[threadIdx.x] = tile.out_row[threadIdx.x] = row < n_rows ? row : -1;
  }
  __syncthreads();
  multiply(tile, matrix + (size_t)matrix_units * 256 * head, n_in, n_out, blockIdx.x * SIDE, x + head * n_in * 4,
           x_stride, bias ? bias + head * n_out : bias, out + head * n_out, n_heads * n_out, accumulate);
}

extern "C" __global__ void __launch_bounds__(256)
expert_matmul(const u8* __restrict__ matrix, int matrix_units, const u8* __restrict__ x, int x_stride,
              const float* __restrict__ bias, float* __restrict__ out, const int* __restrict__ order,
              const int* __restrict__ starts, int n_in, int n_out, int n_used, int per_rank) {
  __shared__ Tile tile;
  const int expert = blockIdx.z, first = starts[expert] + blockIdx.y * SIDE, end = starts[expert + 1];
  if (first >= end) return;
  if (threadIdx.x < SIDE) {
    const int i = first + threadIdx.x, pair = i < end ? order[i] : -1;
    tile.x_row[threadIdx.x] = pair < 0 || per_rank ? pair : pair / n_used;
    tile.out_row[threadIdx.x] = pair;
  }
  __syncthreads();
  multiply(tile, matrix + (size_t)matrix_units * 256 * expert, n_in, n_out, blockIdx.x * SIDE, x, x_stride,
           bias ? bias + (size_t)expert * n_out : bias, out, n_out, 0);
}

// grid (n_in / 8 / 128, rows), block 128, a thread 8 elements
extern "C" __global__ void __launch_bounds__(128)
table_rows(const u8* __restrict__ table, const int* __restrict__ numbers, float* __restrict__ out,
           const int* __restrict__ count, int n_in, int n_out) {
  const int k = 8 * (blockIdx.x * 128 + threadIdx.x), row = blockIdx.y;
  if (row >= *count || k >= n_in) return;
  float v[8];
  load8(W(), table + ((size_t)numbers[row] * n_in + k) * W::BYTES, v);
  float4* to = (float4*)(out + (size_t)row * n_in + k);
  to[0] = make_float4(v[0], v[1], v[2], v[3]);
  to[1] = make_float4(v[4], v[5], v[6], v[7]);
}
