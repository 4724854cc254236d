/* INT8, INT4 and SIGN: part of blocks_body.h. Encoders write the body, leave v − d in v's place and return the scale;
 * an adder adds d to `sum`, or begins it with d. */

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

TARGET static void NAME(add8)(const uint8_t *restrict body, int32_t length, float scale, int first,
                              float *restrict sum) {
    int32_t n = round_up(length, 16);
    if (first)
        for (int32_t i = 0; i < n; i++) sum[i] = (float)(int8_t)body[i] * scale;
    else
        for (int32_t i = 0; i < n; i++) sum[i] += (float)(int8_t)body[i] * scale;
}

TARGET static void NAME(add4)(const uint8_t *restrict body, int32_t length, float scale, int first,
                              float *restrict sum) {
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
    int32_t length = block->length, n = round_up(length, PAD), nbytes = (length + 7) / 8;
    uint32_t sum = 0; /* at most SIGN_UNIT · MAX_BLOCK = 2³¹ */
    float unit = m < SMALLEST ? 0.0f : SIGN_UNIT / m;
    for (int32_t i = 0; i < n; i++) sum += (uint32_t)(int32_t)(__builtin_fabsf(v[i]) * unit + 0.5f);
    float scale = m * ((float)sum / (SIGN_UNIT * (float)length));

    for (int32_t i = 0; i < n; i += 16) {
        uint16_t positive = (uint16_t)~NAME(signs)(v + i);
        memcpy(body + i / 8, &positive, sizeof positive);
    }
    if (length % 8) body[nbytes - 1] &= (uint8_t)((1 << length % 8) - 1);
    memset(body + nbytes, 0, (size_t)(round_up(nbytes, 16) - nbytes));

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
