/* What stands between the products of a decoder layer: residuals and norms, heads and their rotation, the gate; and their
   gradients. See `training_layer.py`. halves: what products take and make is in bfloat16, else in float32. */

#include <stdint.h>
#include <string.h>

#include "bfloat16.h"
#include "gate.h"
#include "norm.h"
#include "rotation.h"
#include "thread_shares.h"

/* made = x + added, normed: its norm. added: NULL for none. All (rows, norm.size). */
void add_norm(const Norm *norm, const float *x, const void *added, int64_t rows, int64_t halves, float *made,
              void *normed, int64_t threads) {
    const int64_t size = norm->size;
#pragma omp parallel num_threads(threads)
    {
        const Range own = share(rows);
        float line[size];
        for (int64_t row = own.first; row < own.last; row++) {
            const int64_t at = row * size;
            if (added) read_numbers(added, at, size, line, halves);
            else memset(line, 0, size * sizeof(float));
            for (int64_t i = 0; i < size; i++) made[at + i] = x[at + i] + line[i];
            normalise(norm, made + at, line, 0);
            write_numbers(line, size, normed, at, halves);
        }
    }
}

/* of_added: NULL where nothing was added. sums: (threads, norm.size) */
void add_norm_backward(const Norm *norm, const float *made, const float *of_made, const void *of_normed, int64_t rows,
                       int64_t halves, float *of_x, void *of_added, float *sums, int64_t threads) {
    const int64_t size = norm->size;
#pragma omp parallel num_threads(threads)
    {
        const Range own = share(rows);
        float line[size], *of_weight = sums + omp_get_thread_num() * size;
        memset(of_weight, 0, size * sizeof(float));
        for (int64_t row = own.first; row < own.last; row++) {
            const int64_t at = row * size;
            read_numbers(of_normed, at, size, line, halves);
            normalise_backward(norm, made + at, line, line, of_weight);
            for (int64_t i = 0; i < size; i++) of_x[at + i] = of_made[at + i] + line[i];
            if (of_added) write_numbers(of_x + at, size, of_added, at, halves);
        }
#pragma omp barrier
        gather(norm->of_weight, size, 1, (Matrix){sums, 1}, size);
    }
}

/* Of queries and keys the norm of a head, its weight NULL for none; and how many heads they and the values have. */
typedef struct {
    Norm norms[2];
    int64_t heads[3], head_dim;
} Heads;

/* projected: (rows, all heads · head_dim). made: of queries, keys, values (rows, heads, head_dim). cos, sin: (rows,
   head_dim) */
void split_heads(const Heads *heads, const void *projected, const float *cos, const float *sin, int64_t rows,
                 int64_t halves, float *const made[3], int64_t threads) {
    const int64_t dim = heads->head_dim;
#pragma omp parallel num_threads(threads)
    {
        const Range own = share(rows);
        int64_t at = own.first * dim * (heads->heads[0] + heads->heads[1] + heads->heads[2]);
        for (int64_t row = own.first; row < own.last; row++)
            for (int kind = 0; kind < 3; kind++)
                for (int64_t head = 0; head < heads->heads[kind]; head++, at += dim) {
                    float *to = made[kind] + (row * heads->heads[kind] + head) * dim;
                    read_numbers(projected, at, dim, to, halves);
                    if (kind == 2) continue;
                    if (heads->norms[kind].weight) normalise(heads->norms + kind, to, to, halves);
                    rotate(to, cos + row * dim, sin + row * dim, dim);
                }
    }
}

/* sums: (threads, 2, head_dim) */
void split_heads_backward(const Heads *heads, const void *projected, const float *cos, const float *sin, int64_t rows,
                          int64_t halves, const float *const of_made[3], void *of_projected, float *sums,
                          int64_t threads) {
    const int64_t dim = heads->head_dim;
#pragma omp parallel num_threads(threads)
    {
        const Range own = share(rows);
        int64_t at = own.first * dim * (heads->heads[0] + heads->heads[1] + heads->heads[2]);
        float of_head[dim], given[dim], *of_weights = sums + omp_get_thread_num() * 2 * dim;
        memset(of_weights, 0, 2 * dim * sizeof(float));
        for (int64_t row = own.first; row < own.last; row++)
            for (int kind = 0; kind < 3; kind++)
                for (int64_t head = 0; head < heads->heads[kind]; head++, at += dim) {
                    memcpy(of_head, of_made[kind] + (row * heads->heads[kind] + head) * dim, dim * sizeof(float));
                    if (kind < 2) rotate_backward(of_head, cos + row * dim, sin + row * dim, dim);
                    if (kind < 2 && heads->norms[kind].weight) {
                        read_numbers(projected, at, dim, given, halves);
                        normalise_backward(heads->norms + kind, given, of_head, of_head, of_weights + kind * dim);
                    }
                    write_numbers(of_head, dim, of_projected, at, halves);
                }
#pragma omp barrier
        for (int kind = 0; kind < 2; kind++)
            if (heads->norms[kind].weight)
                gather(heads->norms[kind].of_weight, dim, 1, (Matrix){sums + kind * dim, 1}, 2 * dim);
    }
}

/* gate_up: (rows, 2, size), gated: (rows, size) */
void gate_rows(const void *gate_up, int64_t rows, int64_t size, int64_t halves, void *gated, int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        const Range own = share(rows);
        float both[2 * size], line[size];
        for (int64_t row = own.first; row < own.last; row++) {
            read_numbers(gate_up, row * 2 * size, 2 * size, both, halves);
            apply_gate(both, both + size, line, size, halves);
            write_numbers(line, size, gated, row * size, halves);
        }
    }
}

void gate_rows_backward(const void *gate_up, const void *of_gated, int64_t rows, int64_t size, int64_t halves,
                        void *of_gate_up, int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        const Range own = share(rows);
        float both[2 * size], of_up[size], of_gate[size], line[size];
        for (int64_t row = own.first; row < own.last; row++) {
            read_numbers(gate_up, row * 2 * size, 2 * size, both, halves);
            read_numbers(of_gated, row * size, size, of_up, halves);
            gate_backward(both, both + size, of_up, line, of_gate, size);
            write_numbers(of_gate, size, of_gate_up, row * 2 * size, halves);
            write_numbers(of_up, size, of_gate_up, (row * 2 + 1) * size, halves);
        }
    }
}
