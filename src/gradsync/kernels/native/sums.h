/* Element-wise sums of rows, for every dtype that gradients have. */
#ifndef GRADSYNC_SUMS_H
#define GRADSYNC_SUMS_H

#include <stddef.h>
#include <stdint.h>

enum dtype { F32, F64, F16, BF16, I8, I16, I32, I64, NUM_DTYPES };

#define MAX_RANKS 256

/* out[j][i] = scale * (in[0][i] + in[1][i] + … in this order), for every j; an output may be one of the inputs.
 * Half types are added in fp32 and rounded once. Integers wrap around and are not scaled. */
typedef void (*sum_t)(const void *const *in, int num_in, void *const *out, int num_out, size_t count, double scale);

size_t item_nbytes(int dtype);
sum_t sum_of(int dtype);

/* The name of the instruction set in use, for whoever has levels too: "portable", "avx2" or "avx512". */
const char *gradsync_level(void);

#endif
