/* The loops over a block, included once per instruction set; see vectors_body.h. Most are plain C that the compiler
 * turns into vectors.
 *
 *     flat, residual ──collect──▶ v, m ──encode_…──▶ head, body, and v − d in v's place ──settle──▶ residual
 *     head, body of every payload ──decode_…──▶ their sum ──narrow──▶ flat
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

/* The first elements of a block, in fp32: where they are, or in `room`. */
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

/* What the block has to say, into v; the largest |v|. As whole numbers: NaN is larger than all others. */
TARGET static float NAME(collect)(const encoding_t *job, const block_t *block, float *v) {
    int32_t n = block->length, top = 0;
    const float *flat = NAME(widened)(job->flat, job->dtype, block->start, n, v);
    if (job->mode == FEEDBACK) {
        const float *residual = job->residual + block->start;
#pragma GCC ivdep /* v may be flat itself */
        for (int32_t i = 0; i < n; i++) {
            v[i] = flat[i] + residual[i];
            int32_t size = bits_of_float(v[i]) & 0x7fffffff;
            top = size > top ? size : top;
        }
    } else {
#pragma GCC ivdep
        for (int32_t i = 0; i < n; i++) {
            v[i] = flat[i];
            int32_t size = bits_of_float(v[i]) & 0x7fffffff;
            top = size > top ? size : top;
        }
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

/* INT8, INT4 */

INLINE void NAME(quantize8)(float *restrict v, int32_t n, float inverse, float scale, int stochastic, uint32_t salt,
                            uint32_t first, uint8_t *restrict body) {
    for (int32_t i = 0; i < n; i++) {
        float x = v[i] * inverse;
        int32_t q = stochastic ? dithered(x, 127, (first + (uint32_t)i) ^ salt) : nearest(x);
        body[i] = (uint8_t)q;
        v[i] -= (float)q * scale;
    }
}

INLINE void NAME(quantize4)(float *restrict low, float *restrict high, int32_t half, float inverse, float scale,
                            int stochastic, uint32_t salt, uint32_t first, uint8_t *restrict body) {
    uint32_t second = first + (uint32_t)half;
    for (int32_t i = 0; i < half; i++) {
        float x = low[i] * inverse, y = high[i] * inverse;
        int32_t p = stochastic ? dithered(x, 7, (first + (uint32_t)i) ^ salt) : nearest(x);
        int32_t q = stochastic ? dithered(y, 7, (second + (uint32_t)i) ^ salt) : nearest(y);
        body[i] = (uint8_t)((p + 8) | (q + 8) << 4);
        low[i] -= (float)p * scale;
        high[i] -= (float)q * scale;
    }
}

TARGET static float NAME(encode_levels)(const encoding_t *job, const block_t *block, float *v, float m, uint8_t *body) {
    float levels = job->method == INT8 ? 127.0f : 7.0f;
    float inverse = m < SMALLEST ? 0.0f : levels / m, scale = m < SMALLEST ? 0.0f : m / levels;
    uint32_t salt = mix(block->param ^ mix(job->key)), first = block->first;
    int32_t n = round_up(block->length, 16), half = round_up(block->length, PAD) / 2;
    if (job->method == INT8 && job->stochastic) NAME(quantize8)(v, n, inverse, scale, 1, salt, first, body);
    if (job->method == INT8 && !job->stochastic) NAME(quantize8)(v, n, inverse, scale, 0, salt, first, body);
    if (job->method == INT4 && job->stochastic)
        NAME(quantize4)(v, v + half, half, inverse, scale, 1, salt, first, body);
    if (job->method == INT4 && !job->stochastic)
        NAME(quantize4)(v, v + half, half, inverse, scale, 0, salt, first, body);
    return scale;
}

TARGET static void NAME(add8)(const uint8_t *restrict body, int32_t length, float scale, int first, float *restrict sum) {
    int32_t n = round_up(length, 16);
    if (first)
        for (int32_t i = 0; i < n; i++) sum[i] = (float)(int8_t)body[i] * scale;
    else
        for (int32_t i = 0; i < n; i++) sum[i] += (float)(int8_t)body[i] * scale;
}

TARGET static void NAME(add4)(const uint8_t *restrict body, int32_t length, float scale, int first, float *restrict sum) {
    int32_t half = round_up(length, PAD) / 2;
    float *restrict high = sum + half;
    if (first)
        for (int32_t i = 0; i < half; i++) {
            sum[i] = (float)((int32_t)(body[i] & 15) - 8) * scale;
            high[i] = (float)((int32_t)(body[i] >> 4) - 8) * scale;
        }
    else
        for (int32_t i = 0; i < half; i++) {
            sum[i] += (float)((int32_t)(body[i] & 15) - 8) * scale;
            high[i] += (float)((int32_t)(body[i] >> 4) - 8) * scale;
        }
}

/* SIGN */

/* Bit i is the sign bit of v[i], for 16 elements. */
INLINE uint32_t NAME(signs)(const float *v) {
#if WIDTH == 64
    return _mm512_cmplt_epi32_mask(_mm512_loadu_si512(v), _mm512_setzero_si512());
#elif WIDTH == 32
    return (uint32_t)_mm256_movemask_ps(_mm256_loadu_ps(v)) | (uint32_t)_mm256_movemask_ps(_mm256_loadu_ps(v + 8)) << 8;
#else
    uint32_t mask = 0;
    for (int i = 0; i < 16; i++) mask |= bits_of_float(v[i]) >> 31 << i;
    return mask;
#endif
}

TARGET static float NAME(encode_sign)(const block_t *block, float *restrict v, float m, uint8_t *restrict body) {
    int32_t length = block->length, n = round_up(length, PAD);
    uint32_t sum = 0;
    float unit = m < SMALLEST ? 0.0f : SIGN_UNIT / m;
    for (int32_t i = 0; i < n; i++) sum += (uint32_t)(int32_t)(float_of_bits(bits_of_float(v[i]) & 0x7fffffff) * unit + 0.5f);
    float scale = m * ((float)sum / ((float)SIGN_UNIT * (float)length));

    for (int32_t i = 0; i < n; i += 16) {
        uint16_t positive = (uint16_t)~NAME(signs)(v + i);
        memcpy(body + i / 8, &positive, sizeof positive);
    }
    if (length % 8) body[length / 8] &= (uint8_t)((1 << length % 8) - 1);
    memset(body + (length + 7) / 8, 0, (size_t)(round_up((length + 7) / 8, 16) - (length + 7) / 8));

    uint32_t size = bits_of_float(scale);
    for (int32_t i = 0; i < n; i++) v[i] -= float_of_bits(size | (bits_of_float(v[i]) & 0x80000000));
    return scale;
}

TARGET static void NAME(add_signs)(const uint8_t *body, int32_t length, float scale, int first, float *sum) {
    NAME(vu32) bit, size = bits_of_float(scale) - (NAME(vu32)){0};
    for (int i = 0; i < LANES; i++) bit[i] = 1u << (i + 16);
    for (int32_t i = 0; i < length; i += 16) {
        uint16_t positive;
        memcpy(&positive, body + i / 8, sizeof positive);
        for (int k = 0; k < 16 / LANES; k++) {
            uint32_t word = (uint32_t)positive << (16 - k * LANES);
            NAME(vu32) negative = (NAME(vu32))((word & bit) == 0) & 0x80000000;
            NAME(vf32) *at = (NAME(vf32) *)(sum + i + k * LANES);
            if (first)
                *at = (NAME(vf32))(size ^ negative);
            else
                *at += (NAME(vf32))(size ^ negative);
        }
    }
}

/* TOPK: the keys are |bf16(v)|, as whole numbers of 15 bits. */

TARGET static int32_t NAME(count)(const int16_t *keys, int32_t n, int16_t least) {
    int32_t total = 0;
    for (int32_t begin = 0; begin < n; begin += MAX_BLOCK / 2) { /* so that 16 bits are enough to count in */
        int32_t end = n - begin > MAX_BLOCK / 2 ? begin + MAX_BLOCK / 2 : n;
        uint16_t some = 0;
        for (int32_t i = begin; i < end; i++) some += keys[i] >= least;
        total += some;
    }
    return total;
}

/* The largest key that at least `kept` keys reach; `ties`: how many keys equal to it may be taken. The search begins
 * at the largest key, one binary order below it, then two more, and so on: the threshold is hardly ever far away. */
TARGET static int16_t NAME(threshold)(const int16_t *keys, int32_t n, int32_t kept, int32_t largest, int32_t *ties) {
    int32_t low = largest + 1, high = low, step = 128, reach = 0, above = 0; /* keys ≥ low, keys ≥ high */
    while (reach < kept) {
        high = low, above = reach;
        low = low > step ? low - step : 0;
        step *= 2;
        reach = NAME(count)(keys, n, (int16_t)low);
    }
    while (reach > kept && high - low > 1) {
        int32_t middle = (low + high) / 2, num = NAME(count)(keys, n, (int16_t)middle);
        if (num >= kept)
            low = middle, reach = num;
        else
            high = middle, above = num;
    }
    *ties = reach == kept ? kept : kept - above;
    return (int16_t)low;
}

/* Bit i is 1 where keys[i] ≥ least, for 16 keys. */
INLINE uint32_t NAME(reaching)(const int16_t *keys, int16_t least) {
#if WIDTH == 64
    return _mm256_cmpge_epi16_mask(_mm256_loadu_si256((const __m256i *)keys), _mm256_set1_epi16(least));
#elif WIDTH == 32
    __m256i reach = _mm256_cmpgt_epi16(_mm256_loadu_si256((const __m256i *)keys), _mm256_set1_epi16(least - 1));
    return (uint32_t)_mm_movemask_epi8(
        _mm_packs_epi16(_mm256_castsi256_si128(reach), _mm256_extracti128_si256(reach, 1)));
#else
    uint32_t mask = 0;
    for (int i = 0; i < 16; i++) mask |= (uint32_t)(keys[i] >= least) << i;
    return mask;
#endif
}

TARGET static void NAME(encode_topk)(const block_t *block, float *restrict v, float m, uint8_t *head, uint8_t *body) {
    uint16_t *restrict indices = (uint16_t *)head, *restrict values = (uint16_t *)body;
    int16_t keys[MAX_BLOCK];
    int32_t n = round_up(block->length, PAD), kept = block->kept, done = 0, ties;
    for (int32_t i = 0; i < n; i++) {
        uint32_t bits = bits_of_float(v[i]);
        keys[i] = (int16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16 & 0x7fff);
    }
    int16_t least = NAME(threshold)(keys, n, kept, bf16_of_float(m), &ties);
    for (int32_t i = 0; i < n && done < kept; i += 16) {
        for (uint32_t mask = NAME(reaching)(keys + i, least); mask && done < kept; mask &= mask - 1) {
            int32_t j = i + __builtin_ctz(mask);
            if (keys[j] == least && ties-- <= 0) continue;
            indices[done] = (uint16_t)j;
            values[done++] = bf16_of_float(v[j]);
            v[j] -= float_of_bf16(bf16_of_float(v[j])) + 0.0f;
        }
    }
    pad_topk(block, head, body);
}

TARGET static void NAME(add_kept)(const uint8_t *head, const uint8_t *body, const block_t *block, int first,
                                  float *restrict sum) {
    if (first) memset(sum, 0, (size_t)block->length * sizeof(float));
    for (int32_t i = 0; i < block->kept; i++) {
        uint16_t index, value; /* any index is within `sum`, whatever was received */
        memcpy(&index, head + 2 * i, sizeof index);
        memcpy(&value, body + 2 * i, sizeof value);
        sum[index] += float_of_bf16(value);
    }
}

/* Blocks */

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
