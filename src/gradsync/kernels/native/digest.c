/* A number of 64 bits for any bytes: see kernels/digest.py, Note [Digest], and digest_body.h for the loop. */
#include "halves.h"
#include "sums.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define STRIDE 0x9E3779B97F4A7C15u /* between the keys of neighbours */
#define FIRST 0xBF58476D1CE4E5B9u
#define SECOND 0x94D049BB133111EBu

static uint64_t mixed_word(uint64_t x) {
    x ^= x >> 32;
    x *= FIRST;
    x ^= x >> 29;
    x *= SECOND;
    return x ^ x >> 32;
}

#define BODY "digest_body.h"
#include "levels.h"

uint64_t gradsync_digest(const uint8_t *data, uint64_t nbytes) {
#if defined(__x86_64__)
    const char *level = gradsync_level();
    if (!strcmp(level, "avx512")) return digest_avx512(data, nbytes);
    if (!strcmp(level, "avx2")) return digest_avx2(data, nbytes);
#endif
    return digest_portable(data, nbytes);
}
