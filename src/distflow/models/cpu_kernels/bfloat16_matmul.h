/* Products with weights in bfloat16, the upper half of a float32: of numbers rounded to it, summed in float32. By the
   processor's unit for matrices where it has one (AMX), which is ten times as fast as its vectors. */

#include <stdint.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#if defined(__AMX_BF16__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include "bfloat16.h"
#include "simd_and_float32_matmul.h"

#define UNIT 16 /* what a row's pairs are a multiple of */

/* Pairs of `size` numbers, filled up with zeros. */
static inline int64_t pairs_of(int64_t size) { return up(size, 2 * UNIT) / 2; }

/* `size` numbers, rounded. */
static inline void pair_up(const float *x, int64_t size, uint32_t *pairs) {
    for (int64_t i = 0; i < size / 2; i++) pairs[i] = half_of(x[2 * i]) | half_of(x[2 * i + 1]) << 16;
    for (int64_t i = size / 2; i < pairs_of(size); i++) pairs[i] = 2 * i < size ? half_of(x[2 * i]) : 0;
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

#if defined(HAS_TILES)
#define ROWS_OF_PAIRS 32
static int may_use_tiles;

/* The kernel wants to be asked, once for a process: such a unit makes the state of a thread 8 KiB larger. */
__attribute__((constructor)) static void ask_for_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    may_use_tiles = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

/* Of a thread: before `multiply_pairs`, and after it. */
static void begin_pairs(void) {
    static const struct {
        uint8_t palette, start, unused[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } tiles = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    if (may_use_tiles) _tile_loadconfig(&tiles);
}

static void end_pairs(void) {
    if (may_use_tiles) _tile_release();
}

/* Two times two tiles of sums, of 16 x 16 numbers each: as many as hide how long one takes. */
static void multiply_pairs_by_tiles(const uint32_t *x, const uint32_t *panel, int64_t depth, int rows, Vector sums[][2]) {
    const int64_t stride = depth * sizeof(*x), wide = PANEL * sizeof(*panel);
    __asm__ volatile("" ::: "memory"); /* GCC does not know what tiles are loaded from */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < depth; k += UNIT) {
        for (int line = 0; line < 2 * UNIT; line++) /* of the panel after this one */
            __builtin_prefetch(panel + (depth + k) * PANEL + line * LANES, 0, 2);
        _tile_loadd(6, panel + k * PANEL, wide);
        _tile_loadd(7, panel + k * PANEL + LANES, wide);
        _tile_loadd(4, x + k, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (rows <= UNIT) continue;
        _tile_loadd(5, x + UNIT * depth + k, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, &sums[0][0], sizeof(*sums));
    _tile_stored(1, &sums[0][1], sizeof(*sums));
    if (rows <= UNIT) return;
    _tile_stored(2, &sums[UNIT][0], sizeof(*sums));
    _tile_stored(3, &sums[UNIT][1], sizeof(*sums));
}
#else
#define ROWS_OF_PAIRS TILE
static void begin_pairs(void) {}
static void end_pairs(void) {}
#endif

/* Of at most ROWS_OF_PAIRS rows. As many are read where there are fewer, and may be anything. */
static void multiply_pairs(const uint32_t *x, const uint32_t *panel, int64_t depth, int rows, Vector sums[][2]) {
#if defined(HAS_TILES)
    if (may_use_tiles) {
        multiply_pairs_by_tiles(x, panel, depth, rows, sums);
        return;
    }
#endif
    for (int start = 0; start < rows; start += TILE) switch (smaller(TILE, rows - start)) {
#define CASE(rows)                                                                                                     \
    case rows: multiply_pairs_tile(x + start * depth, panel, depth, rows, sums + start); break;
            EACH_TILE(CASE)
#undef CASE
        }
}
