/* The loops over a block, included once per instruction set; see vectors_body.h. Most are plain C that the compiler
 * turns into vectors.
 *
 *     flat, residual ──collect──▶ v, m ──encode_…──▶ head, body; v − d ──settle──▶ residual
 *     heads, bodies ──add…──▶ their sum ──narrow──▶ flat
 *
 * v is in fp32, on the stack, and stays in the nearest cache. It has zeros behind its end, up to a multiple of PAD: no
 * loop over v has a remainder. */

#include "vectors_body.h"

#define PAD 32
#define LANES (WIDTH / 4)

/* One dtype to fp32 and back */

#define DEFINE_CONVERSION(TYPE, ITEM, LOAD, STORE, LOAD1, STORE1)                                                     \
    TARGET static void NAME(widen_##TYPE)(const ITEM *restrict in, float *restrict out, int32_t n) {                  \
        int32_t i = 0;                                                                                                \
        for (; i + LANES <= n; i += LANES) *(NAME(vf32) *)(out + i) = LOAD(in + i);                                   \
        for (; i < n; i++) out[i] = LOAD1(in[i]);                                                                     \
    }                                                                                                                 \
    TARGET static void NAME(narrow_##TYPE)(const float *restrict in, ITEM *restrict out, int32_t n) {                 \
        int32_t i = 0;                                                                                                \
        for (; i + LANES <= n; i += LANES) STORE(out + i, *(const NAME(vf32) *)(in + i));                             \
        for (; i < n; i++) out[i] = STORE1(in[i]);                                                                    \
    }

DEFINE_CONVERSION(f16, uint16_t, NAME(load_f16), NAME(store_f16), float_of_f16, f16_of_float)
DEFINE_CONVERSION(bf16, uint16_t, NAME(load_bf16), NAME(store_bf16), float_of_bf16, bf16_of_float)

TARGET static void NAME(narrow)(const float *restrict in, void *flat, int dtype, int32_t start, int32_t n) {
    if (dtype == F32) memcpy((float *)flat + start, in, (size_t)n * sizeof(float));
    if (dtype == F16) NAME(narrow_f16)(in, (uint16_t *)flat + start, n);
    if (dtype == BF16) NAME(narrow_bf16)(in, (uint16_t *)flat + start, n);
    if (dtype == F64) {
        double *restrict out = (double *)flat + start;
        for (int32_t i = 0; i < n; i++) out[i] = in[i];
    }
}

/* The elements of a block in fp32: where they are, or in `room`. */
TARGET static const float *NAME(widened)(const void *flat, int dtype, int32_t start, int32_t n, float *restrict room) {
    if (dtype == F32) return (const float *)flat + start;
    if (dtype == F16) NAME(widen_f16)((const uint16_t *)flat + start, room, n);
    if (dtype == BF16) NAME(widen_bf16)((const uint16_t *)flat + start, room, n);
    if (dtype == F64) {
        const double *restrict in = (const double *)flat + start;
        for (int32_t i = 0; i < n; i++) room[i] = (float)in[i];
    }
    return room;
}

/* What the block has to say, into v; the largest |v|. */
TARGET static float NAME(collect)(const encoding_t *job, const block_t *block, float *v) {
    int32_t n = block->length, top = 0;
    const float *flat = NAME(widened)(job->flat, job->dtype, block->start, n, v);
    if (job->mode == FEEDBACK) {
        const float *residual = job->residual + block->start;
#pragma GCC ivdep /* v may be flat itself */
        for (int32_t i = 0; i < n; i++) v[i] = flat[i] + residual[i], top = larger(top, v[i]);
    } else {
#pragma GCC ivdep
        for (int32_t i = 0; i < n; i++) v[i] = flat[i], top = larger(top, v[i]);
    }
    memset(v + n, 0, (size_t)(round_up(n, PAD) - n) * sizeof(float));
    return float_of_bits((uint32_t)top);
}

TARGET static void NAME(settle)(const encoding_t *job, const block_t *block, const float *restrict left) {
    float *restrict residual = job->residual + block->start;
    if (job->mode == FEEDBACK) memcpy(residual, left, (size_t)block->length * sizeof(float));
    if (job->mode == ABSORB)
        for (int32_t i = 0; i < block->length; i++) residual[i] += left[i];
}

#include "blocks_kept.h"
#include "blocks_scaled.h"

TARGET static void NAME(encode)(const encoding_t *job, const block_t *blocks, size_t num_blocks) {
    float v[MAX_BLOCK] __attribute__((aligned(64)));
    for (const block_t *block = blocks; block < blocks + num_blocks; block++) {
        uint8_t *head = job->payload + block->head, *body = job->payload + block->body;
        float m = NAME(collect)(job, block, v);
        if (!(m < LOST)) {
            lose(job->method, block, head, body);
            continue;
        }
        if (job->method == TOPK) {
            NAME(encode_topk)(block, v, m, head, body);
        } else {
            float scale = job->method == SIGN ? NAME(encode_sign)(block, v, m, body)
                                              : NAME(encode_levels)(job, block, v, m, body);
            memcpy(head, &scale, sizeof scale);
        }
        if (job->mode != NONE) NAME(settle)(job, block, v);
    }
}

TARGET static void NAME(decode)(const decoding_t *job, const block_t *blocks, size_t num_blocks) {
    float sum[MAX_BLOCK] __attribute__((aligned(64)));
    for (const block_t *block = blocks; block < blocks + num_blocks; block++) {
        for (int r = 0; r < job->num_payloads; r++) {
            const uint8_t *payload = job->payloads + (size_t)r * job->stride;
            const uint8_t *head = payload + block->head, *body = payload + block->body;
            float scale;
            memcpy(&scale, head, sizeof scale);
            if (job->method == INT8) NAME(add8)(body, block->length, scale, r == 0, sum);
            if (job->method == INT4) NAME(add4)(body, block->length, scale, r == 0, sum);
            if (job->method == SIGN) NAME(add_signs)(body, block->length, scale, r == 0, sum);
            if (job->method == TOPK) NAME(add_kept)(head, body, block, r == 0, sum);
        }
        NAME(narrow)(sum, job->flat, job->dtype, block->start, block->length);
    }
}

static const codes_t NAME(codes) = {NAME(encode), NAME(decode)};

#undef GLUE_
#undef GLUE
#undef NAME
#undef INLINE
#undef VECTOR
#undef PAD
#undef LANES
#undef DEFINE_CONVERSION
