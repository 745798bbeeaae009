/* Vectors, and products of a few rows with two vectors of columns: what larger products are made of.

   A sum is taken in the order of its terms, whatever stands beside it. */

#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define TILE 12 /* rows of a tile: with two vectors of columns, as many sums as fit the registers */
#elif defined(__AVX__)
#define LANES 8
#define TILE 6
#else
#define LANES 4
#define TILE 6
#endif
#if TILE == 12
#define EACH_TILE(CASE)                                                                                                \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#else
#define EACH_TILE(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#endif
#define PANEL (2 * LANES) /* columns of a product that are computed together */

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline int64_t up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static inline Vector load(const float *from) { return *(const Vector *)from; }

static inline void store(float *to, Vector vector) { *(Vector *)to = vector; }

static inline float sum(Vector vector) {
    typedef float Quad __attribute__((vector_size(16)));
    union {
        Vector vector;
        Quad quads[LANES / 4];
    } parts = {vector};
    Quad total = parts.quads[0];
    for (int i = 1; i < LANES / 4; i++) total += parts.quads[i];
    return (total[0] + total[1]) + (total[2] + total[3]);
}

static inline float dot(const float *a, const float *b, int64_t size) {
    Vector lanes = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) lanes += load(a + i) * load(b + i);
    float total = sum(lanes);
    for (; i < size; i++) total += a[i] * b[i];
    return total;
}

/* size: a multiple of LANES. */
static inline float total(const float *x, int64_t size) {
    Vector lanes = {0};
    for (int64_t i = 0; i < size; i += LANES) lanes += load(x + i);
    return sum(lanes);
}

/* size: a multiple of LANES, one at least. Passes NaN over. */
static inline float largest(const float *x, int64_t size) {
    typedef int32_t Mask __attribute__((vector_size(4 * LANES)));
    union {
        Vector vector;
        Mask mask;
        float lanes[LANES];
    } top = {load(x)};
    for (int64_t i = LANES; i < size; i += LANES) {
        const union {
            Vector vector;
            Mask mask;
        } next = {load(x + i)};
        const Mask is_larger = next.vector > top.vector;
        top.mask = (next.mask & is_larger) | (top.mask & ~is_larger);
    }
    float all = top.lanes[0];
    for (int lane = 1; lane < LANES; lane++) all = top.lanes[lane] > all ? top.lanes[lane] : all;
    return all;
}

/* The sums over `depth` of `rows` rows and a panel of columns. Of x the rows are `row_stride` apart, and the numbers of
   one `step`; the panel's are PANEL numbers side by side, one such row after the other. */
static inline __attribute__((always_inline)) void multiply_tile(const float *x, int64_t row_stride, int64_t step,
                                                                const float *panel, int64_t depth, const int rows,
                                                                Vector sums[][2]) {
    Vector made[TILE][2] = {0}; /* in registers: nothing else can be meant by it */
    for (int64_t k = 0; k < depth; k++) {
        const Vector left = load(panel + k * PANEL), right = load(panel + k * PANEL + LANES);
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
            const float factor = x[row * row_stride + k * step];
            made[row][0] += factor * left;
            made[row][1] += factor * right;
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; row++) sums[row][0] = made[row][0], sums[row][1] = made[row][1];
}

static void multiply(const float *x, int64_t row_stride, int64_t step, const float *panel, int64_t depth, int rows,
                     Vector sums[][2]) {
    switch (rows) {
#define CASE(rows)                                                                                                     \
    case rows: multiply_tile(x, row_stride, step, panel, depth, rows, sums); break;
        EACH_TILE(CASE)
#undef CASE
    }
}

typedef struct {
    float *memory;
    int64_t stride; /* of its rows, or of its panels */
} Matrix;

/* y (+)= x · panels, of all columns of the panels that `columns` reach into. The rows of x are `row_stride` apart, its
   numbers `step`. */
static void product(const float *x, int64_t row_stride, int64_t step, int64_t rows, Matrix panels, int64_t depth,
                    int64_t columns, Matrix y, int adds) {
    for (int64_t first = 0; first < columns; first += PANEL)
        for (int64_t start = 0; start < rows; start += TILE) {
            const int size = smaller(TILE, rows - start);
            Vector sums[TILE][2];
            multiply(x + start * row_stride, row_stride, step, panels.memory + first / PANEL * panels.stride, depth,
                     size, sums);
            for (int row = 0; row < size; row++) {
                float *to = y.memory + (start + row) * y.stride + first;
                if (adds) sums[row][0] += load(to), sums[row][1] += load(to + LANES);
                store(to, sums[row][0]);
                store(to + LANES, sums[row][1]);
            }
        }
}

/* A row of `size` numbers as row `index` of panels of its columns. */
static void put_by_columns(const float *x, int64_t size, Matrix panels, int64_t index) {
    int64_t first = 0;
    float *to = panels.memory + index * PANEL;
    for (; first + PANEL <= size; first += PANEL, to += panels.stride)
        memcpy(to, x + first, PANEL * sizeof(float)); /* of a size that compilers know: no call */
    for (int64_t i = first; i < up(size, PANEL); i++) to[i - first] = i < size ? x[i] : 0.0f;
}

static Matrix take(float **memory, int64_t size, int64_t stride) {
    const Matrix matrix = {*memory, stride};
    *memory += size;
    return matrix;
}
