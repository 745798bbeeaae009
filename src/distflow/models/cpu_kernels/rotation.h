/* Of a head the pairs of its halves, by an angle each; and back. */

#pragma once

#include <stdint.h>

static void rotate(float *x, const float *cos, const float *sin, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        const float first = x[i], second = x[i + half];
        x[i] = first * cos[i] - second * sin[i];
        x[i + half] = second * cos[i + half] + first * sin[i + half];
    }
}

static void rotate_backward(float *x, const float *cos, const float *sin, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++) {
        const float first = x[i], second = x[i + half];
        x[i] = first * cos[i] + second * sin[i + half];
        x[i + half] = second * cos[i + half] - first * sin[i];
    }
}
