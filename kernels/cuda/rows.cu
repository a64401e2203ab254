// Rows of activations: norms, rotation, choosing and rearranging. Each reads and writes every float
// once or twice, neighbours side by side. A norm has a block for a run: a warp for a head, up to 1024
// threads for a row, since with one generated token one block is all that runs.
#include "common.cuh"

// y = x / sqrt(mean(x^2) + eps) * weight over runs of n elements; a weight of several rows has one
// for each run of a row. grid (runs of a row, rows), block 32, 256 or 1024. y may be x.
extern "C" __global__ void __launch_bounds__(1024)
rms_norm(const float* __restrict__ x, const float* __restrict__ weight, float* y, const int* __restrict__ count,
         int n, int weight_rows, float eps) {
  __shared__ float parts[32];
  const int run = blockIdx.x, row = blockIdx.y;
  if (row >= *count) return;
  const size_t at = ((size_t)row * gridDim.x + run) * n;
  const float* w = weight + (size_t)(run % weight_rows) * n;
  float sum = 0.f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum = fmaf(x[at + i], x[at + i], sum);
  sum = block_sum(sum, parts);
  const float factor = 1.f / sqrtf(sum / (float)n + eps);
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[at + i] = x[at + i] * factor * w[i];
}

// y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias; no bias: null
extern "C" __global__ void __launch_bounds__(1024)
layer_norm(const float* __restrict__ x, const float* __restrict__ weight, const float* __restrict__ bias, float* y,
           const int* __restrict__ count, int n, int weight_rows, float eps) {
  __shared__ float parts[32], more_parts[32];
  const int run = blockIdx.x, row = blockIdx.y;
  if (row >= *count) return;
  const size_t at = ((size_t)row * gridDim.x + run) * n, of = (size_t)(run % weight_rows) * n;
  float sum = 0.f, squares = 0.f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[at + i];
  const float mean = block_sum(sum, parts) / (float)n;
  for (int i = threadIdx.x; i < n; i += blockDim.x) squares = fmaf(x[at + i] - mean, x[at + i] - mean, squares);
  const float factor = 1.f / sqrtf(block_sum(squares, more_parts) / (float)n + eps);
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const float scaled = (x[at + i] - mean) * factor * weight[of + i];
    y[at + i] = bias ? scaled + bias[of + i] : scaled;
  }
}

// y = x / sqrt(sum(x^2) + eps) over runs of n elements
extern "C" __global__ void __launch_bounds__(1024)
l2_norm(const float* __restrict__ x, float* y, const int* __restrict__ count, int n, float eps) {
  __shared__ float parts[32];
  const int row = blockIdx.y;
  if (row >= *count) return;
  const size_t at = ((size_t)row * gridDim.x + blockIdx.x) * n;
  float sum = 0.f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum = fmaf(x[at + i], x[at + i], sum);
  const float factor = 1.f / sqrtf(block_sum(sum, parts) + eps);
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[at + i] = x[at + i] * factor;
}

// Cosines and sines [rows][dim / 2] of this step's positions, once for all layers: the angle in double,
// as the table of the other back ends has it (kernels/rope.py). grid (dim / 2 / 32, rows), block 32
extern "C" __global__ void __launch_bounds__(32)
rope_angles(const int* __restrict__ positions, const double* __restrict__ frequencies, float2* __restrict__ out,
            const int* __restrict__ count, int n_pairs, float magnitude) {
  const int pair = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y;
  if (row >= *count || pair >= n_pairs) return;
  const double angle = (double)positions[row] * frequencies[pair];
  out[(size_t)row * n_pairs + pair] = make_float2((float)(cos(angle) * magnitude), (float)(sin(angle) * magnitude));
}

// Turn the pairs of each head: (i, i + n_pairs), or (2 i, 2 i + 1) with `neighbours`; elements behind
// the pairs stay. grid (dim / 2 / 128, rows), block 128, a thread two elements. y may be x.
extern "C" __global__ void __launch_bounds__(128)
rope(const float* x, const float2* __restrict__ angles, float* y, const int* __restrict__ count, int dim,
     int head_dim, int n_pairs, int neighbours) {
  const int i = blockIdx.x * 128 + threadIdx.x, row = blockIdx.y, half_head = head_dim / 2;
  if (row >= *count || i >= dim / 2) return;
  const int head = i / half_head, pair = i % half_head;
  const size_t at = (size_t)row * dim + (size_t)head * head_dim;
  if (pair >= n_pairs) {
    const size_t rest = at + 2 * n_pairs + 2 * (pair - n_pairs);
    y[rest] = x[rest];
    y[rest + 1] = x[rest + 1];
    return;
  }
  const size_t first = at + (neighbours ? 2 * pair : pair), second = first + (neighbours ? 1 : n_pairs);
  const float2 pair_turned = turned(x[first], x[second], angles[(size_t)row * n_pairs + pair]);
  y[first] = pair_turned.x;
  y[second] = pair_turned.y;
}

// y = x * (1 + scale * log(1 + position / length)), whole lengths
extern "C" __global__ void __launch_bounds__(256)
temper(const float* __restrict__ x, const int* __restrict__ positions, float* y, const int* __restrict__ count,
       int dim, float scale, int length) {
  const int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
  if (row >= *count || i >= dim) return;
  const float factor = (float)(1. + (double)scale * log1p((double)(positions[row] / length)));
  y[(size_t)row * dim + i] = x[(size_t)row * dim + i] * factor;
}

// out[i] = x[numbers[i]]; grid (dim / 256, rows)
extern "C" __global__ void __launch_bounds__(256)
copy_rows(const float* __restrict__ x, const int* __restrict__ numbers, float* __restrict__ out,
          const int* __restrict__ count, int dim) {
  const int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
  if (row >= *count || i >= dim) return;
  out[(size_t)row * dim + i] = x[(size_t)numbers[row] * dim + i];
}

// Elements start .. start + n - 1 of each run of `run` elements
extern "C" __global__ void __launch_bounds__(256)
slice(const float* __restrict__ x, float* __restrict__ out, const int* __restrict__ count, int dim, int start, int n, int run) {
  const int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y, out_dim = dim / run * n;
  if (row >= *count || i >= out_dim) return;
  out[(size_t)row * out_dim + i] = x[(size_t)row * dim + i / n * run + start + i % n];
}

// Head by head: n_x elements of x, then n_y of y, which is one head for all when shared
extern "C" __global__ void __launch_bounds__(256)
join(const float* __restrict__ x, const float* __restrict__ y, float* __restrict__ out, const int* __restrict__ count,
     int n_heads, int n_x, int n_y, int shared) {
  const int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y, width = n_x + n_y;
  if (row >= *count || i >= n_heads * width) return;
  const int head = i / width, place = i % width;
  out[(size_t)row * n_heads * width + i] =
      place < n_x ? x[((size_t)row * n_heads + head) * n_x + place]
                  : y[(shared ? (size_t)row : (size_t)row * n_heads + head) * n_y + place - n_x];
}
