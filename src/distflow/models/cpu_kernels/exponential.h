#pragma once

#include <stdint.h>

/* Cody and Waite's reduction, and a polynomial: off by 2 units in the last place at most; 0 below e^-87.6, for which
   the scale is 2^-127, written as 0. NaN stays NaN. */
static inline float exponential(float x) {
    x = x < -88.0f ? -88.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shifted = x * 1.44269504f + 12582912.0f; /* the nearest whole number, in the last bits */
    const float whole = shifted - 12582912.0f;
    const float rest = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
    float power = 1.9875691500e-4f;
    power = power * rest + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    union {
        float number;
        uint32_t bits;
    } last = {shifted}, scale;
    scale.bits = (last.bits - 0x4B400000u + 127u) << 23;
    return power * scale.number;
}

/* In place: of x · scale - shift. A function of its own, so that compilers see a plain loop and use vectors; among other
   arithmetic GCC computes what follows for the bounds beside all else, numbers so small that processors are slow. */
static __attribute__((noinline)) void exponentials(float *x, int64_t size, float scale, float shift) {
    for (int64_t i = 0; i < size; i++) x[i] = exponential(x[i] * scale - shift);
}
