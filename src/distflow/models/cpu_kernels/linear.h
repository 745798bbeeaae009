/* Linear maps of the rows of a block, and their gradients, in float32.

   Rows go by blocks, so that what is made of them stays in the cache. Each thread has rows of its own, and adds up what
   these give to the weights' gradients; the threads' sums are added in order at last. */

#pragma once

#include <stdint.h>
#include <string.h>

#include "norm.h"
#include "simd_and_float32_matmul.h"
#include "thread_shares.h"

#define BLOCK (6 * TILE) /* rows */
/* Of rows that are read down their columns too: no power of two, of which caches hold few. */
#define STRIDE(size) (up(size, PANEL) + LANES)

typedef struct {
    const float *weight, *bias; /* (outputs, inputs), (outputs) or NULL */
    float *of_weight, *of_bias;
    int64_t inputs, outputs;
} Linear;

/* Memory for the weights as panels: of what goes into the map, with outputs for columns; backward, of what comes back,
   with inputs for columns. */
static Matrix take_panels(float **memory, const Linear *linear, int backward) {
    const int64_t columns = backward ? linear->inputs : linear->outputs;
    const int64_t depth = backward ? linear->outputs : linear->inputs;
    return take(memory, up(columns, PANEL) * depth, depth * PANEL);
}

/* By all threads. */
static void lay_out(const Linear *linear, Matrix panels, int backward) {
    const int64_t inputs = linear->inputs;
    if (backward) {
        const Range own = share(linear->outputs);
        for (int64_t output = own.first; output < own.last; output++)
            put_by_columns(linear->weight + output * inputs, inputs, panels, output);
        return;
    }
    const Range own = share(up(linear->outputs, PANEL) / PANEL);
    for (int64_t panel = own.first; panel < own.last; panel++) {
        float *to = panels.memory + panel * panels.stride;
        const int64_t width = smaller(PANEL, linear->outputs - panel * PANEL);
        if (width < PANEL) memset(to, 0, inputs * PANEL * sizeof(float));
        for (int64_t start = 0; start < inputs; start += LANES) /* of a line of memory at a time */
            for (int64_t column = 0; column < width; column++) {
                const float *from = linear->weight + (panel * PANEL + column) * inputs;
                for (int64_t i = start; i < smaller(start + LANES, inputs); i++) to[i * PANEL + column] = from[i];
            }
    }
}

/* y = x · weightsᵀ + bias */
static void apply(const Linear *linear, const float *x, int64_t x_stride, int64_t rows, Matrix panels, Matrix y) {
    product(x, x_stride, 1, rows, panels, linear->inputs, linear->outputs, y, 0);
    if (!linear->bias) return;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < linear->outputs; i++) y.memory[row * y.stride + i] += linear->bias[i];
}

/* Memory for what rows give to the gradients: of the weights, and behind them of the bias. */
static Matrix take_sums(float **memory, const Linear *linear) {
    const int64_t stride = up(linear->inputs, PANEL);
    return take(memory, linear->outputs * stride + up(linear->outputs, PANEL), stride);
}

static void add_gradients(const Linear *linear, Matrix of_y, int64_t rows, Matrix x_by_columns, Matrix sums) {
    product(of_y.memory, 1, of_y.stride, linear->outputs, x_by_columns, rows, linear->inputs, sums, 1);
    if (!linear->bias) return;
    float *bias = sums.memory + linear->outputs * sums.stride;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < linear->outputs; i++) bias[i] += of_y.memory[row * of_y.stride + i];
}

static void gather_linear(const Linear *linear, Matrix sums, int64_t apart) {
    gather(linear->of_weight, linear->outputs, linear->inputs, sums, apart);
    const Matrix bias = {sums.memory + linear->outputs * sums.stride, 1};
    if (linear->bias) gather(linear->of_bias, linear->outputs, 1, bias, apart);
}
