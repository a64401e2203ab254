// Keys and values into the cache (kv_cache.cuh), and attention over it.
//
// Positions are cut into pieces of 256 that begin at multiples of 256. A block of threads
// has up to 8 queries that share a key-value head (heads of one token, or of several tokens of a
// prompt) and reduces a piece from scratch with its own maximum; pieces are merged by one function in
// ascending order. A lane scores a whole key by itself against the queries in shared memory, so a
// score needs no shuffle and each key is read once for 8 queries (2 bytes for 16 multiply-adds in
// f16). For the values a thread has 8 elements of a token and goes through the piece.
//
// Generated tokens: `attention_split` leaves a state for each piece, so that a long context keeps the
// GPU busy, and `attention_merge` puts them together. Prompt tokens: `attention_whole` goes through
// all pieces by itself. Both do the same arithmetic.
#include "kv_cache.cuh"

enum { PIECE = 256, QUERIES = 8, THREADS = 128 };
#define NOTHING -1e30f  // the maximum where no key is seen; finite, so that 0 * it stays 0

typedef KEYS K;
typedef VALUES V;

// ---- writing --------------------------------------------------------------------------------------

// How heads are turned before they are stored or asked with: see rope in rows.cu. No angles: not at all.
struct Turn {
  const float2* angles;  // of the row
  int n_pairs, neighbours;
};
DEVICE float element(const float* head, int i, const Turn& turn) {
  if (!turn.angles || i >= 2 * turn.n_pairs) return head[i];
  const int pair = turn.neighbours ? i >> 1 : i % turn.n_pairs;
  const int first = turn.neighbours ? 2 * pair : pair, second = first + (turn.neighbours ? 1 : turn.n_pairs);
  const float2 both = turned(head[first], head[second], turn.angles[pair]);
  return i == first ? both.x : both.y;
}

template <class T>
DEVICE void store(const float* x, u8* pool, int slot, int dim, int n_heads, int unit, const Turn& turn) {
  const int groups = (dim + 31) / 32, head = unit / groups, g = unit % groups;
  float v[32];
  for (int i = 0; i < 32; i++) v[i] = 32 * g + i < dim ? element(x + head * dim, 32 * g + i, turn) : 0.f;
  u8* tile = pool + ((size_t)(slot >> 5) * n_heads + head) * tile_bytes<T>(32 * groups);
  store32(T(), tile, slot & 31, g, v);
}

// A thread has 32 elements of a head: a tile's dim is rounded up to 32, so that one rule holds for all
// types. Keys, then values. A slot below 0 is not written.
DEVICE void store_unit(const float* k, const float* v, u8* keys, u8* values, int slot, int row, int n_kv_heads,
                       int unit, const Turn& turn) {
  const int n_keys = n_kv_heads * ((HEAD_DIM + 31) / 32), n_values = n_kv_heads * ((V_DIM + 31) / 32);
  const Turn still = {nullptr, 0, 0};
  if (slot < 0) return;
  if (unit < n_keys) store<K>(k + (size_t)row * n_kv_heads * HEAD_DIM, keys, slot, HEAD_DIM, n_kv_heads, unit, turn);
  else if (unit < n_keys + n_values)
    store<V>(v + (size_t)row * n_kv_heads * V_DIM, values, slot, V_DIM, n_kv_heads, unit - n_keys, still);
}

// grid (heads * groups / 64, rows), block 64
extern "C" __global__ void __launch_bounds__(64)
kv_store(const float* __restrict__ k, const float* __restrict__ v, u8* __restrict__ keys, u8* __restrict__ values,
         const int* __restrict__ slots, const int* __restrict__ count, int n_kv_heads) {
  const int row = blockIdx.y;
  if (row >= *count) return;
  const Turn still = {nullptr, 0, 0};
  store_unit(k, v, keys, values, slots[row], row, n_kv_heads, blockIdx.x * 64 + threadIdx.x, still);
}

// The same of keys that are turned first, and the queries turned: the bits of rope twice and kv_store in
// one launch. grid ((n_heads * HEAD_DIM / 32 + units of kv_store) / 64, rows)
extern "C" __global__ void __launch_bounds__(64)
rope_store(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
           const float2* __restrict__ angles, float* __restrict__ turned_q, u8* __restrict__ keys,
           u8* __restrict__ values, const int* __restrict__ slots, const int* __restrict__ count, int n_heads,
           int n_kv_heads, int n_pairs, int neighbours) {
  const int row = blockIdx.y, unit = blockIdx.x * 64 + threadIdx.x, groups = (HEAD_DIM + 31) / 32;
  if (row >= *count) return;
  const Turn turn = {angles + (size_t)row * n_pairs, n_pairs, neighbours};
  if (unit >= n_heads * groups) {
    store_unit(k, v, keys, values, slots[row], row, n_kv_heads, unit - n_heads * groups, turn);
    return;
  }
  const size_t head = ((size_t)row * n_heads + unit / groups) * HEAD_DIM;
  const int end = min(HEAD_DIM, 32 * (unit % groups) + 32);
  for (int i = 32 * (unit % groups); i < end; i++) turned_q[head + i] = element(q + head, i, turn);
}

// ---- reading --------------------------------------------------------------------------------------

enum {
  CHUNKS = V_DIM / 8,  // of 8 elements of a value; a thread has one of them for every TOKEN_LANES-th token
  FIT = THREADS / CHUNKS,
  TOKEN_LANES = FIT >= 32 ? 32 : FIT >= 16 ? 16 : FIT >= 8 ? 8 : FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1,
  ROUNDS = (CHUNKS + THREADS / TOKEN_LANES - 1) / (THREADS / TOKEN_LANES)  // more than one above 1024 elements
};

struct Step {  // what the queries of a block have in common
  const int* table;  // of their sequence
  int tiles_of_block, n_kv_heads, kv_head, n_queries;
  float scale, softcap;
  const u8 *keys, *values;
};

struct Shared {
  __align__(16) float query[QUERIES][HEAD_DIM];
  float score[QUERIES][PIECE];
  float top[QUERIES], total[QUERIES];
  int first[QUERIES], last[QUERIES];  // the keys a query sees
};

// The tile with the tokens from `position` on, which is a multiple of 32.
DEVICE size_t tile_of(const Step& s, int position) {
  const int tile = position >> 5;
  return (size_t)s.table[tile / s.tiles_of_block] * s.tiles_of_block + tile % s.tiles_of_block;
}

// A piece from scratch: shared.top and shared.total of each query, and sums of weighted values: thread
// (chunk, token lane) returns the sum over all token lanes of its 8 elements in acc.
DEVICE void piece(const Step& s, Shared& shared, int begin, float (&acc)[ROUNDS][QUERIES][8]) {
  int first = shared.first[0], last = shared.last[0];
  for (int i = 1; i < s.n_queries; i++) { first = min(first, shared.first[i]); last = max(last, shared.last[i]); }
  const int from = max(begin, first & ~31), to = min(begin + PIECE, last + 1);
  for (int i = threadIdx.x; i < QUERIES * PIECE; i += THREADS) shared.score[i / PIECE][i % PIECE] = NOTHING;
  __syncthreads();

  for (int tile = from + 32 * WARP; tile < to; tile += THREADS) {
    const u8* keys = s.keys + (tile_of(s, tile) * s.n_kv_heads + s.kv_head) * tile_bytes<K>((HEAD_DIM + 31) / 32 * 32);
    const int position = tile + LANE;
    float score[QUERIES];
#pragma unroll
    for (int i = 0; i < QUERIES; i++) score[i] = 0.f;
    if (position <= last) {  // behind it the cache may hold anything
#pragma unroll 2
      for (int c = 0; c < HEAD_DIM / 8; c++) {
        float key[8];
        load8(K(), keys, LANE, c, key);
#pragma unroll
        for (int i = 0; i < QUERIES; i++) {
          if (i >= s.n_queries) break;
          const float4* q = (const float4*)&shared.query[i][8 * c];
          const float4 a = q[0], b = q[1];
          score[i] = fmaf(a.x, key[0], fmaf(a.y, key[1], fmaf(a.z, key[2], fmaf(a.w, key[3], score[i]))));
          score[i] = fmaf(b.x, key[4], fmaf(b.y, key[5], fmaf(b.z, key[6], fmaf(b.w, key[7], score[i]))));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < QUERIES; i++) {
      if (i >= s.n_queries || position < shared.first[i] || position > shared.last[i]) continue;
      float x = score[i] * s.scale;
      if (s.softcap > 0.f) x = s.softcap * tanhf(x / s.softcap);
      shared.score[i][position - begin] = x;
    }
  }
  __syncthreads();

  for (int i = WARP; i < s.n_queries; i += THREADS / 32) {
    float top = NOTHING, total = 0.f;
    for (int k = LANE; k < PIECE; k += 32) top = fmaxf(top, shared.score[i][k]);
    top = warp_max(top);
    for (int k = LANE; k < PIECE; k += 32) {
      const float x = shared.score[i][k], weight = x == NOTHING ? 0.f : expf(x - top);
      shared.score[i][k] = weight;
      total += weight;
    }
    total = warp_sum(total);
    if (LANE == 0) { shared.top[i] = top; shared.total[i] = total; }
  }
  __syncthreads();

  const int token_lane = threadIdx.x % TOKEN_LANES;
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) {
    const int chunk = threadIdx.x / TOKEN_LANES + round * (THREADS / TOKEN_LANES);
#pragma unroll
    for (int i = 0; i < QUERIES; i++)
#pragma unroll
      for (int j = 0; j < 8; j++) acc[round][i][j] = 0.f;
    if (chunk < CHUNKS) {
      for (int tile = from; tile < to; tile += 32) {
        const u8* values = s.values + (tile_of(s, tile) * s.n_kv_heads + s.kv_head) * tile_bytes<V>((V_DIM + 31) / 32 * 32);
        for (int t = token_lane; t < 32; t += TOKEN_LANES) {
          if (tile + t > last) break;
          float value[8];
          load8(V(), values, t, chunk, value);
#pragma unroll
          for (int i = 0; i < QUERIES; i++) {
            if (i >= s.n_queries) break;
            const float weight = shared.score[i][tile + t - begin];
            if (weight == 0.f) continue;  // not seen by this query: 0 * NaN would be NaN
#pragma unroll
            for (int j = 0; j < 8; j++) acc[round][i][j] = fmaf(weight, value[j], acc[round][i][j]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < QUERIES; i++) {
      if (i >= s.n_queries) break;
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int step = TOKEN_LANES / 2; step; step >>= 1)
          acc[round][i][j] += __shfl_xor_sync(ALL_LANES, acc[round][i][j], step);
    }
  }
}

// The state of what was seen so far and that of the next piece, put together.
DEVICE void merge_factors(float& top, float& total, float next_top, float next_total, float& old_factor, float& new_factor) {
  const float larger = fmaxf(top, next_top);
  old_factor = expf(top - larger);
  new_factor = expf(next_top - larger);
  total = total * old_factor + next_total * new_factor;
  top = larger;
}

// The learned score of one more key, whose value is zero, joins at the end.
DEVICE float denominator(float top, float total, const float* sinks, int head, float& factor) {
  factor = 1.f;
  if (!sinks) return total;
  const float larger = fmaxf(top, sinks[head]);
  factor = expf(top - larger);
  return total * factor + expf(sinks[head] - larger);
}

// Queries of this block: heads head0 .. of each of n_tokens rows from `row` on. Fills shared.
DEVICE void fetch(Shared& shared, const float* q, const int* positions, const int* last_seen, int row, int n_tokens,
                  int head0, int n_heads_here, int n_heads, int window) {
  const int n = n_tokens * n_heads_here;
  for (int i = threadIdx.x; i < n * HEAD_DIM; i += THREADS) {
    const int query = i / HEAD_DIM, token = query / n_heads_here, head = head0 + query % n_heads_here;
    shared.query[query][i % HEAD_DIM] = q[((size_t)(row + token) * n_heads + head) * HEAD_DIM + i % HEAD_DIM];
  }
  if (threadIdx.x < n) {
    const int at = row + threadIdx.x / n_heads_here;
    shared.first[threadIdx.x] = window > 0 ? max(0, positions[at] - window + 1) : 0;
    shared.last[threadIdx.x] = last_seen[at];
  }
  __syncthreads();
}

// grid (units, blocks, rows), block 128: one token's heads of a unit, every gridDim.y-th piece. A unit
// are n_heads_here heads of a key-value head. partials [rows][units][n_pieces][n_heads_here][V_DIM + 2].
extern "C" __global__ void __launch_bounds__(128)
attention_split(const float* __restrict__ q, const u8* __restrict__ keys, const u8* __restrict__ values,
                float* __restrict__ partials, const int* __restrict__ positions, const int* __restrict__ last_seen,
                const int* __restrict__ table, const int* __restrict__ sequences, const int* __restrict__ count,
                int table_row, int block_tokens, int n_heads, int n_kv_heads, int n_heads_here, int n_pieces,
                int window, float scale, float softcap) {
  __shared__ Shared shared;
  const int unit = blockIdx.x, row = blockIdx.z;
  if (row >= *count) return;
  const int first = window > 0 ? max(0, positions[row] - window + 1) : 0;
  int begin = (first / PIECE + (int)blockIdx.y) * PIECE;
  if (begin > last_seen[row]) return;
  const int head0 = unit * n_heads_here;
  Step s = {table + (size_t)sequences[row] * table_row, block_tokens / 32, n_kv_heads,
            head0 / (n_heads / n_kv_heads), n_heads_here, scale, softcap, keys, values};
  fetch(shared, q, positions, last_seen, row, 1, head0, n_heads_here, n_heads, window);
  float* out = partials + (((size_t)row * gridDim.x + unit) * n_pieces + blockIdx.y) * n_heads_here * (V_DIM + 2);
  for (; begin <= shared.last[0]; begin += PIECE * gridDim.y) {
    float acc[ROUNDS][QUERIES][8];
    piece(s, shared, begin, acc);
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
      const int chunk = threadIdx.x / TOKEN_LANES + round * (THREADS / TOKEN_LANES);
      if (threadIdx.x % TOKEN_LANES || chunk >= CHUNKS) continue;
#pragma unroll
      for (int i = 0; i < QUERIES; i++) {
        if (i >= n_heads_here) break;
#pragma unroll
        for (int j = 0; j < 8; j++) out[i * (V_DIM + 2) + 2 + 8 * chunk + j] = acc[round][i][j];
      }
    }
    if (threadIdx.x < n_heads_here) {
      out[threadIdx.x * (V_DIM + 2)] = shared.top[threadIdx.x];
      out[threadIdx.x * (V_DIM + 2) + 1] = shared.total[threadIdx.x];
    }
    out += (size_t)gridDim.y * n_heads_here * (V_DIM + 2);
    __syncthreads();  // before the next piece writes top and total
  }
}

// grid (heads, rows), block 128: the pieces of a token's head in ascending order
extern "C" __global__ void __launch_bounds__(128)
attention_merge(const float* __restrict__ partials, float* __restrict__ out, const int* __restrict__ positions,
                const int* __restrict__ last_seen, const float* __restrict__ sinks, const int* __restrict__ count,
                int n_pieces, int n_heads, int n_heads_here, int window) {
  const int head = blockIdx.x, row = blockIdx.y;
  if (row >= *count) return;
  const int first = (window > 0 ? max(0, positions[row] - window + 1) : 0) / PIECE;
  const int n = min(n_pieces, last_seen[row] / PIECE - first + 1), n_units = n_heads / n_heads_here;
  const size_t stride = (size_t)n_heads_here * (V_DIM + 2);
  const float* in = partials + ((size_t)row * n_units + head / n_heads_here) * n_pieces * stride +
                    (size_t)(head % n_heads_here) * (V_DIM + 2);
  for (int d = threadIdx.x; d < V_DIM; d += THREADS) {
    float top = NOTHING, total = 0.f, sum = 0.f;
    for (int p = 0; p < n; p++) {
      const float* part = in + p * stride;
      float old_factor, new_factor;
      merge_factors(top, total, part[0], part[1], old_factor, new_factor);
      sum = sum * old_factor + part[2 + d] * new_factor;
    }
    float factor;
    const float below = denominator(top, total, sinks, head, factor);
    out[((size_t)row * n_heads + head) * V_DIM + d] = sum * factor / below;
  }
}

// grid (units, row tiles), block 128: n_tokens rows of one sequence (row `sequences[0]` of the table)
extern "C" __global__ void __launch_bounds__(128)
attention_whole(const float* __restrict__ q, const u8* __restrict__ keys, const u8* __restrict__ values,
                float* __restrict__ out, const int* __restrict__ positions, const int* __restrict__ last_seen,
                const int* __restrict__ table, const int* __restrict__ sequences, const float* __restrict__ sinks,
                const int* __restrict__ count, int table_row, int block_tokens, int n_heads, int n_kv_heads,
                int n_heads_here, int n_tokens, int window, float scale, float softcap) {
  __shared__ Shared shared;
  const int unit = blockIdx.x, row = blockIdx.y * n_tokens, n_rows = *count;
  if (row >= n_rows) return;
  const int here = min(n_tokens, n_rows - row), n = here * n_heads_here, head0 = unit * n_heads_here;
  Step s = {table + (size_t)sequences[0] * table_row, block_tokens / 32, n_kv_heads,
            head0 / (n_heads / n_kv_heads), n, scale, softcap, keys, values};
  fetch(shared, q, positions, last_seen, row, here, head0, n_heads_here, n_heads, window);
  int first = shared.first[0], last = shared.last[0];
  for (int i = 1; i < n; i++) { first = min(first, shared.first[i]); last = max(last, shared.last[i]); }
  float sums[ROUNDS][QUERIES][8], top[QUERIES], total[QUERIES];
#pragma unroll
  for (int i = 0; i < QUERIES; i++) {
    top[i] = NOTHING;
    total[i] = 0.f;
#pragma unroll
    for (int round = 0; round < ROUNDS; round++)
#pragma unroll
      for (int j = 0; j < 8; j++) sums[round][i][j] = 0.f;
  }
  for (int begin = first / PIECE * PIECE; begin <= last; begin += PIECE) {
    float acc[ROUNDS][QUERIES][8];
    piece(s, shared, begin, acc);
#pragma unroll
    for (int i = 0; i < QUERIES; i++) {
      if (i >= n || shared.total[i] == 0.f) continue;  // a piece this query does not see
      float old_factor, new_factor;
      merge_factors(top[i], total[i], shared.top[i], shared.total[i], old_factor, new_factor);
#pragma unroll
      for (int round = 0; round < ROUNDS; round++)
#pragma unroll
        for (int j = 0; j < 8; j++) sums[round][i][j] = sums[round][i][j] * old_factor + acc[round][i][j] * new_factor;
    }
    __syncthreads();  // before the next piece writes top and total
  }
#pragma unroll
  for (int i = 0; i < QUERIES; i++) {
    if (i >= n) break;
    const int head = head0 + i % n_heads_here, to = row + i / n_heads_here;
    float factor;
    const float below = denominator(top[i], total[i], sinks, head, factor);
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
      const int chunk = threadIdx.x / TOKEN_LANES + round * (THREADS / TOKEN_LANES);
      if (threadIdx.x % TOKEN_LANES || chunk >= CHUNKS) continue;
#pragma unroll
      for (int j = 0; j < 8; j++)
        out[((size_t)to * n_heads + head) * V_DIM + 8 * chunk + j] = sums[round][i][j] * factor / below;
    }
  }
}
