/* The loop of the digest, included once per instruction set: LEVEL names it, TARGET is the attribute that selects it,
 * WIDTH is the bytes of its vectors. Four vectors are under way at once; sums wrap around, so their order is nothing. */

#include "vectors_body.h"

#define LANES (WIDTH / 8)

typedef uint64_t NAME(words) __attribute__((vector_size(WIDTH), aligned(1), may_alias)); /* at any address */

INLINE NAME(vu64) NAME(mixed)(NAME(vu64) x) {
    x ^= x >> 32;
    x *= FIRST;
    x ^= x >> 29;
    x *= SECOND;
    return x ^ x >> 32;
}

TARGET static uint64_t NAME(digest)(const uint8_t *data, uint64_t nbytes) {
    uint64_t count = nbytes / 8, i = 0, total = nbytes;
    NAME(vu64) key, sums[4] = {{0}};
    for (int lane = 0; lane < LANES; lane++) key[lane] = (uint64_t)(lane + 1) * STRIDE;
    for (; i + 4 * LANES <= count; i += 4 * LANES, key += (uint64_t)(4 * LANES) * STRIDE)
        for (int j = 0; j < 4; j++) {
            NAME(vu64) word = *(const NAME(words) *)(data + 8 * (i + (uint64_t)(j * LANES)));
            sums[j] += NAME(mixed)(word ^ (key + (uint64_t)(j * LANES) * STRIDE));
        }
    for (int j = 0; j < 4; j++)
        for (int lane = 0; lane < LANES; lane++) total += sums[j][lane];
    for (; 8 * i < nbytes; i++) {
        uint64_t word = 0;
        memcpy(&word, data + 8 * i, nbytes - 8 * i < 8 ? nbytes - 8 * i : 8);
        total += mixed_word(word ^ (i + 1) * STRIDE);
    }
    return total;
}

#undef LANES
#undef GLUE_
#undef GLUE
#undef NAME
#undef INLINE
#undef VECTOR
