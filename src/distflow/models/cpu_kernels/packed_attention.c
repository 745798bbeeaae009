/* Causal attention of packed sequences, and its gradient, see `training_layer.py`.

   A task is a sequence and one of its key-value heads, whose keys and values are brought together in the layouts that
   products want. Queries go by blocks, whose weights are made as a whole: a row of them is as long as its sequence. What
   a task computes does not depend on any other, nor on which thread has it. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#include "exponential.h"
#include "simd_and_float32_matmul.h"

#define BLOCK (2 * TILE) /* queries */
#define AHEAD 8          /* tokens */

typedef struct {
    const int64_t *place;  /* of each token of each sequence, one after the other: its row */
    const int64_t *starts; /* (sequences + 1) in `place` */
    const int64_t *shared; /* (sequences): tokens at the beginning that are an earlier sequence's too, which has queries */
    int64_t sequences, longest, heads, kv_heads, head_dim;
    float scale;
} Packing;

/* What a thread works in: of one sequence and head, and of one block. By tokens: (panels of tokens, head_dim, PANEL). By
   dimensions: (panels of dimensions, tokens, PANEL). The rest: rows. */
typedef struct {
    Matrix keys_by_tokens, values_by_tokens, keys, values, of_keys, of_values;
    Matrix query, of_mixed; /* by dimensions */
    Matrix made, weights, of_weights;
} Scratch;

/* Numbers of scratch memory for each thread. */
int64_t attend_scratch(const Packing *packing) {
    const int64_t tokens = up(packing->longest, PANEL), columns = up(packing->head_dim, PANEL);
    return 6 * tokens * columns + 3 * BLOCK * columns + 2 * BLOCK * tokens;
}

static Scratch divide(const Packing *packing, float *memory) {
    const int64_t tokens = up(packing->longest, PANEL), dim = packing->head_dim, columns = up(dim, PANEL);
    Scratch scratch;
    scratch.keys_by_tokens = take(&memory, tokens * columns, dim * PANEL);
    scratch.values_by_tokens = take(&memory, tokens * columns, dim * PANEL);
    scratch.keys = take(&memory, tokens * columns, tokens * PANEL);
    scratch.values = take(&memory, tokens * columns, tokens * PANEL);
    scratch.of_keys = take(&memory, tokens * columns, columns);
    scratch.of_values = take(&memory, tokens * columns, columns);
    scratch.query = take(&memory, BLOCK * columns, BLOCK * PANEL);
    scratch.of_mixed = take(&memory, BLOCK * columns, BLOCK * PANEL);
    scratch.made = take(&memory, BLOCK * columns, columns);
    scratch.weights = take(&memory, BLOCK * tokens, tokens);
    scratch.of_weights = take(&memory, BLOCK * tokens, tokens);
    return scratch;
}

static void put_by_tokens(const float *x, int64_t size, Matrix panels, int64_t token) {
    float *to = panels.memory + token / PANEL * panels.stride + token % PANEL;
    for (int64_t i = 0; i < size; i++) to[i * PANEL] = x[i];
}

/* Has the cache load what is read soon: a head is a line or two of a row, each somewhere else in memory. */
static inline void fetch(const float *x, int64_t size) {
    for (int64_t i = 0; i < size; i += 16) __builtin_prefetch(x + i);
}

/* One block of queries of one head: `count` tokens from `start` on of their sequence. `rows`: where they begin. */
typedef struct {
    int64_t start, count, row, head;
} Block;

static int64_t offset_of(const Packing *packing, const Block *block, int64_t row) {
    return ((block->row + row) * packing->heads + block->head) * packing->head_dim;
}

/* Scores of a block, before they are scaled: (count, `wide`), where a row does not see a token -inf. */
static void score(const Packing *packing, const Block *block, const float *queries, const Scratch *scratch,
                  int64_t wide) {
    product(queries + offset_of(packing, block, 0), packing->heads * packing->head_dim, 1, block->count,
            scratch->keys_by_tokens, packing->head_dim, wide, scratch->weights, 0);
    for (int64_t row = 0; row < block->count; row++) {
        float *scores = scratch->weights.memory + row * scratch->weights.stride;
        for (int64_t i = block->start + row + 1; i < wide; i++) scores[i] = -INFINITY;
    }
}

static void attend_block(const Packing *packing, const Block *block, const float *queries, const Scratch *scratch,
                         float *mixed, float *log_sums) {
    const int64_t seen = block->start + block->count, wide = up(seen, PANEL), dim = packing->head_dim;
    float totals[BLOCK];
    score(packing, block, queries, scratch, wide);
    for (int64_t row = 0; row < block->count; row++) {
        float *weights = scratch->weights.memory + row * scratch->weights.stride;
        const float top = largest(weights, wide) * packing->scale;
        exponentials(weights, wide, packing->scale, top);
        totals[row] = total(weights, wide);
        log_sums[(block->row + row) * packing->heads + block->head] = top + logf(totals[row]);
    }
    product(scratch->weights.memory, scratch->weights.stride, 1, block->count, scratch->values, seen, dim, scratch->made,
            0);
    for (int64_t row = 0; row < block->count; row++) {
        const float *made = scratch->made.memory + row * scratch->made.stride;
        float *to = mixed + offset_of(packing, block, row);
        for (int64_t i = 0; i < dim; i++) to[i] = made[i] / totals[row];
    }
}

typedef struct {
    const float *queries, *mixed, *log_sums, *of_mixed; /* (rows, heads, head_dim), log_sums (rows, heads) */
    float *of_queries;
} Backward;

/* With P = softmax(S), O = P V: dS = P (dO Vᵀ - ⟨dO, O⟩) (arXiv 2205.14135, appendix B). */
static void attend_block_backward(const Packing *packing, const Block *block, const Backward *known,
                                  const Scratch *scratch) {
    const int64_t seen = block->start + block->count, wide = up(seen, PANEL), dim = packing->head_dim;
    const int64_t first = offset_of(packing, block, 0), row_stride = packing->heads * dim;
    const int64_t stride = scratch->weights.stride;
    for (int64_t row = 0; row < block->count; row++) {
        fetch(known->of_mixed + first + row * row_stride, dim);
        fetch(known->mixed + first + row * row_stride, dim);
    }
    score(packing, block, known->queries, scratch, wide);
    product(known->of_mixed + first, row_stride, 1, block->count, scratch->values_by_tokens, dim, seen,
            scratch->of_weights, 0);
    for (int64_t row = 0; row < block->count; row++) {
        float *weights = scratch->weights.memory + row * stride, *of_weights = scratch->of_weights.memory + row * stride;
        const float *of_mixed = known->of_mixed + first + row * row_stride;
        const float log_sum = known->log_sums[(block->row + row) * packing->heads + block->head];
        const float common = dot(of_mixed, known->mixed + first + row * row_stride, dim);
        exponentials(weights, wide, packing->scale, log_sum);
        for (int64_t i = 0; i < wide; i++)
            of_weights[i] = weights[i] * (of_weights[i] - common) * packing->scale;
        put_by_columns(known->queries + first + row * row_stride, dim, scratch->query, row);
        put_by_columns(of_mixed, dim, scratch->of_mixed, row);
    }
    product(scratch->weights.memory, 1, stride, seen, scratch->of_mixed, block->count, dim, scratch->of_values, 1);
    product(scratch->of_weights.memory, 1, stride, seen, scratch->query, block->count, dim, scratch->of_keys, 1);
    product(scratch->of_weights.memory, stride, 1, block->count, scratch->keys, seen, dim, scratch->made, 0);
    for (int64_t row = 0; row < block->count; row++)
        memcpy(known->of_queries + first + row * row_stride, scratch->made.memory + row * scratch->made.stride,
               dim * sizeof(float));
}

/* The keys and values of one task, (rows, kv_heads, head_dim), in the scratch memory. */
static void gather(const Packing *packing, int64_t sequence, int64_t kv_head, const float *keys, const float *values,
                   const Scratch *scratch, int backward) {
    const int64_t start = packing->starts[sequence], tokens = packing->starts[sequence + 1] - start;
    const int64_t dim = packing->head_dim;
    memset(scratch->keys_by_tokens.memory, 0, up(tokens, PANEL) * dim * sizeof(float));
    memset(scratch->values_by_tokens.memory, 0, up(tokens, PANEL) * dim * sizeof(float));
    for (int64_t token = 0; token < tokens; token++) {
        const int64_t offset = (packing->place[start + token] * packing->kv_heads + kv_head) * dim;
        if (token + AHEAD < tokens) {
            const int64_t next = (packing->place[start + token + AHEAD] * packing->kv_heads + kv_head) * dim;
            fetch(keys + next, dim);
            fetch(values + next, dim);
        }
        put_by_tokens(keys + offset, dim, scratch->keys_by_tokens, token);
        put_by_columns(values + offset, dim, scratch->values, token);
        if (backward) {
            put_by_columns(keys + offset, dim, scratch->keys, token);
            put_by_tokens(values + offset, dim, scratch->values_by_tokens, token);
        }
    }
}

/* mixed: (rows, heads, head_dim); log_sums: (rows, heads), of the scores' exponentials. */
void attend(const Packing *packing, const float *queries, const float *keys, const float *values, float *mixed,
            float *log_sums, float *memory, int64_t threads) {
    const int64_t group = packing->heads / packing->kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
    for (int64_t sequence = 0; sequence < packing->sequences; sequence++)
        for (int64_t kv_head = 0; kv_head < packing->kv_heads; kv_head++) {
            const Scratch scratch = divide(packing, memory + omp_get_thread_num() * attend_scratch(packing));
            const int64_t *place = packing->place + packing->starts[sequence];
            const int64_t tokens = packing->starts[sequence + 1] - packing->starts[sequence];
            gather(packing, sequence, kv_head, keys, values, &scratch, 0);
            for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
                for (int64_t start = packing->shared[sequence]; start < tokens; start += TILE) {
                    const Block block = {start, smaller(TILE, tokens - start), place[start], head};
                    attend_block(packing, &block, queries, &scratch, mixed, log_sums);
                }
        }
}

/* of_keys, of_values: (tokens in `place`, kv_heads, head_dim), what each sequence adds. */
void attend_backward(const Packing *packing, const float *queries, const float *keys, const float *values,
                     const float *mixed, const float *log_sums, const float *of_mixed, float *of_queries,
                     float *of_keys, float *of_values, float *memory, int64_t threads) {
    const int64_t group = packing->heads / packing->kv_heads, dim = packing->head_dim;
    const Backward known = {queries, mixed, log_sums, of_mixed, of_queries};
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads)
    for (int64_t sequence = 0; sequence < packing->sequences; sequence++)
        for (int64_t kv_head = 0; kv_head < packing->kv_heads; kv_head++) {
            const Scratch scratch = divide(packing, memory + omp_get_thread_num() * attend_scratch(packing));
            const int64_t *place = packing->place + packing->starts[sequence];
            const int64_t tokens = packing->starts[sequence + 1] - packing->starts[sequence];
            gather(packing, sequence, kv_head, keys, values, &scratch, 1);
            memset(scratch.of_keys.memory, 0, tokens * scratch.of_keys.stride * sizeof(float));
            memset(scratch.of_values.memory, 0, tokens * scratch.of_values.stride * sizeof(float));
            for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
                for (int64_t start = packing->shared[sequence]; start < tokens; start += BLOCK) {
                    const Block block = {start, smaller(BLOCK, tokens - start), place[start], head};
                    attend_block_backward(packing, &block, &known, &scratch);
                }
            for (int64_t token = 0; token < tokens; token++) {
                const int64_t to = ((packing->starts[sequence] + token) * packing->kv_heads + kv_head) * dim;
                memcpy(of_keys + to, scratch.of_keys.memory + token * scratch.of_keys.stride, dim * sizeof(float));
                memcpy(of_values + to, scratch.of_values.memory + token * scratch.of_values.stride,
                       dim * sizeof(float));
            }
        }
}

/* to: rows of `size` numbers; row `place[i]` of it gets row i of `from` added, in order. */
void add_rows(const int64_t *place, int64_t count, int64_t size, const float *from, float *to, int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        const int64_t first = size * omp_get_thread_num() / omp_get_num_threads();
        const int64_t last = size * (omp_get_thread_num() + 1) / omp_get_num_threads();
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = first; j < last; j++) to[place[i] * size + j] += from[i * size + j];
    }
}
