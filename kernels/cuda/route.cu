// Mixture of experts: who is chosen, whose rows are whose, and the sum of what they say. The experts'
// matrices are in linear.cu.
#include "common.cuh"

enum { MOST_EXPERTS = 1024, MOST_GROUPS = 64, THREADS = 128 };

// The best of n numbers that `is_taken` leaves, ties to the lower one; a warp's answer. NaN counts as
// less than anything, so that as many are chosen whatever the numbers.
DEVICE int best_of(const float* x, const u8* is_taken, int n) {
  float best = NEGATIVE_INFINITY;
  int found = 0x7fffffff;
  for (int i = LANE; i < n; i += 32) {
    if (is_taken[i]) continue;
    const float v = x[i] == x[i] ? x[i] : NEGATIVE_INFINITY;
    if (found == 0x7fffffff || v > best) { best = v; found = i; }
  }
#pragma unroll
  for (int step = 16; step; step >>= 1) {
    const float v = __shfl_xor_sync(ALL_LANES, best, step);
    const int i = __shfl_xor_sync(ALL_LANES, found, step);
    if (v > best || (v == best && i < found)) { best = v; found = i; }
  }
  return found;
}

// See moe_route in kernels/graph.py. One block a row: shares in shared memory, then its first warp takes
// the best one by one. is_sigmoid 0: softmax. grid rows, block 128.
extern "C" __global__ void __launch_bounds__(128)
moe_route(const float* __restrict__ logits, const float* __restrict__ bias, float* __restrict__ route,
          const int* __restrict__ count, int n_experts, int n_used, int normalize, int is_sigmoid, float scale,
          int n_groups, int n_groups_used) {
  __shared__ float share[MOST_EXPERTS], ranked[MOST_EXPERTS], group_score[MOST_GROUPS], parts[32], more_parts[32];
  __shared__ u8 taken[MOST_EXPERTS], group_taken[MOST_GROUPS];
  __shared__ int chosen[MOST_EXPERTS];
  const int row = blockIdx.x;
  if (row >= *count) return;
  const float* x = logits + (size_t)row * n_experts;
  float top = NEGATIVE_INFINITY, sum = 0.f;
  if (!is_sigmoid) {
    for (int i = threadIdx.x; i < n_experts; i += THREADS) top = fmaxf(top, x[i]);
    top = warp_max(top);
    if (LANE == 0) parts[WARP] = top;
    __syncthreads();
    for (int w = 0; w < THREADS / 32; w++) top = fmaxf(top, parts[w]);
    for (int i = threadIdx.x; i < n_experts; i += THREADS) sum += expf(x[i] - top);
    sum = block_sum(sum, more_parts);
  }
  for (int i = threadIdx.x; i < n_experts; i += THREADS) {
    share[i] = is_sigmoid ? sigmoid(x[i]) : expf(x[i] - top) / sum;
    // Logits have the order of their softmax, without what rounding ties.
    ranked[i] = bias ? share[i] + bias[i] : is_sigmoid || n_groups > 1 ? share[i] : x[i];
    taken[i] = 0;
  }
  __syncthreads();
  if (n_groups > 1) {
    const int size = n_experts / n_groups;
    if (threadIdx.x < n_groups) {  // a group counts as its best expert, with a bias as its two best
      float first = NEGATIVE_INFINITY, second = NEGATIVE_INFINITY;
      for (int i = 0; i < size; i++) {
        const float v = ranked[threadIdx.x * size + i];
        if (v > first) { second = first; first = v; }
        else if (v > second) second = v;
      }
      group_score[threadIdx.x] = bias && size > 1 ? first + second : first;
      group_taken[threadIdx.x] = 0;
    }
    __syncthreads();
    if (WARP == 0)
      for (int k = 0; k < n_groups_used; k++) {
        const int g = best_of(group_score, group_taken, n_groups);
        __syncwarp();
        if (LANE == 0) group_taken[g] = 1;
        __syncwarp();
      }
    __syncthreads();
    for (int i = threadIdx.x; i < n_experts; i += THREADS)
      if (!group_taken[i / size]) ranked[i] = NEGATIVE_INFINITY;
    __syncthreads();
  }
  if (WARP) return;
  for (int k = 0; k < n_used; k++) {
    const int expert = best_of(ranked, taken, n_experts);
    __syncwarp();
    if (LANE == 0) { chosen[k] = expert; taken[expert] = 1; }
    __syncwarp();
  }
  float total = 0.f;
  for (int k = 0; k < n_used; k++) total += share[chosen[k]];
  float* out = route + (size_t)row * 2 * n_used;
  for (int k = LANE; k < n_used; k += 32) {
    const float weight = normalize ? share[chosen[k]] / total : share[chosen[k]];
    out[k] = (float)chosen[k];
    out[n_used + k] = weight * scale;
  }
}

// Pairs (row * n_used + rank) by expert, in order of the pair: each block looks at all of them, which
// for 512 rows of 8 experts are 16 KB from L2. grid experts, block 256.
extern "C" __global__ void __launch_bounds__(256)
group_pairs(const float* __restrict__ route, int* __restrict__ order, int* __restrict__ starts,
            const int* __restrict__ count, int n_used, int n_experts) {
  __shared__ int before[8];
  const int expert = blockIdx.x, n_pairs = *count * n_used;
  int less = 0;
  for (int pair = threadIdx.x; pair < n_pairs; pair += 256)
    less += (int)route[(size_t)(pair / n_used) * 2 * n_used + pair % n_used] < expert;
#pragma unroll
  for (int step = 16; step; step >>= 1) less += __shfl_xor_sync(ALL_LANES, less, step);
  if (LANE == 0) before[WARP] = less;
  __syncthreads();
  int at = 0;
  for (int w = 0; w < 8; w++) at += before[w];
  if (threadIdx.x == 0) {
    starts[expert] = at;
    if (expert == n_experts - 1) starts[n_experts] = n_pairs;
  }
  for (int base = 0; base < n_pairs; base += 256) {
    const int pair = base + threadIdx.x;
    const int is_mine = pair < n_pairs && (int)route[(size_t)(pair / n_used) * 2 * n_used + pair % n_used] == expert;
    const u32 mine = __ballot_sync(ALL_LANES, is_mine);
    __syncthreads();  // all have read what stands in `before`
    if (LANE == 0) before[WARP] = __popc(mine);
    __syncthreads();
    int place = at + __popc(mine & ((1u << LANE) - 1));
    for (int w = 0; w < 8; w++) {
      if (w < WARP) place += before[w];
      at += before[w];
    }
    if (is_mine) order[place] = pair;
  }
}

// out = sum of x [n_rows, n_used, dim] by weight, in order of rank. grid (dim / 256, rows)
extern "C" __global__ void __launch_bounds__(256)
moe_sum(const float* __restrict__ x, const float* __restrict__ route, float* __restrict__ out,
        const int* __restrict__ count, int dim, int n_used) {
  const int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
  if (row >= *count || i >= dim) return;
  const float* weight = route + (size_t)row * 2 * n_used + n_used;
  float sum = 0.f;
  for (int k = 0; k < n_used; k++) {
    const float part = x[((size_t)row * n_used + k) * dim + i] * weight[k];
    sum = k ? sum + part : part;
  }
  out[(size_t)row * dim + i] = sum;
}
