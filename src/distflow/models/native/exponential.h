#include <stdint.h>

/* Cody and Waite's reduction, and a polynomial: off by 2 units in the last place at most; 0 below e^-87. NaN stays NaN. */
static inline float exponential(float exponent) {
    float x = exponent < -87.0f ? -87.0f : exponent;
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
    return exponent < -87.0f ? 0.0f : power * scale.number;
}
