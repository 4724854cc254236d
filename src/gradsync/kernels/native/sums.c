/* Picks the widest instruction set that this processor has, when it is first asked; see sums_body.h for the loops. */
#include "sums.h"

#include "halves.h"

#include <stdatomic.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define BODY "sums_body.h"
#include "levels.h"

/* Dispatch */

typedef struct {
    const char *name;
    const sum_t *sums;
} level_t;

static const level_t portable = {"portable", sums_portable};
#if defined(__x86_64__)
static const level_t avx2 = {"avx2", sums_avx2}, avx512 = {"avx512", sums_avx512};
#endif

static _Atomic(const level_t *) chosen; /* one pointer: whoever sees the choice sees all of it */

static int has(const char *level) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    if (!strcmp(level, "avx2")) return wide;
    if (!strcmp(level, "avx512"))
        return wide && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl");
#endif
    return !strcmp(level, "portable");
}

static const level_t *level_of(const char *name) {
#if defined(__x86_64__)
    if ((!*name || !strcmp(name, "avx512")) && has("avx512")) return &avx512;
    if ((!*name || !strcmp(name, "avx2")) && has("avx2")) return &avx2;
#endif
    return !*name || !strcmp(name, "portable") ? &portable : NULL;
}

/* Threads that ask at once find the same. */
static const level_t *level_in_use(void) {
    const level_t *level = atomic_load_explicit(&chosen, memory_order_acquire);
    if (!level) atomic_store_explicit(&chosen, level = level_of(""), memory_order_release);
    return level;
}

/* Use this level from now on; "" means the widest there is. 0 if this processor lacks it. For tests. */
int gradsync_use_level(const char *name) {
    const level_t *level = level_of(name);
    if (level) atomic_store_explicit(&chosen, level, memory_order_release);
    return level != NULL;
}

const char *gradsync_level(void) { return level_in_use()->name; }

size_t item_nbytes(int dtype) {
    static const size_t sizes[NUM_DTYPES] = {
        [F32] = 4, [F64] = 8, [F16] = 2, [BF16] = 2, [I8] = 1, [I16] = 2, [I32] = 4, [I64] = 8,
    };
    return sizes[dtype];
}

sum_t sum_of(int dtype) { return level_in_use()->sums[dtype]; }

void gradsync_sum(const void *const *in, int num_in, void *const *out, int num_out, uint64_t count, int dtype,
                  double scale) {
    sum_of(dtype)(in, num_in, out, num_out, count, scale);
}
