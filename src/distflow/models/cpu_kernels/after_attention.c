/* What a decoder layer makes of what attention mixed: output, norm, gated MLP and residuals; and its gradient. See
   `training_layer.py`. */

#include <stdint.h>
#include <string.h>

#include "gate.h"
#include "linear.h"

typedef struct {
    const float *x, *mixed; /* (rows, hidden), (rows, output.inputs) */
    float *attended;        /* (rows, hidden): x and what attention adds */
    float *gates, *ups;     /* (rows, `gates_stride`); NULL where nothing is to be differentiated */
    float *made;            /* (rows, hidden) */
    const float *of_made;
    float *of_x, *of_mixed;
    Norm norm;
    Linear output, gate, up, down;
    int64_t rows;
} After;

/* Of what is kept of a gated MLP of `size`. */
int64_t gates_stride(int64_t size) { return up(size, PANEL); }

typedef struct {
    Matrix output, gate, up, down;
} Panels;

static Panels take_all_panels(const After *after, float **memory, int backward) {
    Panels panels;
    panels.output = take_panels(memory, &after->output, backward);
    panels.gate = take_panels(memory, &after->gate, backward);
    panels.up = take_panels(memory, &after->up, backward);
    panels.down = take_panels(memory, &after->down, backward);
    return panels;
}

static void lay_out_all(const After *after, Panels panels, int backward) {
    lay_out(&after->output, panels.output, backward);
    lay_out(&after->gate, panels.gate, backward);
    lay_out(&after->up, panels.up, backward);
    lay_out(&after->down, panels.down, backward);
}

typedef struct {
    Matrix normed, gated;                             /* rows; backward by columns, as `mixed` */
    Matrix gate, up;                                  /* forward, where none are kept */
    Matrix mixed, of_made, of_gate, of_up, of_normed; /* backward */
    Matrix output_sums, gate_sums, up_sums, down_sums, norm;
    float *first, *end; /* of what is summed */
} Scratch;

static Scratch divide(const After *after, float *memory, int backward) {
    const int64_t hidden = after->norm.size, inner = after->gate.outputs, mixed = after->output.inputs;
    const int64_t by_columns = BLOCK * PANEL;
    Scratch own = {0};
    own.normed = take(&memory, BLOCK * STRIDE(hidden), backward ? by_columns : STRIDE(hidden));
    own.gated = take(&memory, BLOCK * STRIDE(inner), backward ? by_columns : STRIDE(inner));
    if (!backward) {
        own.gate = take(&memory, BLOCK * gates_stride(inner), gates_stride(inner));
        own.up = take(&memory, BLOCK * gates_stride(inner), gates_stride(inner));
    } else {
        own.mixed = take(&memory, BLOCK * STRIDE(mixed), by_columns);
        own.of_made = take(&memory, BLOCK * STRIDE(hidden), STRIDE(hidden));
        own.of_gate = take(&memory, BLOCK * STRIDE(inner), STRIDE(inner));
        own.of_up = take(&memory, BLOCK * STRIDE(inner), STRIDE(inner));
        own.of_normed = take(&memory, BLOCK * STRIDE(larger(hidden, mixed)), STRIDE(larger(hidden, mixed)));
        own.first = memory;
        own.output_sums = take_sums(&memory, &after->output);
        own.gate_sums = take_sums(&memory, &after->gate);
        own.up_sums = take_sums(&memory, &after->up);
        own.down_sums = take_sums(&memory, &after->down);
        own.norm = take(&memory, up(hidden, PANEL), 1);
    }
    own.end = memory;
    return own;
}

static int64_t size_of_own(const After *after, int backward) {
    float start[1];
    return divide(after, start, backward).end - start;
}

/* Numbers of scratch memory. */
int64_t after_scratch(const After *after, int64_t backward, int64_t threads) {
    float start[1], *memory = start;
    take_all_panels(after, &memory, backward);
    return memory - start + threads * size_of_own(after, backward);
}

static void add_rows_to(float *to, const float *from, Matrix added, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < size; i++)
            to[row * size + i] = from[row * size + i] + added.memory[row * added.stride + i];
}

void after_attention(const After *after, float *memory, int64_t threads) {
    const Panels panels = take_all_panels(after, &memory, 0);
    const int64_t hidden = after->norm.size, inner = after->gate.outputs, mixed = after->output.inputs;
    const int64_t size = size_of_own(after, 0);
#pragma omp parallel num_threads(threads)
    {
        lay_out_all(after, panels, 0);
#pragma omp barrier
        const Scratch own = divide(after, memory + omp_get_thread_num() * size, 0);
        const Range rows = share(after->rows);
        for (int64_t start = rows.first; start < rows.last; start += BLOCK) {
            const int64_t count = smaller(BLOCK, rows.last - start);
            Matrix gate = own.gate, up = own.up;
            if (after->gates) {
                gate.memory = after->gates + start * gate.stride;
                up.memory = after->ups + start * up.stride;
            }
            float *attended = after->attended + start * hidden;
            apply(&after->output, after->mixed + start * mixed, mixed, count, panels.output, own.normed);
            add_rows_to(attended, after->x + start * hidden, own.normed, count, hidden);
            for (int64_t row = 0; row < count; row++)
                normalise(&after->norm, attended + row * hidden, own.normed.memory + row * own.normed.stride, 0);
            apply(&after->gate, own.normed.memory, own.normed.stride, count, panels.gate, gate);
            apply(&after->up, own.normed.memory, own.normed.stride, count, panels.up, up);
            for (int64_t row = 0; row < count; row++) {
                const float *opens = gate.memory + row * gate.stride, *passes = up.memory + row * up.stride;
                float *gated = own.gated.memory + row * own.gated.stride;
                apply_gate(opens, passes, gated, inner, 0);
            }
            apply(&after->down, own.gated.memory, own.gated.stride, count, panels.down, own.normed);
            add_rows_to(after->made + start * hidden, attended, own.normed, count, hidden);
        }
    }
}

void after_attention_backward(const After *after, float *memory, int64_t threads) {
    const Panels panels = take_all_panels(after, &memory, 1);
    const int64_t hidden = after->norm.size, inner = after->gate.outputs, mixed = after->output.inputs;
    const int64_t gates = gates_stride(inner), size = size_of_own(after, 1);
#pragma omp parallel num_threads(threads)
    {
        lay_out_all(after, panels, 1);
        const Scratch own = divide(after, memory + omp_get_thread_num() * size, 1);
        memset(own.first, 0, (own.end - own.first) * sizeof(float));
#pragma omp barrier
        const Range rows = share(after->rows);
        float line[larger(up(inner, PANEL), up(hidden, PANEL))];
        for (int64_t start = rows.first; start < rows.last; start += BLOCK) {
            const int64_t count = smaller(BLOCK, rows.last - start);
            for (int64_t row = 0; row < count; row++)
                memcpy(own.of_made.memory + row * own.of_made.stride, after->of_made + (start + row) * hidden,
                       hidden * sizeof(float));
            product(own.of_made.memory, own.of_made.stride, 1, count, panels.down, hidden, inner, own.of_up, 0);
            for (int64_t row = 0; row < count; row++) {
                const int64_t at = (start + row) * gates;
                gate_backward(after->gates + at, after->ups + at, own.of_up.memory + row * own.of_up.stride, line,
                              own.of_gate.memory + row * own.of_gate.stride, inner);
                put_by_columns(line, inner, own.gated, row);
                normalise(&after->norm, after->attended + (start + row) * hidden, line, 0);
                put_by_columns(line, hidden, own.normed, row);
                put_by_columns(after->mixed + (start + row) * mixed, mixed, own.mixed, row);
            }
            add_gradients(&after->down, own.of_made, count, own.gated, own.down_sums);
            product(own.of_gate.memory, own.of_gate.stride, 1, count, panels.gate, inner, hidden, own.of_normed, 0);
            product(own.of_up.memory, own.of_up.stride, 1, count, panels.up, inner, hidden, own.of_normed, 1);
            add_gradients(&after->gate, own.of_gate, count, own.normed, own.gate_sums);
            add_gradients(&after->up, own.of_up, count, own.normed, own.up_sums);
            for (int64_t row = 0; row < count; row++) {
                float *of_made = own.of_made.memory + row * own.of_made.stride;
                normalise_backward(&after->norm, after->attended + (start + row) * hidden,
                                   own.of_normed.memory + row * own.of_normed.stride, line, own.norm.memory);
                for (int64_t i = 0; i < hidden; i++) of_made[i] += line[i];
                memcpy(after->of_x + (start + row) * hidden, of_made, hidden * sizeof(float));
            }
            product(own.of_made.memory, own.of_made.stride, 1, count, panels.output, hidden, mixed, own.of_normed, 0);
            add_gradients(&after->output, own.of_made, count, own.mixed, own.output_sums);
            for (int64_t row = 0; row < count; row++)
                memcpy(after->of_mixed + (start + row) * mixed, own.of_normed.memory + row * own.of_normed.stride,
                       mixed * sizeof(float));
        }
#pragma omp barrier
        const Scratch all = divide(after, memory, 1);
        gather_linear(&after->output, all.output_sums, size);
        gather_linear(&after->gate, all.gate_sums, size);
        gather_linear(&after->up, all.up_sums, size);
        gather_linear(&after->down, all.down_sums, size);
        gather(after->norm.of_weight, hidden, 1, all.norm, size);
    }
}
