/* Codes of blocks, on the instruction set that the sums use too; see blocks_body.h for the loops. */
#include "blocks.h"

#include "halves.h"
#include "sums.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SMALLEST 0x1p-100f /* a block with a smaller maximum is as good as zero */
#define LOST 0x1p127f      /* one with this or more is lost */
#define SIGN_UNIT 32768.0f

/* x + ROUNDER has no room for a fraction: the addition rounds x to nearest even, and x is in the last bits. */
#define ROUNDER 0x1.8p23f
#define ROUNDER_BITS 0x4b400000

static inline int32_t round_up(int32_t n, int32_t unit) { return (n + unit - 1) & -unit; }

/* The larger of |a| (its bits: they order like the numbers, and NaN comes last) and |b|. */
static inline int32_t larger(int32_t a, float b) {
    int32_t size = (int32_t)(bits_of_float(b) & 0x7fffffff);
    return size > a ? size : a;
}

static inline uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352d;
    x = (x ^ x >> 15) * 0x846ca68b;
    return x ^ x >> 16;
}

static inline int32_t nearest(float x) { return (int32_t)bits_of_float(x + ROUNDER) - ROUNDER_BITS; }

/* floor(x + u) in −levels … levels, with u from the hash of `place`. */
static inline int32_t dithered(float x, int32_t levels, uint32_t place) {
    float y = x + (float)(int32_t)(mix(place) >> 8) * 0x1p-24f;
    int32_t q = (int32_t)y;
    q -= (float)q > y;
    q = q > levels ? levels : q;
    return q < -levels ? -levels : q;
}

/* The parts of a head and a body that depend on no vector. */

static inline void pad_topk(const block_t *block, uint8_t *head, uint8_t *body) {
    int32_t nbytes = 2 * block->kept;
    memset(head + nbytes, 0, (size_t)(round_up(nbytes, 4) - nbytes));
    memset(body + nbytes, 0, (size_t)(round_up(nbytes, 16) - nbytes));
}

static void lose(enum method method, const block_t *block, uint8_t *head, uint8_t *body) {
    static const uint32_t nan = 0x7fc00000;
    if (method == TOPK) {
        uint16_t *indices = (uint16_t *)head, *values = (uint16_t *)body;
        for (int32_t i = 0; i < block->kept; i++) indices[i] = (uint16_t)i, values[i] = nan >> 16;
        pad_topk(block, head, body);
        return;
    }
    int32_t elements_per_byte = method == INT8 ? 1 : method == INT4 ? 2 : 8;
    int32_t nbytes = round_up((block->length + elements_per_byte - 1) / elements_per_byte, 16);
    memset(body, method == INT4 ? 0x88 : 0, (size_t)nbytes);
    memcpy(head, &nan, sizeof nan);
}

#define BODY "blocks_body.h"
#include "levels.h"

static const codes_t *codes_in_use(void) {
#if defined(__x86_64__)
    const char *level = gradsync_level();
    if (!strcmp(level, "avx512")) return &codes_avx512;
    if (!strcmp(level, "avx2")) return &codes_avx2;
#endif
    return &codes_portable;
}

void gradsync_encode_blocks(int method, int stochastic, int mode, int dtype, const void *flat, float *residual,
                            const block_t *blocks, uint64_t num_blocks, uint8_t *payload, uint32_t key) {
    encoding_t job = {(enum method)method, stochastic, (enum mode)mode, dtype, flat, residual, payload, key};
    codes_in_use()->encode(&job, blocks, num_blocks);
}

void gradsync_decode_blocks(int method, int dtype, const uint8_t *payloads, int num_payloads, uint64_t stride,
                            const block_t *blocks, uint64_t num_blocks, void *flat) {
    decoding_t job = {(enum method)method, dtype, payloads, num_payloads, stride, flat};
    codes_in_use()->decode(&job, blocks, num_blocks);
}
