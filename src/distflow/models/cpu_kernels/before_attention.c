/* What attention is given by a decoder layer: norm, projections, rotation; and its gradient. See `training_layer.py`. */

#include <stdint.h>
#include <string.h>

#include "linear.h"
#include "rotation.h"

/* Of queries, keys or values. */
typedef struct {
    Linear linear;
    Norm norm;        /* of a head; its weight NULL: none */
    float *projected; /* (rows, outputs): before that norm; NULL without */
    float *made;      /* (rows, outputs) */
    const float *of_made;
    int64_t rotates;
} Projection;

typedef struct {
    const float *x; /* (rows, hidden) */
    float *of_x;
    const float *cos, *sin; /* (rows, head_dim) */
    Norm norm;
    Projection projections[3];
    int64_t rows, head_dim;
} Before;

static int64_t widest(const Before *before) {
    int64_t size = 0;
    for (int i = 0; i < 3; i++) size = larger(size, before->projections[i].linear.outputs);
    return size;
}

/* They are what all threads share, and where `memory` begins; the rest is a thread's own. */
static void take_all_panels(const Before *before, float **memory, int backward, Matrix panels[3]) {
    for (int i = 0; i < 3; i++) panels[i] = take_panels(memory, &before->projections[i].linear, backward);
}

typedef struct {
    Matrix normed, made, of_normed;
    Matrix sums[3], norm, norms[3];
    float *first, *end; /* of what is summed */
} Scratch;

static Scratch divide(const Before *before, float *memory, int backward) {
    const int64_t hidden = before->norm.size;
    Scratch own = {0};
    own.normed = take(&memory, BLOCK * STRIDE(hidden), backward ? BLOCK * PANEL : STRIDE(hidden));
    own.made = take(&memory, BLOCK * STRIDE(widest(before)), STRIDE(widest(before)));
    if (backward) {
        own.of_normed = take(&memory, BLOCK * STRIDE(hidden), STRIDE(hidden));
        own.first = memory;
        for (int i = 0; i < 3; i++) own.sums[i] = take_sums(&memory, &before->projections[i].linear);
        own.norm = take(&memory, up(hidden, PANEL), 1);
        for (int i = 0; i < 3; i++) own.norms[i] = take(&memory, up(before->head_dim, PANEL), 1);
    }
    own.end = memory;
    return own;
}

static int64_t size_of_own(const Before *before, int backward) {
    float start[1];
    return divide(before, start, backward).end - start;
}

/* Numbers of scratch memory. */
int64_t before_scratch(const Before *before, int64_t backward, int64_t threads) {
    float start[1], *memory = start;
    Matrix panels[3];
    take_all_panels(before, &memory, backward, panels);
    return memory - start + threads * size_of_own(before, backward);
}

void before_attention(const Before *before, float *memory, int64_t threads) {
    Matrix panels[3];
    take_all_panels(before, &memory, 0, panels);
    const int64_t hidden = before->norm.size, dim = before->head_dim, size = size_of_own(before, 0);
#pragma omp parallel num_threads(threads)
    {
        for (int i = 0; i < 3; i++) lay_out(&before->projections[i].linear, panels[i], 0);
#pragma omp barrier
        const Scratch own = divide(before, memory + omp_get_thread_num() * size, 0);
        const Range rows = share(before->rows);
        for (int64_t start = rows.first; start < rows.last; start += BLOCK) {
            const int64_t count = smaller(BLOCK, rows.last - start);
            for (int64_t row = 0; row < count; row++)
                normalise(&before->norm, before->x + (start + row) * hidden, own.normed.memory + row * own.normed.stride, 0);
            for (int i = 0; i < 3; i++) {
                const Projection *projection = before->projections + i;
                const int64_t outputs = projection->linear.outputs;
                apply(&projection->linear, own.normed.memory, own.normed.stride, count, panels[i], own.made);
                for (int64_t row = 0; row < count; row++) {
                    float *made = own.made.memory + row * own.made.stride;
                    const int64_t to = (start + row) * outputs, angles = (start + row) * dim;
                    if (projection->projected) memcpy(projection->projected + to, made, outputs * sizeof(float));
                    for (int64_t head = 0; head < outputs; head += dim) {
                        if (projection->norm.weight) normalise(&projection->norm, made + head, made + head, 0);
                        if (projection->rotates) rotate(made + head, before->cos + angles, before->sin + angles, dim);
                    }
                    memcpy(projection->made + to, made, outputs * sizeof(float));
                }
            }
        }
    }
}

void before_attention_backward(const Before *before, float *memory, int64_t threads) {
    Matrix panels[3];
    take_all_panels(before, &memory, 1, panels);
    const int64_t hidden = before->norm.size, dim = before->head_dim, size = size_of_own(before, 1);
#pragma omp parallel num_threads(threads)
    {
        for (int i = 0; i < 3; i++) lay_out(&before->projections[i].linear, panels[i], 1);
        const Scratch own = divide(before, memory + omp_get_thread_num() * size, 1);
        memset(own.first, 0, (own.end - own.first) * sizeof(float));
#pragma omp barrier
        const Range rows = share(before->rows);
        for (int64_t start = rows.first; start < rows.last; start += BLOCK) {
            const int64_t count = smaller(BLOCK, rows.last - start);
            float normed[up(hidden, PANEL)];
            for (int64_t row = 0; row < count; row++) {
                normalise(&before->norm, before->x + (start + row) * hidden, normed, 0);
                put_by_columns(normed, hidden, own.normed, row);
            }
            for (int i = 0; i < 3; i++) {
                const Projection *projection = before->projections + i;
                const int64_t outputs = projection->linear.outputs;
                for (int64_t row = 0; row < count; row++) {
                    float *of_made = own.made.memory + row * own.made.stride;
                    const int64_t from = (start + row) * outputs, angles = (start + row) * dim;
                    memcpy(of_made, projection->of_made + from, outputs * sizeof(float));
                    for (int64_t head = 0; head < outputs; head += dim) {
                        if (projection->rotates)
                            rotate_backward(of_made + head, before->cos + angles, before->sin + angles, dim);
                        if (projection->norm.weight)
                            normalise_backward(&projection->norm, projection->projected + from + head, of_made + head,
                                               of_made + head, own.norms[i].memory);
                    }
                }
                product(own.made.memory, own.made.stride, 1, count, panels[i], outputs, hidden, own.of_normed, i > 0);
                add_gradients(&projection->linear, own.made, count, own.normed, own.sums[i]);
            }
            for (int64_t row = 0; row < count; row++)
                normalise_backward(&before->norm, before->x + (start + row) * hidden,
                                   own.of_normed.memory + row * own.of_normed.stride,
                                   before->of_x + (start + row) * hidden, own.norm.memory);
        }
#pragma omp barrier
        const Scratch all = divide(before, memory, 1);
        for (int i = 0; i < 3; i++) {
            const Projection *projection = before->projections + i;
            gather_linear(&projection->linear, all.sums[i], size);
            if (projection->norm.weight) gather(projection->norm.of_weight, dim, 1, all.norms[i], size);
        }
        gather(before->norm.of_weight, hidden, 1, all.norm, size);
    }
}
