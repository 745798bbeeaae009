/* Numbers in bfloat16: the upper halves of float32. */

#pragma once

#include <stdint.h>
#include <string.h>

#include "simd_and_float32_matmul.h"

typedef uint32_t Pairs __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* the first one's bits below */

typedef union {
    float number;
    uint32_t bits;
} Word;

static inline float number_of(uint32_t bits) { return (Word){.bits = bits}.number; }

/* To the nearest, of two as near to the even one. */
static inline uint32_t half_of(float number) {
    const uint32_t bits = (Word){number}.bits;
    const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest; /* NaN stays NaN */
}

static inline Vector load_halves(const uint16_t *from) {
    typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    return (Vector)(__builtin_convertvector(*(const Halves *)from, Pairs) << 16);
}

static inline float rounded(float number) { return number_of(half_of(number) << 16); }

static inline void widen(const uint16_t *restrict x, int64_t size, float *restrict to) {
    for (int64_t i = 0; i < size; i++) to[i] = number_of((uint32_t)x[i] << 16);
}

static inline void round_all(const float *restrict x, int64_t size, uint16_t *restrict to) {
    for (int64_t i = 0; i < size; i++) to[i] = half_of(x[i]);
}

/* Of either precision: halves are in bfloat16, others in float32. */
static inline void read_numbers(const void *from, int64_t index, int64_t size, float *to, int64_t halves) {
    if (halves) widen((const uint16_t *)from + index, size, to);
    else memcpy(to, (const float *)from + index, size * sizeof(float));
}

static inline void write_numbers(const float *from, int64_t size, void *to, int64_t index, int64_t halves) {
    if (halves) round_all(from, size, (uint16_t *)to + index);
    else memcpy((float *)to + index, from, size * sizeof(float));
}
