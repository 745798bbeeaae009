/* The gate of an MLP: x / (1 + e^-x) of one half of its numbers times the other half; and its gradient. */

#pragma once

#include <stdint.h>
#include <string.h>

#include "bfloat16.h"
#include "exponential.h"

/* rounds: what opens, as where all is rounded to bfloat16 that products do not make. */
static void apply_gate(const float *restrict opens, const float *restrict passes, float *restrict gated, int64_t size,
                       int rounds) {
    memcpy(gated, opens, size * sizeof(float));
    exponentials(gated, size, -1.0f, 0.0f);
    for (int64_t i = 0; i < size; i++) {
        const float opened = opens[i] / (1.0f + gated[i]);
        gated[i] = (rounds ? rounded(opened) : opened) * passes[i];
    }
}

/* Of a row: the gated numbers again, and the gradients of gate and, where that of these was, of up. */
static void gate_backward(const float *restrict opens, const float *restrict passes, float *restrict of_gated,
                          float *restrict gated, float *restrict of_gate, int64_t size) {
    memcpy(gated, opens, size * sizeof(float));
    exponentials(gated, size, -1.0f, 0.0f);
    for (int64_t i = 0; i < size; i++) {
        const float share = 1.0f / (1.0f + gated[i]), opened = opens[i] * share;
        gated[i] = opened * passes[i];
        of_gate[i] = of_gated[i] * passes[i] * (share + opened * (1.0f - share));
        of_gated[i] *= opened;
    }
}
