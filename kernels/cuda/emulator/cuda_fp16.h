// half: its bits, and conversions that round to the nearest even, as on the GPU.
#pragma once
#include "cuda.h"

// The compiler's own half; on AArch64 older compilers have it under this name only in C++.
#if defined(__aarch64__)
typedef __fp16 emu_half;
#else
typedef _Float16 emu_half;
#endif

struct __half {
  uint16_t bits;
};
struct __align__(4) __half2 {
  __half x, y;
};
typedef __half half;
typedef __half2 half2;

static inline float __half2float(half h) {
  emu_half value;
  memcpy(&value, &h, 2);
  return (float)value;
}
static inline half __float2half_rn(float x) {
  emu_half value = (emu_half)x;
  half h;
  memcpy(&h, &value, 2);
  return h;
}
static inline half __ushort_as_half(unsigned short u) { return half{u}; }
static inline unsigned short __half_as_ushort(half h) { return h.bits; }
