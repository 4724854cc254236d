/* PowerSGD's passes over one matrix, each in one pass over memory: see kernels/powersgd_kernels.py, and low_rank_body.h for the
 * loops.
 *
 *     project        residual += grad;  p = residual · q
 *     project_back   q = residualᵀ · p
 *     restore        grad = p · q_sumᵀ;  residual −= p · q_ownᵀ
 *
 * A matrix has m rows of n elements, p is m × r, q is n × r, all row by row. Each returns 0 if there is no memory. */
#include "halves.h"
#include "sums.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SUMS 16 /* in which a dot product is kept, whatever the processor's vectors are: all give the same bits */
#define GROUP 4 /* columns of q, or rows of the matrix, that share one pass through the caches */

typedef struct {
    int (*project)(const float *, float *, const float *, float *, uint64_t, uint64_t, uint64_t);
    int (*project_back)(const float *, const float *, float *, uint64_t, uint64_t, uint64_t);
    int (*restore)(float *, float *, const float *, const float *, const float *, uint64_t, uint64_t, uint64_t);
} passes_t;

/* q column by column, in new memory; NULL if there is none. */
static float *columns_of(const float *q, uint64_t n, uint64_t r) {
    float *columns = malloc(sizeof(float) * n * r + 1);
    if (columns)
        for (uint64_t j = 0; j < n; j++)
            for (uint64_t k = 0; k < r; k++) columns[k * n + j] = q[j * r + k];
    return columns;
}

static float total_of(const float *lanes) {
    float sums[SUMS];
    for (int i = 0; i < SUMS; i++) sums[i] = lanes[i];
    for (int half = SUMS / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

#define BODY "low_rank_body.h"
#include "levels.h"

static const passes_t *passes_in_use(void) {
#if defined(__x86_64__)
    const char *level = gradsync_level();
    if (!strcmp(level, "avx512")) return &passes_avx512;
    if (!strcmp(level, "avx2")) return &passes_avx2;
#endif
    return &passes_portable;
}

int gradsync_project(const float *grad, float *residual, const float *q, float *p, uint64_t m, uint64_t n, uint64_t r) {
    return passes_in_use()->project(grad, residual, q, p, m, n, r);
}

int gradsync_project_back(const float *residual, const float *p, float *q, uint64_t m, uint64_t n, uint64_t r) {
    return passes_in_use()->project_back(residual, p, q, m, n, r);
}

int gradsync_restore(float *grad, float *residual, const float *p, const float *q_own, const float *q_sum, uint64_t m,
                     uint64_t n, uint64_t r) {
    return passes_in_use()->restore(grad, residual, p, q_own, q_sum, m, n, r);
}
