/* A row divided by its root mean square, times a weight; and its gradient. */

#pragma once

#include <math.h>
#include <stdint.h>

#include "bfloat16.h"
#include "simd_and_float32_matmul.h"

typedef struct {
    const float *weight; /* (size) */
    float *of_weight;
    int64_t size;
    float epsilon;
} Norm;

static float scale_of(const Norm *norm, const float *x) {
    return 1.0f / sqrtf(dot(x, x, norm->size) / norm->size + norm->epsilon);
}

/* rounds: what is multiplied by the weights, as where x itself is rounded. */
static void normalise(const Norm *norm, const float *x, float *y, int rounds) {
    const float scale = scale_of(norm, x);
    for (int64_t i = 0; i < norm->size; i++) {
        const float normed = x[i] * scale;
        y[i] = norm->weight[i] * (rounds ? rounded(normed) : normed);
    }
}

/* With r = 1 / sqrt(mean(x²) + ε), g = dy · w: dx = r g - x r³ mean(g x), dw = dy x r. dy may be where dx goes. */
static void normalise_backward(const Norm *norm, const float *x, const float *of_y, float *of_x, float *of_weight) {
    const float scale = scale_of(norm, x);
    for (int64_t i = 0; i < norm->size; i++) {
        of_weight[i] += of_y[i] * (x[i] * scale);
        of_x[i] = of_y[i] * norm->weight[i];
    }
    const float common = dot(of_x, x, norm->size) / norm->size * scale * scale;
    for (int64_t i = 0; i < norm->size; i++) of_x[i] = scale * (of_x[i] - x[i] * common);
}
