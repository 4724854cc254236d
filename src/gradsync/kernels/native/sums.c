/* Picks the widest instruction set that this processor has, when it is first asked; see sums_body.h for the loops. */
#include "sums.h"

#include "halves.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define BODY "sums_body.h"
#include "levels.h"

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
