/* Picks the widest instruction set that this processor has, when it is first asked; see sums_body.h for the loops.
 *
 * Not -march=native: a login node differs from a compute node. Built with -ffp-contract=off, so that all levels and
 * the torch reference give the same bits. */
#include "sums.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Half types, one at a time: the ends of rows, and processors without conversion instructions. */

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

#define LEVEL portable /* on x86-64: SSE2 */
#define TARGET
#define WIDTH 16
#include "sums_body.h"
#undef LEVEL
#undef TARGET
#undef WIDTH

#if defined(__x86_64__)
#define LEVEL avx2
#define TARGET __attribute__((target("avx2,f16c")))
#define WIDTH 32
#include "sums_body.h"
#undef LEVEL
#undef TARGET
#undef WIDTH

#define LEVEL avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx2,f16c")))
#define WIDTH 64
#include "sums_body.h"
#undef LEVEL
#undef TARGET
#undef WIDTH
#endif

/* Dispatch */

static const sum_t *chosen;
static const char *chosen_name;

static int has(const char *level) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    if (!strcmp(level, "avx2")) return avx2;
    if (!strcmp(level, "avx512"))
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl");
#endif
    return !strcmp(level, "portable");
}

/* Use this level from now on; "" means the widest there is. 0 if this processor lacks it. For tests. */
int gradsync_use_level(const char *level) {
#if defined(__x86_64__)
    if ((!*level || !strcmp(level, "avx512")) && has("avx512")) return chosen = sums_avx512, chosen_name = "avx512", 1;
    if ((!*level || !strcmp(level, "avx2")) && has("avx2")) return chosen = sums_avx2, chosen_name = "avx2", 1;
#endif
    if (!*level || !strcmp(level, "portable")) return chosen = sums_portable, chosen_name = "portable", 1;
    return 0;
}

const char *gradsync_level(void) {
    if (!chosen) gradsync_use_level("");
    return chosen_name;
}

size_t item_nbytes(int dtype) {
    static const size_t sizes[NUM_DTYPES] = {
        [F32] = 4, [F64] = 8, [F16] = 2, [BF16] = 2, [I8] = 1, [I16] = 2, [I32] = 4, [I64] = 8,
    };
    return sizes[dtype];
}

sum_t sum_of(int dtype) {
    if (!chosen) gradsync_use_level("");
    return chosen[dtype];
}

void gradsync_sum(const void *const *in, int num_in, void *const *out, int num_out, uint64_t count, int dtype,
                  double scale) {
    sum_of(dtype)(in, num_in, out, num_out, count, scale);
}
