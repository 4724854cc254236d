/* TOPK: part of blocks_body.h. Keys are |bf16(v)| as whole numbers of 15 bits. */

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
    while (reach < kept && low > 0) { /* all keys reach 0: there is an end whatever the table says */
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
