// Element by element: grid (dim / 256, rows), block 256. Each reads its inputs and writes its output
// once, 4 bytes a thread, neighbours side by side; the output may be an input.
#include "common.cuh"

DEVICE float silu(float x) { return x * sigmoid(x); }

// In half on both sides between -10 and 10, as the specification has it (kernels/reference.py).
DEVICE float gelu(float x) {
  if (x <= -10.f) return 0.f;
  if (x >= 10.f) return x;
  const float h = __half2float(__float2half_rn(x));
  const float inner = 0.7978845608028654f * h * (1.f + 0.044715f * h * h);
  return __half2float(__float2half_rn(0.5f * h * (1.f + tanhf(inner))));
}

// Numbers of functions: operations.py has the same order. The choice is the same for all threads.
enum Unary { SCALE, SOFTCAP, SIGMOID, SOFTPLUS, SILU, GELU };
enum Binary { ADD, MUL, SWIGLU, GEGLU, SWIGLU_CLAMPED };

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
    case SWIGLU: z = silu(v) * w; break;
    case GEGLU: z = gelu(v) * w; break;
    default: {  // gpt-oss
      const float gate = fminf(v, 7.f), up = fminf(fmaxf(w, -7.f), 7.f);
      z = gate * sigmoid(1.702f * gate) * (up + 1.f);
      if (v != v || w != w) z = NOT_A_NUMBER;  // fminf and fmaxf would hide it
    }
  }
  out[at] = z;
}
