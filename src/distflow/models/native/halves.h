/* Products with weights in bfloat16, the upper half of a float32: of numbers rounded to it, summed in float32. */

#include <stdint.h>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "products.h"

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

static inline float rounded(float number) { return number_of(half_of(number) << 16); }

/* Half as many pairs as `size` numbers, rounded; an odd one is filled up with zero. */
static inline void pair_up(const float *x, int64_t size, uint32_t *pairs) {
    for (int64_t i = 0; i < size / 2; i++) pairs[i] = half_of(x[2 * i]) | half_of(x[2 * i + 1]) << 16;
    if (size % 2) pairs[size / 2] = half_of(x[size - 1]);
}

static inline Vector add_products(Vector sums, uint32_t pair, Pairs weights) {
#if defined(__AVX512BF16__)
    return (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)weights);
#else
    const Pairs first = weights << 16, second = weights & 0xffff0000;
    return sums + number_of(pair << 16) * (Vector)first + number_of(pair & 0xffff0000) * (Vector)second;
#endif
}

/* As `multiply`, of `depth` pairs: x (rows, depth), and a panel of (depth, PANEL) pairs. */
static inline __attribute__((always_inline)) void multiply_pairs_tile(const uint32_t *x, const uint32_t *panel,
                                                                      int64_t depth, const int rows,
                                                                      Vector sums[][2]) {
    Vector made[TILE][2] = {0};
    for (int64_t k = 0; k < depth; k++) {
        const Pairs left = *(const Pairs *)(panel + k * PANEL), right = *(const Pairs *)(panel + k * PANEL + LANES);
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            made[row][0] = add_products(made[row][0], x[row * depth + k], left);
            made[row][1] = add_products(made[row][1], x[row * depth + k], right);
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++) sums[row][0] = made[row][0], sums[row][1] = made[row][1];
}

static void multiply_pairs(const uint32_t *x, const uint32_t *panel, int64_t depth, int rows, Vector sums[][2]) {
    switch (rows) {
#define CASE(rows)                                                                                                     \
    case rows: multiply_pairs_tile(x, panel, depth, rows, sums); break;
        EACH_TILE(CASE)
#undef CASE
    }
}
