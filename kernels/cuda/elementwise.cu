// Element by element: grid (dim / 256, rows), block 256. Each reads its inputs and writes its output
// once, 4 bytes a thread, neighbours side by side; the output may be an input.
#include "activations.cuh"

// Numbers of functions: operations.py has the same order. The choice is the same for all threads.
enum Unary { SCALE, SOFTCAP, SIGMOID, SOFTPLUS, SILU, GELU };
enum Binary { ADD, MUL, GATED };  // GATED and above: a function of activations.cuh

extern "C" __global__ void __launch_bounds__(256)
unary(const float* x, float* out, const int* __restrict__ count, int dim, int function, float a) {
  const int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
  if (row >= *count || i >= dim) return;
  const size_t at = (size_t)row * dim + i;
  const float v = x[at];
  float y;
  switch (function) {
    case SCALE: y = a * v; break;
    case SOFTCAP: y = a * tanhf(v / a); break;
    case SIGMOID: y = sigmoid(v); break;
    case SOFTPLUS: y = v != v ? v : fmaxf(v, 0.f) + log1pf(expf(-fabsf(v))); break;
    case SILU: y = silu(v); break;
    default: y = gelu(v);
  }
  out[at] = y;
}

// y's element for (row, i) is y[row * row_step + i * step]: a row (dim, 1), one vector for all rows
// (0, 1), one number for each row (1, 0).
extern "C" __global__ void __launch_bounds__(256)
binary(const float* x, const float* y, float* out, const int* __restrict__ count, int dim, int function,
       int row_step, int step) {
  const int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
  if (row >= *count || i >= dim) return;
  const size_t at = (size_t)row * dim + i;
  const float v = x[at], w = y[(size_t)row * row_step + (size_t)i * step];
  float z;
  switch (function) {
    case ADD: z = v + w; break;
    case MUL: z = v * w; break;
    default: z = gated(function - GATED, v, w);
  }
  out[at] = z;
}
