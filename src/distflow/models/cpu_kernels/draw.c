/* The next token of each row, see `decode_step.py`. */

#include <math.h>
#include <omp.h>
#include <stdint.h>

#include "exponential.h"

#define BLOCK 256
#define LANES 8

static double sum(const float *masses, int64_t size) {
    double lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += masses[i + lane];
    double total = 0.0;
    for (int lane = 0; lane < LANES; lane++) total += lanes[lane];
    for (; i < size; i++) total += masses[i];
    return total;
}

static double sum_of_block(const float *masses, int64_t start, int64_t size) {
    return sum(masses + start, start + BLOCK < size ? BLOCK : size - start);
}

static float largest(const float *logits, int64_t size) {
    float lanes[LANES], top = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = top;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] = logits[i + lane] > lanes[lane] ? logits[i + lane] : lanes[lane];
    for (; i < size; i++) top = logits[i] > top ? logits[i] : top;
    for (int lane = 0; lane < LANES; lane++) top = lanes[lane] > top ? lanes[lane] : top;
    return top;
}

/* The first token at which the cumulative mass is above `target`, which is below the total: by blocks, then in one. */
static int64_t find(const float *masses, int64_t size, double target) {
    double before = 0.0;
    int64_t start = 0;
    for (; start + BLOCK < size; start += BLOCK) {
        const double after = before + sum_of_block(masses, start, size);
        if (after > target) break;
        before = after;
    }
    int64_t last = start; /* of those with a mass: where rounding leaves the sum of the block below the target */
    for (int64_t i = start; i < size && i < start + BLOCK; i++) {
        before += masses[i];
        if (masses[i] > 0.0f) last = i;
        if (before > target) break;
    }
    return last;
}

/* masses: `size` numbers of scratch. Returns whether the row is finite enough to be drawn from. */
static int draw_row(const float *logits, int64_t size, float temperature, double uniform, float *masses, int64_t *token,
                    double *log_prob) {
    const float top = largest(logits, size) / temperature;
    for (int64_t i = 0; i < size; i++) masses[i] = logits[i] / temperature;
    exponentials(masses, size, 1.0f, top);
    double total = 0.0;
    for (int64_t start = 0; start < size; start += BLOCK) total += sum_of_block(masses, start, size);
    if (!isfinite(top) || !isfinite(total)) return 0;
    const double most = nextafter(total, 0.0), target = uniform * total;
    *token = find(masses, size, target < most ? target : most);
    *log_prob = (double)(logits[*token] / temperature) - (double)top - log(total);
    return 1;
}

/* logits: (rows, size); masses: (threads, size). Returns whether all rows could be drawn from. */
int draw(const float *logits, int64_t rows, int64_t size, float temperature, const double *uniform, float *masses,
         int64_t *tokens, double *log_probs, int64_t threads) {
    int all = 1;
#pragma omp parallel for num_threads(threads) reduction(&& : all)
    for (int64_t row = 0; row < rows; row++)
        all = all && draw_row(logits + row * size, size, temperature, uniform[row],
                              masses + omp_get_thread_num() * size, tokens + row, log_probs + row);
    return all;
}
