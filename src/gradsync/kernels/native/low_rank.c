/* PowerSGD's passes over one matrix, each in one pass over memory: see kernels/low_rank.py.
 *
 *     project        residual += grad;  p = residual · q
 *     project_back   q = residualᵀ · p
 *     restore        grad = p · q_sumᵀ;  residual −= p · q_ownᵀ
 *
 * A matrix has m rows of n elements, p is m × r, q is n × r, all row by row. Inside, q stands column by column, so that
 * every loop runs along a row of the matrix. Sums are kept in LANES numbers whatever the processor's vectors are, and
 * nothing is contracted: all processors give the same bits. */
#include <stdint.h>
#include <stdlib.h>

#define LANES 16
#define GROUP 4 /* columns of q, or rows of the matrix, that share one pass through the caches */

#if defined(__x86_64__) && defined(__gnu_linux__)
#define EVERY_LEVEL __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define EVERY_LEVEL
#endif

/* q column by column, in new memory; NULL if there is none. */
static float *columns_of(const float *q, uint64_t n, uint64_t r) {
    float *columns = malloc(sizeof(float) * n * r + 1);
    if (columns)
        for (uint64_t j = 0; j < n; j++)
            for (uint64_t k = 0; k < r; k++) columns[k * n + j] = q[j * r + k];
    return columns;
}

static float total_of(const float *lanes) {
    float sums[LANES];
    for (int i = 0; i < LANES; i++) sums[i] = lanes[i];
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

/* out[k] = row · columns[k], for up to GROUP columns. */
static inline __attribute__((always_inline)) void dots(const float *restrict row, const float *restrict columns,
                                                       uint64_t n, uint64_t count, float *restrict out) {
    float lanes[GROUP][LANES] = {{0}};
    uint64_t j = 0;
    for (; j + LANES <= n; j += LANES)
        for (uint64_t k = 0; k < count; k++)
            for (int i = 0; i < LANES; i++) lanes[k][i] += row[j + i] * columns[k * n + j + i];
    for (; j < n; j++)
        for (uint64_t k = 0; k < count; k++) lanes[k][j % LANES] += row[j] * columns[k * n + j];
    for (uint64_t k = 0; k < count; k++) out[k] = total_of(lanes[k]);
}

/* out[j] = out[j] + Σ weight[k] · columns[k][j], in this order, for up to GROUP columns. */
static inline __attribute__((always_inline)) void add_columns(float *restrict out, const float *restrict columns,
                                                              const float *restrict weights, uint64_t n,
                                                              uint64_t count) {
    if (count == GROUP) { /* the usual case, without a loop inside */
        float a = weights[0], b = weights[1], c = weights[2], d = weights[3];
        for (uint64_t j = 0; j < n; j++)
            out[j] = out[j] + a * columns[j] + b * columns[n + j] + c * columns[2 * n + j] + d * columns[3 * n + j];
        return;
    }
    for (uint64_t k = 0; k < count; k++)
        for (uint64_t j = 0; j < n; j++) out[j] += weights[k] * columns[k * n + j];
}

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

EVERY_LEVEL int gradsync_project(const float *grad, float *residual, const float *q, float *p, uint64_t m, uint64_t n,
                                 uint64_t r) {
    float *columns = columns_of(q, n, r);
    if (!columns) return 0;
    for (uint64_t i = 0; i < m; i++) {
        float *row = residual + i * n;
        for (uint64_t j = 0; j < n; j++) row[j] += grad[i * n + j];
        for (uint64_t k = 0; k < r; k += GROUP) {
            float sums[GROUP];
            uint64_t count = least(GROUP, r - k);
            if (count == GROUP) dots(row, columns + k * n, n, GROUP, sums);
            else dots(row, columns + k * n, n, count, sums);
            for (uint64_t c = 0; c < count; c++) p[i * r + k + c] = sums[c];
        }
    }
    free(columns);
    return 1;
}

EVERY_LEVEL int gradsync_project_back(const float *residual, const float *p, float *q, uint64_t m, uint64_t n,
                                      uint64_t r) {
    float *columns = calloc(n * r + 1, sizeof(float));
    if (!columns) return 0;
    for (uint64_t i = 0; i < m; i += GROUP) {
        uint64_t count = least(GROUP, m - i);
        for (uint64_t k = 0; k < r; k++) {
            float weights[GROUP];
            for (uint64_t c = 0; c < count; c++) weights[c] = p[(i + c) * r + k];
            add_columns(columns + k * n, residual + i * n, weights, n, count);
        }
    }
    for (uint64_t j = 0; j < n; j++)
        for (uint64_t k = 0; k < r; k++) q[j * r + k] = columns[k * n + j];
    free(columns);
    return 1;
}

EVERY_LEVEL int gradsync_restore(float *grad, float *residual, const float *p, const float *q_own, const float *q_sum,
                                 uint64_t m, uint64_t n, uint64_t r) {
    float *own = columns_of(q_own, n, r), *sum = columns_of(q_sum, n, r);
    for (uint64_t i = 0; own && sum && i < m; i++) {
        float *row = grad + i * n;
        for (uint64_t j = 0; j < n; j++) row[j] = 0;
        for (uint64_t k = 0; k < r; k += GROUP) {
            uint64_t count = least(GROUP, r - k);
            float weights[GROUP], taken[GROUP];
            for (uint64_t c = 0; c < count; c++) taken[c] = -(weights[c] = p[i * r + k + c]);
            add_columns(row, sum + k * n, weights, n, count);
            add_columns(residual + i * n, own + k * n, taken, n, count);
        }
    }
    int done = own && sum;
    free(own);
    free(sum);
    return done;
}
