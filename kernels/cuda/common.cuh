// What all kernels share: types, sums over a warp or block, the matrix product of a warp.
//
// NVRTC has no <stdint.h> and no INFINITY. Sums have one order, whatever the block does beside them:
// a tree over the lanes, then over the warps.
#pragma once
#include <cuda_fp16.h>

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define ALL_LANES 0xffffffffu
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)
#define LANE (threadIdx.x & 31)
#define WARP (threadIdx.x >> 5)

DEVICE float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(ALL_LANES, x, step);
  return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
  for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
  return x;
}

// Over a block of whole warps, to every thread; `parts` is 32 floats of shared memory that nobody
// else uses before the next barrier.
DEVICE float block_sum(float x, float* parts) {
  x = warp_sum(x);
  if (LANE == 0) parts[WARP] = x;
  __syncthreads();
  x = LANE < (blockDim.x >> 5) ? parts[LANE] : 0.f;
  return warp_sum(x);
}

// A pair turned by an angle, whose cosine and sine are given.
DEVICE float2 turned(float a, float b, float2 angle) {
  return make_float2(fmaf(a, angle.x, -(b * angle.y)), fmaf(b, angle.x, a * angle.y));
}

DEVICE float half_bits(u32 bits) { return __half2float(__ushort_as_half((u16)bits)); }
DEVICE float bf16_bits(u32 bits) { return __uint_as_float(bits << 16); }
DEVICE float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// c[16][8] += a[16][16] b[16][8] of int8 with int32 sums, and the same for 32 instead of 16 elements.
// With lane = 4 g + t: a[0] holds row g, a[1] row g + 8, elements 4 t .. 4 t + 3; b column g and the
// same elements; c[0], c[1] row g, c[2], c[3] row g + 8, columns 2 t and 2 t + 1. The 32 elements of
// mma32 are those of two mma16 one behind the other. sm_75 has half the rows in one instruction.
DEVICE void mma16(int (&c)[4], u32 a0, u32 a1, u32 b) {
#if defined(__CUDAEMU__)
  emu::mma_m16n8k16_s8(__LINE__, c, a0, a1, b);
#elif __CUDA_ARCH__ >= 800
  asm(
      "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(b));
#else
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1},{%2},{%3},{%0,%1};"
               : "+r"(c[0]), "+r"(c[1]) : "r"(a0), "r"(b));
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1},{%2},{%3},{%0,%1};"
               : "+r"(c[2]), "+r"(c[3]) : "r"(a1), "r"(b));
#endif
}

DEVICE void mma32(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if !defined(__CUDAEMU__) && __CUDA_ARCH__ >= 800
  asm(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  mma16(c, a[0], a[1], b[0]);
  mma16(c, a[2], a[3], b[1]);
#endif
}
