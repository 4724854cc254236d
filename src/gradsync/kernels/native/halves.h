/* Half types, one at a time: the ends of rows, and processors without conversion instructions. */
#ifndef GRADSYNC_HALVES_H
#define GRADSYNC_HALVES_H

#include <stdint.h>
#include <string.h>

static inline float float_of_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t bits_of_float(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static inline float float_of_bf16(uint16_t h) { return float_of_bits((uint32_t)h << 16); }

static inline uint16_t bf16_of_float(float f) {
    uint32_t bits = bits_of_float(f);
    if (f != f) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float float_of_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    if (exponent == 31) return float_of_bits(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) { /* zero or subnormal: fraction · 2⁻²⁴, exact in fp32 */
        float f = (float)fraction * 0x1p-24f;
        return sign ? -f : f;
    }
    return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

static inline uint16_t f16_of_float(float f) {
    uint32_t bits = bits_of_float(f), sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00 | ((bits >> 13) & 1023)); /* NaN */
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);                        /* rounds to infinity */
    if (bits < 0x38800000) {                                                          /* subnormal or zero in fp16 */
        /* Adding 0.5 puts the bits that count at the end of the fraction; the addition rounds to nearest even. */
        return (uint16_t)(sign | (bits_of_float(float_of_bits(bits) + 0.5f) - 0x3f000000));
    }
    bits += 0xfff + ((bits >> 13) & 1);
    return (uint16_t)(sign | ((bits - 0x38000000) >> 13));
}

#endif
