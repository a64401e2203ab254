// Matrices of one quantized type (WEIGHTS) times int8 activations: linear, head_linear, moe_linear,
// and rows of a table.
//
// Generated tokens go through `matvec`, prompt tokens through `matmul`: the phase chooses, never the
// number of rows, and neither's result for a row depends on the rows beside it.
//
// matvec: a warp has a row of the matrix, a lane a group of 32 elements at a time. A warp reads 1024
// elements' codes as one run of 16-byte loads (512 bytes of 4-bit codes); each byte of weights is
// read once and meets 2 multiply-adds a token, so memory is the limit up to some dozens of tokens:
// of a 4-bit matrix 18 bytes a group come from DRAM, and of activations 40 bytes a token from L1,
// where they stay since all warps read the same. A group costs about 8 instructions to decode and
// 8 dp4a a token.
//
// matmul: a block has 128 outputs times 64 tokens and goes through 64 elements at a time. Its 256
// threads decode one group of weights each into shared memory (21 KB in all, rows of 80 bytes so
// that the fragments of a product come from 32 banks at once) while the next are on their way from
// memory. A warp has 32 x 32 outputs: 8 products of 16 x 8 x 32 for each group, from about 40
// words of shared memory a lane. After each group the int32 sums are scaled into float sums, 4 operations an output;
// that, not the product, is the limit: about 22 issue slots for each product.
#include "activations.cuh"
#include "weights.cuh"

typedef WEIGHTS W;

// Rows of activations (quantize.cu): int8 codes [n_in], then for each 32 of them 8 bytes: a scale and
// the sums of both halves of the codes (int16). A matrix may take a part of each row: that of a head,
// or of the rank of an expert.
struct Activations {
  const u8* rows;
  size_t stride;  // bytes from row to row
  int codes, meta;  // bytes from a row's begin to the part's
};
DEVICE Activations part_of(const u8* x, int stride, int n_in, int n_parts, int part) {
  const Activations a = {x, (size_t)stride, part * n_in, n_parts * n_in + part * (n_in / 4)};
  return a;
}

// ---- a row of the matrix times N rows of activations ----------------------------------------------

template <int N>
DEVICE void dot_rows(const u8* matrix, int n_groups, int n_out, int out_row, const Activations& x,
                     const int (&rows)[N], float (&sums)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) sums[i] = 0.f;
  Place at = {matrix, (size_t)n_out, n_groups, (size_t)out_row, 0};
  u32 from[N];  // 32 bits, since 8 pointers would take 16 registers
#pragma unroll
  for (int i = 0; i < N; i++) from[i] = rows[i] * (u32)x.stride;
#pragma unroll(N < 8 ? 2 : 1)
  for (int group = LANE; group < n_groups; group += 32) {
    W weights;
    at.group = group;
    weights.load(at);
    int q[8];
    Scales s;
    weights.decode(group, q, s);
#pragma unroll
    for (int i = 0; i < N; i++) {
      const u8* row = x.rows + from[i];
      const int4* codes = (const int4*)(row + x.codes) + 2 * group;
      const int4 a = codes[0], b = codes[1];
      const int2 meta = ((const int2*)(row + x.meta))[group];
      const int first = __dp4a(q[3], a.w, __dp4a(q[2], a.z, __dp4a(q[1], a.y, __dp4a(q[0], a.x, 0))));
      const int second = __dp4a(q[7], b.w, __dp4a(q[6], b.z, __dp4a(q[5], b.y, __dp4a(q[4], b.x, 0))));
      const int sum0 = (short)(meta.y & 0xffff), sum1 = meta.y >> 16;
      float part;
      if (W::HALVES) {
        part = s.d[0] * (float)first + s.d[1] * (float)second;
        if (W::HAS_MIN) part -= s.m[0] * (float)sum0 + s.m[1] * (float)sum1;
      } else {
        part = s.d[0] * (float)(first + second);
        if (W::HAS_MIN) part -= s.m[0] * (float)(sum0 + sum1);
      }
      sums[i] += __int_as_float(meta.x) * part;
    }
  }
#pragma unroll
  for (int i = 0; i < N; i++) sums[i] = warp_sum(sums[i]);
}

template <int N>
DEVICE void products(const u8* matrix, const u8* x, int x_stride, int n_in, int n_out, int out_row, int n_heads,
                     int head, const int (&rows)[N], float (&sums)[N]) {
  dot_rows<N>(matrix, n_in >> 5, n_out, out_row, part_of(x, x_stride, n_in, n_heads, head), rows, sums);
}
#include "matvec.cuh"

// A gate, its up and the function of both (activations.cuh) at once: what the two matrices say is not
// written, read and launched for again. The same bits as one after the other. Grid as matvec's.
template <int N>
DEVICE void gated_rows(const u8* gate, const u8* up, const u8* x, int x_stride, const float* gate_bias,
                       const float* up_bias, float* out, const int* count, int n_in, int n_out, int function) {
  const int out_row = blockIdx.x * 4 + WARP, first = blockIdx.y * N, n_rows = *count;
  if (out_row >= n_out || first >= n_rows) return;
  const Activations a = part_of(x, x_stride, n_in, 1, 0);
  int rows[N];
#pragma unroll
  for (int i = 0; i < N; i++) rows[i] = min(first + i, n_rows - 1);
  float gates[N], ups[N];
  dot_rows<N>(gate, n_in >> 5, n_out, out_row, a, rows, gates);
  dot_rows<N>(up, n_in >> 5, n_out, out_row, a, rows, ups);
  if (LANE) return;
#pragma unroll
  for (int i = 0; i < N; i++) {
    if (first + i >= n_rows) break;
    const float g = gate_bias ? gates[i] + gate_bias[out_row] : gates[i];
    const float u = up_bias ? ups[i] + up_bias[out_row] : ups[i];
    out[(size_t)(first + i) * n_out + out_row] = gated(function, g, u);
  }
}

#define GATED_PARAMETERS                                                                             \
  const u8 *__restrict__ gate, const u8 *__restrict__ up, const u8 *__restrict__ x, int x_stride,    \
      const float *__restrict__ gate_bias, const float *__restrict__ up_bias,                        \
      float *__restrict__ out, const int *__restrict__ count, int n_in, int n_out, int function
#define GATED_ARGUMENTS gate, up, x, x_stride, gate_bias, up_bias, out, count, n_in, n_out, function

extern "C" __global__ void __launch_bounds__(128) gated_1(GATED_PARAMETERS) { gated_rows<1>(GATED_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128) gated_2(GATED_PARAMETERS) { gated_rows<2>(GATED_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128) gated_4(GATED_PARAMETERS) { gated_rows<4>(GATED_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128) gated_8(GATED_PARAMETERS) { gated_rows<8>(GATED_ARGUMENTS); }

// grid (n_out / 4, rows * n_used): the expert of a rank is read from the route [n_rows, 2 * n_used].
// x has one row for all ranks of a token, or one for each.
extern "C" __global__ void __launch_bounds__(128)
expert_matvec(const u8* __restrict__ matrix, int matrix_units, const u8* __restrict__ x, int x_stride,
              const float* __restrict__ bias, float* __restrict__ out, const int* __restrict__ count,
              const float* __restrict__ route, int n_in, int n_out, int n_used, int per_rank) {
  const int out_row = blockIdx.x * 4 + WARP, row = blockIdx.y / n_used, rank = blockIdx.y % n_used;
  if (out_row >= n_out || row >= *count) return;
  const int expert = (int)route[(size_t)row * 2 * n_used + rank];
  const Activations a = part_of(x, x_stride, n_in, per_rank ? n_used : 1, per_rank ? rank : 0);
  const int rows[1] = {row};
  float sums[1];
  dot_rows<1>(matrix + (size_t)matrix_units * 256 * expert, n_in >> 5, n_out, out_row, a, rows, sums);
  if (LANE == 0)
    out[(size_t)blockIdx.y * n_out + out_row] = sums[0] + (bias ? bias[(size_t)expert * n_out + out_row] : 0.f);
}

// The gate and up of each expert, as gated_rows. A row of x serves all ranks.
extern "C" __global__ void __launch_bounds__(128)
expert_gated(const u8* __restrict__ gate, const u8* __restrict__ up, int matrix_units, const u8* __restrict__ x,
             int x_stride, const float* __restrict__ gate_bias, const float* __restrict__ up_bias,
             float* __restrict__ out, const int* __restrict__ count, const float* __restrict__ route, int n_in,
             int n_out, int n_used, int function) {
  const int out_row = blockIdx.x * 4 + WARP, row = blockIdx.y / n_used, rank = blockIdx.y % n_used;
  if (out_row >= n_out || row >= *count) return;
  const size_t expert = (size_t)route[(size_t)row * 2 * n_used + rank], at = (size_t)matrix_units * 256 * expert;
  const Activations a = part_of(x, x_stride, n_in, 1, 0);
  const int rows[1] = {row};
  float g[1], u[1];
  dot_rows<1>(gate + at, n_in >> 5, n_out, out_row, a, rows, g);
  dot_rows<1>(up + at, n_in >> 5, n_out, out_row, a, rows, u);
  if (LANE) return;
  if (gate_bias) g[0] += gate_bias[expert * n_out + out_row];
  if (up_bias) u[0] += up_bias[expert * n_out + out_row];
  out[(size_t)blockIdx.y * n_out + out_row] = gated(function, g[0], u[0]);
}

// ---- a tile of outputs times a tile of tokens -----------------------------------------------------

enum { OUTS = 128, TOKENS = 64, STRIDE = 80, PARTS = W::HALVES ? 2 : 1 };

struct Tile {  // of 64 elements: two groups of each row
  __align__(16) i8 weights[OUTS * STRIDE], x[TOKENS * STRIDE];
  float d[2][PARTS][OUTS], m[2][PARTS][OUTS];
  __align__(8) float x_scale[2][TOKENS], x_sum[2][PARTS][TOKENS];
  const u8 *codes[TOKENS], *meta[TOKENS];  // of each token's part of a row; null: there is none
  int out_row[TOKENS];
};
DEVICE void set_row(Tile& tile, const Activations& x, int row, int out_row) {
  const u8* at = x.rows + row * x.stride;
  tile.codes[threadIdx.x] = out_row < 0 ? nullptr : at + x.codes;
  tile.meta[threadIdx.x] = out_row < 0 ? nullptr : at + x.meta;
  tile.out_row[threadIdx.x] = out_row;
}

// sums + 12582912 (1.5 * 2 ** 23) as a float is the sum plus that number, exactly, since sums stay
// below 2 ** 22 (32 * 127 * 128): one subtraction where a conversion takes four times as long.
enum { MAGIC_BITS = 0x4b400000 };
DEVICE float from_magic(int bits) { return __int_as_float(bits) - 12582912.f; }

// The products of one group: sums [2][4][4] of this warp's 32 outputs and 32 tokens. The fragments and
// scales of the outputs stay in registers (8 words and 4, 8 or 16 floats) while the tokens pass.
DEVICE void add_group(const Tile& tile, int group, int warp_out, int warp_token, float (&sums)[2][4][4]) {
  const int g = LANE >> 2, t = LANE & 3;
  u32 a[2][4];
  float d[2][PARTS][2], minimum[2][PARTS][2];
#pragma unroll
  for (int m = 0; m < 2; m++) {
    const int row = warp_out + 16 * m + g;
    const i8* at = tile.weights + row * STRIDE + 32 * group + 4 * t;
    a[m][0] = *(const u32*)at;
    a[m][1] = *(const u32*)(at + 8 * STRIDE);
    a[m][2] = *(const u32*)(at + 16);
    a[m][3] = *(const u32*)(at + 8 * STRIDE + 16);
#pragma unroll
    for (int p = 0; p < PARTS; p++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        d[m][p][r] = tile.d[group][p][row + 8 * r];
        minimum[m][p][r] = W::HAS_MIN ? tile.m[group][p][row + 8 * r] : 0.f;
      }
  }
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const i8* at = tile.x + (warp_token + 8 * n + g) * STRIDE + 32 * group + 4 * t;
    const u32 b[2] = {*(const u32*)at, *(const u32*)(at + 16)};
    const int token = warp_token + 8 * n + 2 * t;
    const float2 both = *(const float2*)&tile.x_scale[group][token];
    const float scale[2] = {both.x, both.y};
    float x_sum[PARTS][2];
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
      const float2 two = *(const float2*)&tile.x_sum[group][p][token];
      x_sum[p][0] = two.x;
      x_sum[p][1] = two.y;
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
      int c[PARTS][4];
#pragma unroll
      for (int p = 0; p < PARTS; p++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[p][i] = MAGIC_BITS;
      if (W::HALVES) {
        mma16(c[0], a[m][0], a[m][1], b[0]);
        mma16(c[PARTS - 1], a[m][2], a[m][3], b[1]);
      } else {
        mma32(c[0], a[m], b);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = i >> 1, k = i & 1;
        float part = d[m][0][r] * from_magic(c[0][i]);
        if (W::HALVES) part += d[m][PARTS - 1][r] * from_magic(c[PARTS - 1][i]);
        sums[m][n][i] += scale[k] * part;
        if (W::HAS_MIN) {
#pragma unroll
          for (int p = 0; p < PARTS; p++) sums[m][n][i] -= minimum[m][p][r] * x_sum[p][k];
        }
      }
    }
  }
}

// The tile whose rows were set (out_row -1: none), from output `first_out` on.
DEVICE void multiply(Tile& tile, const u8* matrix, int n_in, int n_out, int first_out, const float* bias,
                     float* out, int out_stride, int accumulate) {
  const int thread = threadIdx.x, n_groups = n_in >> 5;
  const int warp_out = 32 * (WARP & 3), warp_token = 32 * (WARP >> 2);
  // This thread's part: group thread % 2 of output thread / 2, and 16 bytes of token thread / 4.
  const int my_out = thread >> 1, my_group = thread & 1, my_token = thread >> 2, my_part = thread & 3;
  const int meta_token = thread >> 1;  // threads 0 .. 127: scale of group thread % 2 of that token
  Place at = {matrix, (size_t)n_out, n_groups, (size_t)min(first_out + my_out, n_out - 1), 0};
  const u8* my_codes = tile.codes[my_token];
  const u8* my_meta = thread < 128 ? tile.meta[meta_token] : nullptr;
  float sums[2][4][4];
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[m][n][i] = 0.f;

  W weights;
  int4 codes = make_int4(0, 0, 0, 0);
  int2 meta = make_int2(0, 0);
  const int n_steps = (n_groups + 1) >> 1;
  for (int step = -1; step < n_steps; step++) {
    if (step >= 0) {  // what was asked for in the step before goes to shared memory
      int q[8];
      Scales s;
      s.d[0] = s.d[1] = s.m[0] = s.m[1] = 0.f;
      if (2 * step + my_group < n_groups) {
        weights.decode(2 * step + my_group, q, s);
      } else {
#pragma unroll
        for (int j = 0; j < 8; j++) q[j] = 0;
      }
      int4* to = (int4*)(tile.weights + my_out * STRIDE + 32 * my_group);
      to[0] = make_int4(q[0], q[1], q[2], q[3]);
      to[1] = make_int4(q[4], q[5], q[6], q[7]);
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        tile.d[my_group][p][my_out] = s.d[p];
        tile.m[my_group][p][my_out] = W::HAS_MIN ? s.m[p] : 0.f;
      }
      *(int4*)(tile.x + my_token * STRIDE + 16 * my_part) = codes;
      if (thread < 128) {
        const float scale = __int_as_float(meta.x);
        const int sum0 = (short)(meta.y & 0xffff), sum1 = meta.y >> 16;
        tile.x_scale[my_group][meta_token] = scale;
        tile.x_sum[my_group][0][meta_token] = scale * (float)(W::HALVES ? sum0 : sum0 + sum1);
        if (W::HALVES) tile.x_sum[my_group][PARTS - 1][meta_token] = scale * (float)sum1;
      }
    }
    __syncthreads();
    const int next = 2 * (step + 1);
    if (next < n_groups) {
      codes = make_int4(0, 0, 0, 0);
      meta = make_int2(0, 0);
      if (next + my_group < n_groups) {
        at.group = next + my_group;
        weights.load(at);
        if (my_meta) meta = ((const int2*)my_meta)[next + my_group];
      }
      if (my_codes && next + (my_part >> 1) < n_groups)
        codes = ((const int4*)my_codes)[2 * next + my_part];
    }
    if (step >= 0) {
      add_group(tile, 0, warp_out, warp_token, sums);
      add_group(tile, 1, warp_out, warp_token, sums);
    }
    __syncthreads();
  }

  const int g = LANE >> 2, t = LANE & 3;
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = first_out + warp_out + 16 * m + g + 8 * (i >> 1);
        const int to = tile.out_row[warp_token + 8 * n + 2 * t + (i & 1)];
        if (to < 0 || row >= n_out) continue;
        float* y = out + (size_t)to * out_stride + row;
        const float sum = sums[m][n][i] + (bias ? bias[row] : 0.f);
        *y = accumulate ? *y + sum : sum;
      }
}

// grid (n_out / 128, rows / 64, heads), block 256
extern "C" __global__ void __launch_bounds__(256, 2)
matmul(const u8* __restrict__ matrix, int matrix_units, const u8* __restrict__ x, int x_stride,
       const float* __restrict__ bias, float* __restrict__ out, const int* __restrict__ count, int n_in,
       int n_out, int n_heads, int accumulate) {
  __shared__ Tile tile;
  const int n_rows = *count, first = blockIdx.y * TOKENS, head = blockIdx.z;
  if (first >= n_rows) return;
  if (threadIdx.x < TOKENS) {
    const int row = first + threadIdx.x;
    set_row(tile, part_of(x, x_stride, n_in, n_heads, head), row, row < n_rows ? row : -1);
  }
  __syncthreads();
  multiply(tile, matrix + (size_t)matrix_units * 256 * head, n_in, n_out, blockIdx.x * OUTS,
           bias ? bias + head * n_out : bias, out + head * n_out, n_heads * n_out, accumulate);
}

// grid (n_out / 128, pairs / 64, experts), block 256: `order` holds the pairs (row * n_used + rank) of
// each expert one behind the other, `starts` [n_experts + 1] where they begin (route.cu).
extern "C" __global__ void __launch_bounds__(256, 2)
expert_matmul(const u8* __restrict__ matrix, int matrix_units, const u8* __restrict__ x, int x_stride,
              const float* __restrict__ bias, float* __restrict__ out, const int* __restrict__ order,
              const int* __restrict__ starts, int n_in, int n_out, int n_used, int per_rank) {
  __shared__ Tile tile;
  const int expert = blockIdx.z, first = starts[expert] + blockIdx.y * TOKENS, end = starts[expert + 1];
  if (first >= end) return;
  if (threadIdx.x < TOKENS) {
    const int i = first + threadIdx.x, pair = i < end ? order[i] : -1;
    const Activations a = part_of(x, x_stride, n_in, per_rank ? n_used : 1, per_rank ? pair % n_used : 0);
    set_row(tile, a, pair / n_used, pair);
  }
  __syncthreads();
  multiply(tile, matrix + (size_t)matrix_units * 256 * expert, n_in, n_out, blockIdx.x * OUTS,
           bias ? bias + (size_t)expert * n_out : bias, out, n_out, 0);
}

// ---- rows of a table ------------------------------------------------------------------------------

// out[i] = row numbers[i] of the table; grid (n_in / 32 / 128, rows), block 128, a thread a group
extern "C" __global__ void __launch_bounds__(128)
table_rows(const u8* __restrict__ table, const int* __restrict__ numbers, float* __restrict__ out,
           const int* __restrict__ count, int n_in, int n_out) {
  const int group = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y, n_groups = n_in >> 5;
  if (row >= *count || group >= n_groups) return;
  const Place at = {table, (size_t)n_out, n_groups, (size_t)numbers[row], group};
  W weights;
  weights.load(at);
  int q[8];
  Scales s;
  weights.decode(group, q, s);
  float4* to = (float4*)(out + (size_t)row * n_in + 32 * group);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    const int part = W::HALVES && j >= 4;
    float v[4];
#pragma unroll
    for (int b = 0; b < 4; b++) {
      v[b] = s.d[part] * (float)(i8)(q[j] >> (8 * b));
      if (W::HAS_MIN) v[b] -= s.m[part];
    }
    to[j] = make_float4(v[0], v[1], v[2], v[3]);
  }
}
