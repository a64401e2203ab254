// Quantized weights: how each type's planes are read (pack.py lays them out) and decoded.
//
// A group is 32 elements of a row. `load` fetches a group's bytes, 16 at once where there are as
// many, so that neighbouring lanes read neighbouring bytes; `decode` turns them into 32 codes, four
// in a word, and the scales that make an element d * code - m. They are apart so that a kernel can
// ask for the next group before it works on this one.
//
// HALVES: a scale holds for 16 elements. HAS_MIN: there is an m, which is also how biased codes are
// read (m = bias * d): subtracting it from a sum costs less than from each code.
#pragma once
#include "common.cuh"

struct Scales {
  float d[2], m[2];  // the second of each only with HALVES
};

// Where planes begin: each is a multiple of 256 bytes behind the one before.
DEVICE size_t plane_bytes(size_t n_rows, size_t row_bytes) { return (n_rows * row_bytes + 255) & ~(size_t)255; }

// The place of a group: the matrix, its shape, the row and the number of the group in it.
struct Place {
  const u8* matrix;
  size_t n_rows;
  int n_groups;
  size_t row;
  int group;
  DEVICE_MEMBER size_t in_all() const { return row * n_groups + group; }
};

DEVICE void nibbles(const uint4& v, int (&q)[8]) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; j++) {
    q[j] = w[j] & 0x0f0f0f0f;
    q[4 + j] = w[j] >> 4 & 0x0f0f0f0f;
  }
}
// One bit of each element: bit j of byte b belongs to byte b of word j.
DEVICE void add_bits(u32 bits, int shift, int (&q)[8]) {
#pragma unroll
  for (int j = 0; j < 8; j++) q[j] |= (bits >> j & 0x01010101) << shift;
}
// Two bits of each: bits 2 j and 2 j + 1 of byte b belong to byte b of words j and 4 + j.
DEVICE void add_pairs(const uint2& v, int shift, int (&q)[8]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    q[j] |= (v.x >> (2 * j) & 0x03030303) << shift;
    q[4 + j] |= (v.y >> (2 * j) & 0x03030303) << shift;
  }
}
// table[code] of each nibble in w, by byte: a table of 16 signed bytes lies in four words. The
// selectors of prmt are nibbles, so codes go in by fours: bit 3 chooses between two look-ups.
DEVICE u32 look_up(u32 codes, const u32 (&table)[4]) {
  const u32 packed = (codes & 15) | (codes >> 4 & 0xf0) | (codes >> 8 & 0xf00) | (codes >> 12 & 0xf000);
  const u32 low = __byte_perm(table[0], table[1], packed & 0x7777);
  const u32 high = __byte_perm(table[2], table[3], packed & 0x7777);
  return __byte_perm(low, high, 0x3210 + (packed >> 1 & 0x4444));
}

struct q8_0 {  // 32 signed bytes | half d
  enum { HALVES = 0, HAS_MIN = 0 };
  uint4 codes[2];
  u16 d;
  DEVICE_MEMBER void load(const Place& at) {
    const uint4* p = (const uint4*)at.matrix + 2 * at.in_all();
    codes[0] = p[0];
    codes[1] = p[1];
    d = ((const u16*)(at.matrix + plane_bytes(at.n_rows, 32 * at.n_groups)))[at.in_all()];
  }
  DEVICE_MEMBER void decode(int group, int (&q)[8], Scales& s) const {
    q[0] = codes[0].x; q[1] = codes[0].y; q[2] = codes[0].z; q[3] = codes[0].w;
    q[4] = codes[1].x; q[5] = codes[1].y; q[6] = codes[1].z; q[7] = codes[1].w;
    s.d[0] = half_bits(d);
  }
};

// Types of 32 elements with 4 or 5 bits: nibbles | fifth bits | half d, or half d and m
template <int BITS, int BIAS, bool OFFSET>
struct Legacy {
  enum { HALVES = 0, HAS_MIN = 1 };
  uint4 codes;
  u32 high, dm;
  DEVICE_MEMBER void load(const Place& at) {
    const u8* p = at.matrix;
    codes = ((const uint4*)p)[at.in_all()];
    p += plane_bytes(at.n_rows, 16 * at.n_groups);
    if (BITS == 5) {
      high = ((const u32*)p)[at.in_all()];
      p += plane_bytes(at.n_rows, 4 * at.n_groups);
    }
    dm = OFFSET ? ((const u32*)p)[at.in_all()] : ((const u16*)p)[at.in_all()];
  }
  DEVICE_MEMBER void decode(int group, int (&q)[8], Scales& s) const {
    nibbles(codes, q);
    if (BITS == 5) add_bits(high, 4, q);
    s.d[0] = half_bits(dm & 0xffff);
    s.m[0] = OFFSET ? -half_bits(dm >> 16) : (float)BIAS * s.d[0];
  }
};
typedef Legacy<4, 8, false> q4_0;
typedef Legacy<4, 0, true> q4_1;
typedef Legacy<5, 16, false> q5_0;
typedef Legacy<5, 0, true> q5_1;

// Nibbles that number the entries of a table | half d
struct iq4_nl {
  enum { HALVES = 0, HAS_MIN = 0 };
  uint4 codes;
  u16 d;
  DEVICE_MEMBER void load(const Place& at) {
    codes = ((const uint4*)at.matrix)[at.in_all()];
    d = ((const u16*)(at.matrix + plane_bytes(at.n_rows, 16 * at.n_groups)))[at.in_all()];
  }
  DEVICE_MEMBER static void levels(const uint4& codes, int (&q)[8]) {
    // -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113
    const u32 table[4] = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
    nibbles(codes, q);
#pragma unroll
    for (int j = 0; j < 8; j++) q[j] = look_up(q[j], table);
  }
  DEVICE_MEMBER void decode(int group, int (&q)[8], Scales& s) const {
    levels(codes, q);
    s.d[0] = half_bits(d);
  }
};

// As iq4_nl | for 256 elements: half d, high pairs of the scales (16 bits), their low nibbles
struct iq4_xs {
  enum { HALVES = 0, HAS_MIN = 0 };
  uint4 codes;
  uint2 meta;
  DEVICE_MEMBER void load(const Place& at) {
    codes = ((const uint4*)at.matrix)[at.in_all()];
    meta = ((const uint2*)(at.matrix + plane_bytes(at.n_rows, 16 * at.n_groups)))[at.in_all() >> 3];
  }
  DEVICE_MEMBER void decode(int group, int (&q)[8], Scales& s) const {
    iq4_nl::levels(codes, q);
    const int g = group & 7, low = meta.y >> (4 * g) & 15, high = meta.x >> (16 + 2 * g) & 3;
    s.d[0] = half_bits(meta.x & 0xffff) * (float)((low | high << 4) - 32);
  }
};

// Nibbles that number twice the values of e2m1 | exponent: half of 2 ** (e - 127)
struct mxfp4 {
  enum { HALVES = 0, HAS_MIN = 0 };
  uint4 codes;
  u8 exponent;
  DEVICE_MEMBER void load(const Place& at) {
    codes = ((const uint4*)at.matrix)[at.in_all()];
    exponent = at.matrix[plane_bytes(at.n_rows, 16 * at.n_groups) + at.in_all()];
  }
  DEVICE_MEMBER void decode(int group, int (&q)[8], Scales& s) const {
    // 0 1 2 3 | 4 6 8 12 | 0 -1 -2 -3 | -4 -6 -8 -12
    const u32 table[4] = {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};
    nibbles(codes, q);
#pragma unroll
    for (int j = 0; j < 8; j++) q[j] = look_up(q[j], table);
    // 2 ** -128 and 2 ** -127 are subnormal, which is flushed: such a block counts as zero.
    s.d[0] = exponent < 2 ? 0.f : __uint_as_float((u32)(exponent - 1) << 23);
  }
};

// Scale and minimum of a group, 6 bits each. For 256 elements: half d, half dmin | low nibbles of
// both, a byte for a group | their high pairs, a nibble for a group.
DEVICE void scale_and_min(const uint4& meta, int group, Scales& s) {
  const int g = group & 7;
  const u32 low = (g < 4 ? meta.y : meta.z) >> (8 * (g & 3)), high = meta.w >> (4 * g);
  s.d[0] = half_bits(meta.x & 0xffff) * (float)((low & 15) | (high & 3) << 4);
  s.m[0] = half_bits(meta.x >> 16) * (float)((low >> 4 & 15) | (high & 12) << 2);
}

struct q4_k {  // nibbles | scales and minimums
  enum { HALVES = 0, HAS_MIN = 1 };
  uint4 codes, meta;
  DEVICE_MEMBER void load(const Place& at) {
    codes = ((const uint4*)at.matrix)[at.in_all()];
    meta = ((const uint4*)(at.matrix + plane_bytes(at.n_rows, 16 * at.n_groups)))[at.in_all() >> 3];
  }
  DEVICE_MEMBER void decode(int group, int (&q)[8], Scales& s) const {
    nibbles(codes, q);
    scale_and_min(meta, group, s);
  }
};

struct q5_k {  // nibbles | fifth bits | scales and minimums
  enum { HALVES = 0, HAS_MIN = 1 };
  uint4 codes, meta;
  u32 high;
  DEVICE_MEMBER void load(const Place& at) {
    const u8* p = at.matrix;
    codes = ((const uint4*)p)[at.in_all()];
    p += plane_bytes(at.n_rows, 16 * at.n_groups);
    high = ((const u32*)p)[at.in_all()];
    p += plane_bytes(at.n_rows, 4 * at.n_groups);
    meta = ((const uint4*)p)[at.in_all() >> 3];
  }
  DEVICE_MEMBER void decode(int group, int (&q)[8], Scales& s) const {
    nibbles(codes, q);
    add_bits(high, 4, q);
    scale_and_min(meta, group, s);
  }
};

struct q6_k {  // nibbles | high pairs | two signed scales of a group | half d of 256 elements
  enum { HALVES = 1, HAS_MIN = 1 };
  uint4 codes;
  uint2 high;
  u16 scales, d;
  DEVICE_MEMBER void load(const Place& at) {
    const u8* p = at.matrix;
    codes = ((const uint4*)p)[at.in_all()];
    p += plane_bytes(at.n_rows, 16 * at.n_groups);
    high = ((const uint2*)p)[at.in_all()];
    p += plane_bytes(at.n_rows, 8 * at.n_groups);
    scales = ((const u16*)p)[at.in_all()];
    p += plane_bytes(at.n_rows, 2 * at.n_groups);
    d = ((const u16*)p)[at.in_all() >> 3];
  }
  DEVICE_MEMBER void decode(int group, int (&q)[8], Scales& s) const {
    nibbles(codes, q);
    add_pairs(high, 4, q);
    s.d[0] = half_bits(d) * (float)(i8)(scales & 255);
    s.d[1] = half_bits(d) * (float)(i8)(scales >> 8);
    s.m[0] = 32.f * s.d[0];
    s.m[1] = 32.f * s.d[1];
  }
};

// Low pairs | third bits | for 256 elements: low nibbles of a group's two scales, a byte for a group
// | their high pairs, a nibble for a group | half d
struct q3_k {
  enum { HALVES = 1, HAS_MIN = 1 };
  uint2 codes, low;
  u32 third, high;
  u16 d;
  DEVICE_MEMBER void load(const Place& at) {
    const u8* p = at.matrix;
    codes = ((const uint2*)p)[at.in_all()];
    p += plane_bytes(at.n_rows, 8 * at.n_groups);
    third = ((const u32*)p)[at.in_all()];
    p += plane_bytes(at.n_rows, 4 * at.n_groups);
    low = ((const uint2*)p)[at.in_all() >> 3];
    p += plane_bytes(at.n_rows, at.n_groups);
    high = ((const u32*)p)[at.in_all() >> 3];
    p += plane_bytes(at.n_rows, at.n_groups / 2);
    d = ((const u16*)p)[at.in_all() >> 3];
  }
  DEVICE_MEMBER void decode(int group, int (&q)[8], Scales& s) const {
#pragma unroll
    for (int j = 0; j < 8; j++) q[j] = 0;
    add_pairs(codes, 0, q);
    add_bits(third, 2, q);
    const int g = group & 7;
    const u32 l = (g < 4 ? low.x : low.y) >> (8 * (g & 3)), h = high >> (4 * g);
    s.d[0] = half_bits(d) * (float)((int)((l & 15) | (h & 3) << 4) - 32);
    s.d[1] = half_bits(d) * (float)((int)((l >> 4 & 15) | (h & 12) << 2) - 32);
    s.m[0] = 4.f * s.d[0];
    s.m[1] = 4.f * s.d[1];
  }
};

struct q2_k {  // pairs | scale and minimum of 16 elements in a byte | half d, half dmin
  enum { HALVES = 1, HAS_MIN = 1 };
  uint2 codes;
  u32 dm;
  u16 scales;
  DEVICE_MEMBER void load(const Place& at) {
    const u8* p = at.matrix;
    codes = ((const uint2*)p)[at.in_all()];
    p += plane_bytes(at.n_rows, 8 * at.n_groups);
    scales = ((const u16*)p)[at.in_all()];
    p += plane_bytes(at.n_rows, 2 * at.n_groups);
    dm = ((const u32*)p)[at.in_all() >> 3];
  }
  DEVICE_MEMBER void decode(int group, int (&q)[8], Scales& s) const {
#pragma unroll
    for (int j = 0; j < 8; j++) q[j] = 0;
    add_pairs(codes, 0, q);
    const float d = half_bits(dm & 0xffff), dmin = half_bits(dm >> 16);
    s.d[0] = d * (float)(scales & 15);
    s.m[0] = dmin * (float)(scales >> 4 & 15);
    s.d[1] = d * (float)(scales >> 8 & 15);
    s.m[1] = dmin * (float)(scales >> 12);
  }
};
