// Activation functions, alone and on a gate: kernels/reference.py has their formulas.
#pragma once
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

enum Gate { SWIGLU, GEGLU, SWIGLU_CLAMPED };

DEVICE float gated(int function, float gate, float up) {
  if (function == SWIGLU) return silu(gate) * up;
  if (function == GEGLU) return gelu(gate) * up;
  if (gate != gate || up != up) return NOT_A_NUMBER;  // fminf and fmaxf would hide it
  const float g = fminf(gate, 7.f), u = fminf(fmaxf(up, -7.f), 7.f);  // gpt-oss
  return g * sigmoid(1.702f * g) * (u + 1.f);
}
