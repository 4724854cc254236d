/* The loops over a matrix, included once per instruction set; see levels.h. Plain C that the compiler turns into
 * vectors. q stands column by column here, so that every loop runs along a row of the matrix. */

#include "vectors_body.h"

/* out[k] = row · columns[k], for up to GROUP columns. */
INLINE void NAME(dots)(const float *restrict row, const float *restrict columns, uint64_t n, uint64_t count,
                       float *restrict out) {
    float lanes[GROUP][SUMS] = {{0}};
    uint64_t j = 0;
    for (; j + SUMS <= n; j += SUMS)
        for (uint64_t k = 0; k < count; k++)
            for (int i = 0; i < SUMS; i++) lanes[k][i] += row[j + i] * columns[k * n + j + i];
    for (; j < n; j++)
        for (uint64_t k = 0; k < count; k++) lanes[k][j % SUMS] += row[j] * columns[k * n + j];
    for (uint64_t k = 0; k < count; k++) out[k] = total_of(lanes[k]);
}

/* out[j] = out[j] + Σ weight[k] · columns[k][j], in this order, for up to GROUP columns. */
INLINE void NAME(add_columns)(float *restrict out, const float *restrict columns, const float *restrict weights,
                              uint64_t n, uint64_t count) {
    if (count == GROUP) { /* the usual case, without a loop inside */
        float a = weights[0], b = weights[1], c = weights[2], d = weights[3];
        for (uint64_t j = 0; j < n; j++)
            out[j] = out[j] + a * columns[j] + b * columns[n + j] + c * columns[2 * n + j] + d * columns[3 * n + j];
        return;
    }
    for (uint64_t k = 0; k < count; k++)
        for (uint64_t j = 0; j < n; j++) out[j] += weights[k] * columns[k * n + j];
}

TARGET static int NAME(project)(const float *grad, float *residual, const float *q, float *p, uint64_t m, uint64_t n,
                                uint64_t r) {
    float *columns = columns_of(q, n, r);
    if (!columns) return 0;
    for (uint64_t i = 0; i < m; i++) {
        float *row = residual + i * n;
        for (uint64_t j = 0; j < n; j++) row[j] += grad[i * n + j];
        for (uint64_t k = 0; k < r; k += GROUP) {
            float sums[GROUP];
            uint64_t count = least(GROUP, r - k);
            if (count == GROUP) NAME(dots)(row, columns + k * n, n, GROUP, sums);
            else NAME(dots)(row, columns + k * n, n, count, sums);
            for (uint64_t c = 0; c < count; c++) p[i * r + k + c] = sums[c];
        }
    }
    free(columns);
    return 1;
}

TARGET static int NAME(project_back)(const float *residual, const float *p, float *q, uint64_t m, uint64_t n,
                                     uint64_t r) {
    float *columns = calloc(n * r + 1, sizeof(float));
    if (!columns) return 0;
    for (uint64_t i = 0; i < m; i += GROUP) {
        uint64_t count = least(GROUP, m - i);
        for (uint64_t k = 0; k < r; k++) {
            float weights[GROUP];
            for (uint64_t c = 0; c < count; c++) weights[c] = p[(i + c) * r + k];
            NAME(add_columns)(columns + k * n, residual + i * n, weights, n, count);
        }
    }
    for (uint64_t j = 0; j < n; j++)
        for (uint64_t k = 0; k < r; k++) q[j * r + k] = columns[k * n + j];
    free(columns);
    return 1;
}

TARGET static int NAME(restore)(float *grad, float *residual, const float *p, const float *q_own, const float *q_sum,
                                uint64_t m, uint64_t n, uint64_t r) {
    float *own = columns_of(q_own, n, r), *sum = columns_of(q_sum, n, r);
    for (uint64_t i = 0; own && sum && i < m; i++) {
        float *row = grad + i * n;
        for (uint64_t j = 0; j < n; j++) row[j] = 0;
        for (uint64_t k = 0; k < r; k += GROUP) {
            uint64_t count = least(GROUP, r - k);
            float weights[GROUP], taken[GROUP];
            for (uint64_t c = 0; c < count; c++) taken[c] = -(weights[c] = p[i * r + k + c]);
            NAME(add_columns)(row, sum + k * n, weights, n, count);
            NAME(add_columns)(residual + i * n, own + k * n, taken, n, count);
        }
    }
    int done = own && sum;
    free(own);
    free(sum);
    return done;
}

static const passes_t NAME(passes) = {NAME(project), NAME(project_back), NAME(restore)};

#undef GLUE_
#undef GLUE
#undef NAME
#undef INLINE
#undef VECTOR
