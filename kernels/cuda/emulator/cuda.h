// What CUDA C has beside C++: included before a kernel's text when g++ compiles it.
//
// Only what the kernels use, and nothing that NVRTC lacks: no INFINITY, no NAN, no stdint types in
// the kernel's own scope beyond what these headers need.
#pragma once
#include <cmath>
#include "launch.h"

#define __CUDAEMU__ 1
#define __CUDA_ARCH__ 750
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("emu_shared")))
#undef INFINITY
#undef NAN

#define threadIdx (emu::block.current->index)
#define blockIdx (emu::block.index)
#define blockDim (emu::block.size)
#define gridDim (emu::block.grid)

#define EMU_VECTOR2(name, T, bytes) \
  struct __align__(bytes) name { T x, y; }; \
  static inline name make_##name(T x, T y) { return name{x, y}; }
#define EMU_VECTOR4(name, T, bytes) \
  struct __align__(bytes) name { T x, y, z, w; }; \
  static inline name make_##name(T x, T y, T z, T w) { return name{x, y, z, w}; }
EMU_VECTOR2(char2, signed char, 2) EMU_VECTOR2(uchar2, unsigned char, 2)
EMU_VECTOR2(short2, short, 4) EMU_VECTOR2(ushort2, unsigned short, 4)
EMU_VECTOR2(int2, int, 8) EMU_VECTOR2(uint2, unsigned, 8) EMU_VECTOR2(float2, float, 8)
EMU_VECTOR4(char4, signed char, 4) EMU_VECTOR4(uchar4, unsigned char, 4)
EMU_VECTOR4(short4, short, 8) EMU_VECTOR4(ushort4, unsigned short, 8)
EMU_VECTOR4(int4, int, 16) EMU_VECTOR4(uint4, unsigned, 16) EMU_VECTOR4(float4, float, 16)

// ---- barriers and warp operations ---------------------------------------------------------------

namespace emu {
enum Kind { SYNC, SHUFFLE, SHUFFLE_UP, SHUFFLE_DOWN, SHUFFLE_XOR, BALLOT, MATRIX };

template <class T> static inline uint64_t bits_of(T v) {
  static_assert(sizeof(T) <= 8, "a shuffle moves 8 bytes at most");
  uint64_t u = 0;
  memcpy(&u, &v, sizeof v);
  return u;
}
template <class T> static inline T value_of(uint64_t u) {
  T v;
  memcpy(&v, &u, sizeof v);
  return v;
}
// The lane's own value where there is no source (-1).
template <class T> static inline T shuffle(int line, Kind kind, unsigned mask, T v, int source) {
  uint64_t* shown = meet(mask, bits_of(v), kind, line);
  if (source < 0) return v;
  if (!(mask >> source & 1))
    misuse("shuffle on line %d: lane %d reads lane %d outside mask %08x", line, block.current->lane, source, mask);
  return value_of<T>(shown[source]);
}
static inline int lane() { return block.current->lane; }
template <class T> static inline T shuffle_from(int line, unsigned m, T v, int s, int w = 32) {
  return shuffle(line, SHUFFLE, m, v, (lane() & ~(w - 1)) | (s & (w - 1)));
}
template <class T> static inline T shuffle_up(int line, unsigned m, T v, unsigned d, int w = 32) {
  return shuffle(line, SHUFFLE_UP, m, v, (lane() & (w - 1)) < (int)d ? -1 : lane() - (int)d);
}
template <class T> static inline T shuffle_down(int line, unsigned m, T v, unsigned d, int w = 32) {
  return shuffle(line, SHUFFLE_DOWN, m, v, (lane() & (w - 1)) + (int)d >= w ? -1 : lane() + (int)d);
}
template <class T> static inline T shuffle_xor(int line, unsigned m, T v, int x, int w = 32) {
  int source = lane() ^ x;
  return shuffle(line, SHUFFLE_XOR, m, v, source >= (lane() & ~(w - 1)) + w ? -1 : source);
}
static inline unsigned ballot(int line, unsigned mask, int predicate) {
  uint64_t* shown = meet(mask, predicate ? 1 : 0, BALLOT, line);
  unsigned found = 0;
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1 && shown[i]) found |= 1u << i;
  return found;
}
static inline void sync_warp(int line, unsigned mask = 0xffffffffu) {
  meet(mask & block.warps[block.current->warp].live, 0, SYNC, line);
}
}  // namespace emu

#define __syncthreads() emu::barrier(__LINE__, __COUNTER__)
#define __syncwarp(...) emu::sync_warp(__LINE__ __VA_OPT__(, ) __VA_ARGS__)
#define __shfl_sync(m, v, ...) emu::shuffle_from(__LINE__, m, v, __VA_ARGS__)
#define __shfl_up_sync(m, v, ...) emu::shuffle_up(__LINE__, m, v, __VA_ARGS__)
#define __shfl_down_sync(m, v, ...) emu::shuffle_down(__LINE__, m, v, __VA_ARGS__)
#define __shfl_xor_sync(m, v, ...) emu::shuffle_xor(__LINE__, m, v, __VA_ARGS__)
#define __ballot_sync(m, p) emu::ballot(__LINE__, m, p)
#define __any_sync(m, p) (emu::ballot(__LINE__, m, p) != 0)
#define __all_sync(m, p) (emu::ballot(__LINE__, m, p) == (unsigned)(m))

// ---- intrinsics ---------------------------------------------------------------------------------

static inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += (int)(int8_t)(a >> i) * (int)(int8_t)(b >> i);
  return c;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selectors) {
  uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    unsigned s = selectors >> (4 * i) & 15, byte = (unsigned)(bytes >> (8 * (s & 7))) & 255;
    if (s & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T> static inline T __ldg(const T* p) { return *p; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline int __float2int_rn(float x) { return x != x ? 0 : (int)lrintf(x); }
static inline int __float_as_int(float x) { return emu::value_of<int>(emu::bits_of(x)); }
static inline unsigned __float_as_uint(float x) { return emu::value_of<unsigned>(emu::bits_of(x)); }
static inline float __int_as_float(int x) { return emu::value_of<float>(emu::bits_of(x)); }
static inline float __uint_as_float(unsigned x) { return emu::value_of<float>(emu::bits_of(x)); }
template <class A, class B> static inline std::common_type_t<A, B> min(A a, B b) { return a < b ? a : b; }
template <class A, class B> static inline std::common_type_t<A, B> max(A a, B b) { return a > b ? a : b; }
// One fiber at a time: plain read, change and write is atomic.
template <class T> static inline T atomicAdd(T* p, std::common_type_t<T> v) { T o = *p; *p = o + v; return o; }
template <class T> static inline T atomicExch(T* p, std::common_type_t<T> v) { T o = *p; *p = v; return o; }

// ---- matrix products of a warp ------------------------------------------------------------------

namespace emu {
// mma.m16n8k16 s8: c[16][8] += a[16][16] * b[16][8]. With lane = 4 g + t: a[0] holds row g, a[1] row
// g + 8, elements 4 t .. 4 t + 3; b column g, the same elements; c[0..1] row g, c[2..3] row g + 8,
// columns 2 t and 2 t + 1 (PTX ISA, "Matrix fragments for mma.m16n8k16").
static inline void mma_m16n8k16_s8(int line, int* c, unsigned a0, unsigned a1, unsigned b) {
  Warp& warp = block.warps[block.current->warp];
  unsigned mine[3] = {a0, a1, b};
  memcpy(warp.fragment[lane()], mine, sizeof mine);
  meet(0xffffffffu, 0, MATRIX, line);
  int g = lane() >> 2, t = lane() & 3;
  int sums[4];
  for (int i = 0; i < 4; i++) {
    sums[i] = c[i];
    for (int k = 0; k < 4; k++) {
      const unsigned* rows = (const unsigned*)warp.fragment[4 * g + k];
      const unsigned* columns = (const unsigned*)warp.fragment[4 * (2 * t + (i & 1)) + k];
      sums[i] = __dp4a((int)rows[i >> 1], (int)columns[2], sums[i]);
    }
  }
  meet(0xffffffffu, 0, MATRIX, line);  // all have read before anybody shows the next
  memcpy(c, sums, sizeof sums);
}
}  // namespace emu
