/* One decode step of a Llama-like decoder, see `decode_step.py`. All is kept in float32. With `halves` what products
   take, of weights and of numbers, and what they make is rounded to bfloat16, and so is what a gate makes: as autocast
   does, by which the trainer computes. Values are such products, and kept so.

   Each sum is taken in an order that neither the number of rows, nor that of threads, nor the memory behind a row's
   position has a say in: a row's bits are its own. With many rows each thread has rows of its own, from the embedding to
   the last norm; with few, all threads share the columns of each product, so that weights are read once. */

#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "exponential.h"
#include "gate.h"
#include "bfloat16_matmul.h"
#include "norm.h"
#include "simd_and_float32_matmul.h"
#include "thread_shares.h"

/* Rows that go through a layer together: what is made of them stays in the cache. The faster products are, the less they
   may wait for weights. */
#if defined(HAS_TILES)
#define CHUNK 128
#else
#define CHUNK 48
#endif

typedef struct {
    const void *panels; /* (columns / PANEL, depth, PANEL), the last one filled up with zeros; of halves, pairs, so too */
    const float *bias;  /* (columns), or NULL */
    int64_t depth, columns, halves;
} Linear;

typedef struct {
    const float *input_norm, *post_norm;
    const float *query_norm, *key_norm; /* (head_dim), or NULL */
    Linear query_key_value, output, gate_up, down;
} Layer;

typedef struct {
    const float *embedding, *norm; /* (vocabulary, hidden), (hidden) */
    const Layer *layers;
    int64_t vocabulary, num_layers, hidden, intermediate, heads, kv_heads, head_dim, halves;
    float epsilon, scaling;
} Model;

typedef struct {
    float *keys; /* (layers, rows, kv_heads, extent, head_dim) */
    void *values; /* the same; in bfloat16 where products are, which made them */
    int64_t layer_stride, row_stride, head_stride;
    const float *cos, *sin; /* (positions, head_dim), the sines of the first half negative */
    const int64_t *places;  /* the row of each sequence, or NULL where they are in order */
} Memory;

/* What an adapter adds to a linear map: up · down · x. Without panels nothing. */
typedef struct {
    Linear down, up;
} LowRank;

typedef struct {
    LowRank query_key_value, output, gate_up, down;
} AdapterLayer;

typedef struct {
    int64_t first, last; /* rows */
    const AdapterLayer *layers;
} Group;

typedef struct {
    const Group *groups;
    int64_t count, most; /* groups; the most columns of a `down` */
} Adapters;

/* The members of a team that share the columns of each product, or the only one for its rows. */
typedef struct {
    int64_t member, members;
} Team;

static void meet(Team team) {
    if (team.members > 1) {
#pragma omp barrier
    }
}

int64_t panel_width(void) { return PANEL; }

/* Numbers, or pairs of them, that a row of the linear map's operand is made of. */
static int64_t depth_of(const Linear *linear) { return linear->halves ? pairs_of(linear->depth) : linear->depth; }

/* What `apply` takes for x (rows, depth): these, or pairs, made of the rows in `own`. pairs: memory for those of all. */
static const void *operand(const Linear *linear, const float *x, Range own, uint32_t *pairs) {
    if (!linear->halves) return x;
    for (int64_t row = own.first; row < own.last; row++)
        pair_up(x + row * linear->depth, linear->depth, pairs + row * depth_of(linear));
    return pairs;
}

/* y (+)= x · weights + bias, of all rows and the panels in `range`. x: their operand, y: (rows, columns) */
static void apply(const Linear *linear, const void *x, float *y, int64_t rows, Range range, int adds) {
    const int64_t depth = depth_of(linear), columns = linear->columns;
    const int most = linear->halves ? ROWS_OF_PAIRS : TILE;
    for (int64_t panel = range.first; panel < range.last; panel++) {
        const float *weights = (const float *)linear->panels + panel * depth * PANEL;
        const int64_t first = panel * PANEL, width = smaller(PANEL, columns - first);
        for (int64_t start = 0; start < rows; start += most) {
            const int size = smaller(most, rows - start);
            Vector sums[ROWS_OF_PAIRS > TILE ? ROWS_OF_PAIRS : TILE][2];
            if (linear->halves)
                multiply_pairs((const uint32_t *)x + start * depth, (const uint32_t *)weights, depth, size, sums);
            else multiply((const float *)x + start * depth, depth, 1, weights, depth, size, sums);
            for (int row = 0; row < size; row++) {
                float *to = y + (start + row) * columns + first;
                const float *made = (const float *)sums[row];
                for (int64_t i = 0; i < width; i++) {
                    float value = made[i] + (linear->bias ? linear->bias[first + i] : 0.0f);
                    if (linear->halves) value = rounded(value);
                    to[i] = adds ? to[i] + value : value;
                }
            }
        }
    }
}

static void rotate(const float *x, const float *cos, const float *sin, float *y, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float first = x[i], second = x[i + half];
        y[i] = first * cos[i] + second * sin[i];
        y[i + half] = second * cos[i + half] + first * sin[i + half];
    }
}

static inline Vector load_values(const void *values, int64_t index, const int halves) {
    return halves ? load_halves((const uint16_t *)values + index) : load((const float *)values + index);
}

static inline float load_value(const void *values, int64_t index, const int halves) {
    return halves ? number_of((uint32_t)((const uint16_t *)values)[index] << 16) : ((const float *)values)[index];
}

/* What one query mixes of `length` values. next: the keys that are read after these. scores: (length), and what is
   missing to a whole vector. */
static inline __attribute__((always_inline)) void mix(const float *query, const float *keys, const void *values,
                                                      const float *next, float scaling, int64_t length,
                                                      int64_t head_dim, float *restrict scores, float *restrict mixed,
                                                      const int halves) {
    for (int64_t i = 0; i < length; i++) { /* the memory is what takes longest: two lines of it for each head */
        const char *value = (const char *)values + i * head_dim * (halves ? 2 : 4);
        __builtin_prefetch(value);
        if (!halves) __builtin_prefetch(value + 64);
        __builtin_prefetch(next + i * head_dim, 0, 2);
        __builtin_prefetch(next + i * head_dim + 16, 0, 2);
        scores[i] = dot(query, keys + i * head_dim, head_dim) * scaling;
    }
    const int64_t wide = up(length, LANES);
    for (int64_t i = length; i < wide; i++) scores[i] = -INFINITY;
    const float top = largest(scores, wide);
    exponentials(scores, wide, 1.0f, top);
    const float all = total(scores, wide);
    int64_t i, d = 0;
    for (; d + LANES <= head_dim; d += LANES) {
        Vector even = {0}, odd = {0};
        for (i = 0; i + 2 <= length; i += 2) {
            even += scores[i] * load_values(values, i * head_dim + d, halves);
            odd += scores[i + 1] * load_values(values, (i + 1) * head_dim + d, halves);
        }
        if (i < length) even += scores[i] * load_values(values, i * head_dim + d, halves);
        store(mixed + d, (even + odd) / all);
    }
    for (; d < head_dim; d++) {
        float last = 0.0f;
        for (i = 0; i < length; i++) last += scores[i] * load_value(values, i * head_dim + d, halves);
        mixed[d] = last / all;
    }
}

/* Normed and rotated queries, in place; keys and values into the memory. */
static void place_row(const Model *model, const Layer *layer, const Memory *memory, int64_t offset, int64_t position,
                      float *projected) {
    const int64_t head_dim = model->head_dim;
    const float *cos = memory->cos + position * head_dim, *sin = memory->sin + position * head_dim;
    for (int64_t head = 0; head < model->heads + model->kv_heads; head++) {
        float *x = projected + head * head_dim;
        const int is_query = head < model->heads;
        const Norm norm = {is_query ? layer->query_norm : layer->key_norm, NULL, head_dim, model->epsilon};
        if (norm.weight) normalise(&norm, x, x, model->halves);
        rotate(x, cos, sin, x, head_dim);
    }
    const float *made_keys = projected + model->heads * head_dim, *made_values = made_keys + model->kv_heads * head_dim;
    for (int64_t kv_head = 0; kv_head < model->kv_heads; kv_head++) {
        const int64_t place = offset + kv_head * memory->head_stride;
        void *values = (char *)memory->values + place * (model->halves ? 2 : 4);
        memcpy(memory->keys + place + position * head_dim, made_keys + kv_head * head_dim, head_dim * sizeof(float));
        write_numbers(made_values + kv_head * head_dim, head_dim, values, position * head_dim, model->halves);
    }
}

static void attend_row(const Model *model, const Memory *memory, int64_t offset, int64_t position,
                       const float *queries, float *scores, float *mixed) {
    const int64_t head_dim = model->head_dim, group = model->heads / model->kv_heads;
    for (int64_t kv_head = 0; kv_head < model->kv_heads; kv_head++) {
        const int64_t place = offset + kv_head * memory->head_stride;
        const float *keys = memory->keys + place;
        const void *values = (const char *)memory->values + place * (model->halves ? 2 : 4);
        const float *next = kv_head + 1 < model->kv_heads ? keys + memory->head_stride
                                                          : memory->keys + offset + memory->row_stride;
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
            const float *query = queries + head * head_dim;
            float *to = mixed + head * head_dim;
            if (model->halves) mix(query, keys, values, next, model->scaling, position + 1, head_dim, scores, to, 1);
            else mix(query, keys, values, next, model->scaling, position + 1, head_dim, scores, to, 0);
        }
    }
}

static int64_t panels_of(const Linear *linear) { return up(linear->columns, PANEL) / PANEL; }

static Range panels_for(const Linear *linear, Team team) {
    return share_of(panels_of(linear), team.member, team.members);
}

/* y += what the adapters of these rows add to a linear map of a layer. place: of the map in `AdapterLayer`. x: its
   operand. low, pairs: memory for what `down` makes, and for its pairs. */
static void adapt(const Adapters *adapters, int64_t layer, size_t place, Range rows, const void *x, float *y,
                  float *low, uint32_t *pairs, Team team) {
    for (int64_t i = 0; i < adapters->count; i++) {
        const Group *group = adapters->groups + i;
        const LowRank *own = (const LowRank *)((const char *)(group->layers + layer) + place);
        const int64_t first = larger(group->first, rows.first), last = smaller(group->last, rows.last);
        if (!own->down.panels || first >= last) continue;
        const int64_t start = first - rows.first, count = last - first;
        float *made = low + start * adapters->most;
        apply(&own->down, (const float *)x + start * depth_of(&own->down), made, count, panels_for(&own->down, team), 0);
        meet(team);
        const Range mine = share_of(count, team.member, team.members);
        const void *given = operand(&own->up, made, mine, pairs + start * pairs_of(adapters->most));
        if (own->up.halves) meet(team);
        apply(&own->up, given, y + start * own->up.columns, count, panels_for(&own->up, team), 1);
    }
}

/* Numbers that each call of `decode` wants as scratch memory for each of its threads. */
int64_t scratch_size(const Model *model, int64_t most, int64_t extent) {
    const int64_t queries = model->heads * model->head_dim, all = queries + 2 * model->kv_heads * model->head_dim;
    const int64_t pairs = pairs_of(larger(larger(model->hidden, queries), model->intermediate));
    const int64_t of_pairs = pairs + pairs_of(most); /* of more rows than there are, which tiles read */
    return CHUNK * (model->hidden + all + queries + 3 * model->intermediate + most) +
           (CHUNK + ROWS_OF_PAIRS) * of_pairs + up(extent, LANES);
}

/* hidden: (rows, hidden), after the final norm. positions: of the rows' tokens. width: tokens of a sequence, which follow
   one another, and share a row of the memory: each finds the keys before it, since a thread takes whole sequences, or
   all threads meet when the keys are placed. adapters: the rows of a group follow one another. 0, or 1 and nothing done: a token is outside of the vocabulary, or a
   position of the memory's `extent`. */
int decode(const Model *model, const Memory *memory, const Adapters *adapters, const int64_t *tokens,
           const int64_t *positions, int64_t rows, int64_t width, int64_t extent, float *hidden, float *scratch,
           int64_t threads) {
    const int64_t size = model->hidden, inner = model->intermediate, queries = model->heads * model->head_dim;
    const int64_t all = queries + 2 * model->kv_heads * model->head_dim;
    for (int64_t row = 0; row < rows; row++)
        if (tokens[row] < 0 || tokens[row] >= model->vocabulary || positions[row] < 0 || positions[row] >= extent)
            return 1;
    const Norm norm = {model->norm, NULL, size, model->epsilon};
    const int64_t room = scratch_size(model, adapters->most, extent);
    const int together = threads > 1 && (rows < threads * TILE || rows / width < threads);
#pragma omp parallel num_threads(threads)
    {
        const int64_t thread = omp_get_thread_num(), threads_here = omp_get_num_threads();
        const Team team = {together ? thread : 0, together ? threads_here : 1};
        const Range whole = share(rows / width);
        const Range mine = together ? (Range){0, rows} : (Range){whole.first * width, whole.last * width};
        float *normed = scratch + (together ? 0 : thread) * room;
        float *projected = normed + CHUNK * size, *mixed = projected + CHUNK * all;
        float *gate_up = mixed + CHUNK * queries, *gated = gate_up + CHUNK * 2 * inner;
        float *low = gated + CHUNK * inner;
        uint32_t *low_pairs = (uint32_t *)(low + CHUNK * adapters->most);
        uint32_t *pairs = low_pairs + (CHUNK + ROWS_OF_PAIRS) * pairs_of(adapters->most);
        float *scores = scratch + (thread + 1) * room - up(extent, LANES);
        begin_pairs();
        for (int64_t first = mine.first; first < mine.last; first += CHUNK) {
            const int64_t count = smaller(CHUNK, mine.last - first);
            const Range own = share_of(count, team.member, team.members); /* rows of the chunk */
            float *x = hidden + first * size;
            for (int64_t row = own.first; row < own.last; row++)
                memcpy(x + row * size, model->embedding + tokens[first + row] * size, size * sizeof(float));
            for (int64_t index = 0; index < model->num_layers; index++) {
                const Layer *layer = model->layers + index;
                const Norm input_norm = {layer->input_norm, NULL, size, model->epsilon};
                const Norm post_norm = {layer->post_norm, NULL, size, model->epsilon};
#define APPLY(linear, y, adds)                                                                                         \
    apply(&layer->linear, given, y, count, panels_for(&layer->linear, team), adds);                                    \
    adapt(adapters, index, offsetof(AdapterLayer, linear), (Range){first, first + count}, given, y, low, low_pairs, team)
                for (int64_t row = own.first; row < own.last; row++)
                    normalise(&input_norm, x + row * size, normed + row * size, 0);
                const void *given = operand(&layer->query_key_value, normed, own, pairs);
                meet(team);
                APPLY(query_key_value, projected, 0);
                meet(team);
#define SEQUENCE(row) (width > 1 ? (first + (row)) / width : first + (row))
#define OFFSET(row)                                                                                                    \
    (index * memory->layer_stride +                                                                                    \
     (memory->places ? memory->places[SEQUENCE(row)] : SEQUENCE(row)) * memory->row_stride)
#define ATTEND(row)                                                                                                    \
    attend_row(model, memory, OFFSET(row), positions[first + row], projected + row * all, scores, mixed + row * queries)
                for (int64_t row = own.first; row < own.last; row++) {
                    place_row(model, layer, memory, OFFSET(row), positions[first + row], projected + row * all);
                    if (width == 1) ATTEND(row);
                }
                if (width > 1) {
                    meet(team);
                    for (int64_t row = own.first; row < own.last; row++) ATTEND(row);
                }
                given = operand(&layer->output, mixed, own, pairs);
                meet(team);
                APPLY(output, x, 1);
                meet(team);
                for (int64_t row = own.first; row < own.last; row++)
                    normalise(&post_norm, x + row * size, normed + row * size, 0);
                given = operand(&layer->gate_up, normed, own, pairs);
                meet(team);
                APPLY(gate_up, gate_up, 0);
                meet(team);
                for (int64_t row = own.first; row < own.last; row++)
                    apply_gate(gate_up + row * 2 * inner, gate_up + (row * 2 + 1) * inner, gated + row * inner, inner,
                               model->halves);
                given = operand(&layer->down, gated, own, pairs);
                meet(team);
                APPLY(down, x, 1);
                meet(team);
            }
            for (int64_t row = own.first; row < own.last; row++)
                normalise(&norm, x + row * size, x + row * size, 0);
        }
        end_pairs();
    }
    return 0;
}

/* Numbers of scratch memory for `project`. */
int64_t project_scratch(const Linear *linear, int64_t rows) { return up(rows, ROWS_OF_PAIRS) * depth_of(linear); }

/* y: (rows, columns) */
void project(const Linear *linear, const float *x, float *y, int64_t rows, float *scratch, int64_t threads) {
#pragma omp parallel num_threads(threads)
    {
        const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
        const void *given = operand(linear, x, share(rows), (uint32_t *)scratch);
#pragma omp barrier
        begin_pairs();
        apply(linear, given, y, rows, share(panels_of(linear)), 0);
        end_pairs();
    }
}
