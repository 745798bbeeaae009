/* What each thread of a team does of the work, and what all of them add up. */

#pragma once

#include <omp.h>
#include <stdint.h>
#include <string.h>

#include "simd_and_float32_matmul.h"

typedef struct {
    int64_t first, last;
} Range;

static Range share_of(int64_t size, int64_t member, int64_t members) {
    return (Range){size * member / members, size * (member + 1) / members};
}

static Range share(int64_t size) { return share_of(size, omp_get_thread_num(), omp_get_num_threads()); }

/* The sums of the first thread, and as far apart those of the others, in order. to: rows of `size`. By all threads. */
static void gather(float *to, int64_t rows, int64_t size, Matrix sums, int64_t apart) {
    const Range own = share(rows);
    for (int64_t row = own.first; row < own.last; row++) {
        const float *from = sums.memory + row * sums.stride;
        memcpy(to + row * size, from, size * sizeof(float));
        for (int64_t thread = 1; thread < omp_get_num_threads(); thread++)
            for (int64_t i = 0; i < size; i++) to[row * size + i] += from[thread * apart + i];
    }
}
