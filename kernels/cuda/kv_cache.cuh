// How keys and values lie in the cache, and one token's way into it and out of it.
//
// The cache of a layer is a pool of tiles of 32 tokens for each key-value head, keys and values apart:
// [tile][head], and in a tile, so that 32 lanes which each have a token read 512 bytes in one piece,
//
//     f16, f32   chunks of 16 bytes (8 or 4 elements): [dim / chunk][32 tokens][16 bytes]
//     q8_0       for each 32 elements: [2][32 tokens][16 codes], [32 tokens] half scales
//     q4_0       for each 32 elements: [32 tokens][16 bytes], [32 tokens] half scales; byte i of a
//                token holds element i low and element i + 16 high, biased by 8
//
// A block of the block table is a whole number of tiles; a slot is 32 * tile + place. Numbers are
// rounded as the number format of the same name rounds them (quant/).
#pragma once
#include "common.cuh"

struct f32 { enum { TILE_BYTES = 32 * 4 }; };  // bytes of an element for the tokens of a tile
struct f16 { enum { TILE_BYTES = 32 * 2 }; };
struct q8_0 { enum { TILE_BYTES = 34 }; };
struct q4_0 { enum { TILE_BYTES = 18 }; };
template <class T> DEVICE size_t tile_bytes(int dim) { return (size_t)T::TILE_BYTES * dim; }

// Elements 8 c .. 8 c + 7 of a token of a tile.
DEVICE void load8(f32, const u8* tile, int token, int c, float (&x)[8]) {
  const float4* p = (const float4*)tile + token;
  const float4 a = p[32 * (2 * c)], b = p[32 * (2 * c + 1)];
  x[0] = a.x; x[1] = a.y; x[2] = a.z; x[3] = a.w;
  x[4] = b.x; x[5] = b.y; x[6] = b.z; x[7] = b.w;
}
DEVICE void load8(f16, const u8* tile, int token, int c, float (&x)[8]) {
  const uint4 v = ((const uint4*)tile)[32 * c + token];
  const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) { x[2 * i] = half_bits(w[i] & 0xffff); x[2 * i + 1] = half_bits(w[i] >> 16); }
}
DEVICE void load8(q8_0, const u8* tile, int token, int c, float (&x)[8]) {
  const u8* group = tile + (c >> 2) * 1088;
  const uint2 v = *(const uint2*)(group + ((c >> 1 & 1) * 32 + token) * 16 + 8 * (c & 1));
  const float d = half_bits(((const u16*)(group + 1024))[token]);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x[i] = d * (float)(i8)(v.x >> (8 * i));
    x[4 + i] = d * (float)(i8)(v.y >> (8 * i));
  }
}
DEVICE void load8(q4_0, const u8* tile, int token, int c, float (&x)[8]) {
  const u8* group = tile + (c >> 2) * 576;
  const uint2 v = *(const uint2*)(group + token * 16 + 8 * (c & 1));
  const float d = half_bits(((const u16*)(group + 512))[token]);
  const int shift = c & 2 ? 4 : 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x[i] = d * (float)((int)(v.x >> (8 * i + shift) & 15) - 8);
    x[4 + i] = d * (float)((int)(v.y >> (8 * i + shift) & 15) - 8);
  }
}

// ---- writing --------------------------------------------------------------------------------------

DEVICE void store32(f32, u8* tile, int token, int g, const float* x) {
  for (int i = 0; i < 8; i++) ((float4*)tile)[32 * (8 * g + i) + token] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
}
DEVICE u32 half_word(float a, float b) {
  return __half_as_ushort(__float2half_rn(a)) | (u32)__half_as_ushort(__float2half_rn(b)) << 16;
}
DEVICE void store32(f16, u8* tile, int token, int g, const float* x) {
  for (int i = 0; i < 4; i++) {
    const float* v = x + 8 * i;
    ((uint4*)tile)[32 * (4 * g + i) + token] = make_uint4(half_word(v[0], v[1]), half_word(v[2], v[3]), half_word(v[4], v[5]), half_word(v[6], v[7]));
  }
}
// A NaN or an infinity makes the scale NaN, and with it what is read.
DEVICE void store32(q8_0, u8* tile, int token, int g, const float* x) {
  float largest = 0.f;
  bool odd = false;
  for (int i = 0; i < 32; i++) { largest = fmaxf(largest, fabsf(x[i])); odd |= !(fabsf(x[i]) < 3e38f); }
  const float d = odd ? NOT_A_NUMBER : largest / 127.f, inverse = !odd && d != 0.f ? 1.f / d : 0.f;
  u8* group = tile + g * 1088;
  for (int i = 0; i < 32; i++) {
    const float v = x[i] * inverse, size = fminf(fabsf(v) + 0.49999997f, 127.f);  // halves away from zero
    const int code = odd ? 0 : (int)size;
    group[((i >> 4) * 32 + token) * 16 + (i & 15)] = (u8)(v < 0.f ? -code : code);
  }
  ((u16*)(group + 1024))[token] = __half_as_ushort(__float2half_rn(d));
}
DEVICE void store32(q4_0, u8* tile, int token, int g, const float* x) {
  float largest = x[0];
  bool odd = false;
  for (int i = 0; i < 32; i++) {
    if (fabsf(x[i]) > fabsf(largest)) largest = x[i];  // the first of that size, with its sign
    odd |= !(fabsf(x[i]) < 3e38f);
  }
  const float d = odd ? NOT_A_NUMBER : largest * -0.125f, inverse = !odd && d != 0.f ? 1.f / d : 0.f;
  u8* group = tile + g * 576;
  for (int i = 0; i < 16; i++) {
    int code[2];
    for (int h = 0; h < 2; h++) {
      const float v = fminf(fmaxf(fmaf(x[i + 16 * h], inverse, 8.5f), 0.f), 15.f);
      code[h] = odd ? 8 : (int)v;
    }
    group[token * 16 + i] = (u8)(code[0] | code[1] << 4);
  }
  ((u16*)(group + 512))[token] = __half_as_ushort(__float2half_rn(d));
}
