/* Codes of blocks: what a call is told. The codes themselves are defined in blocks.py, Note [Codes]. */
#ifndef GRADSYNC_BLOCKS_H
#define GRADSYNC_BLOCKS_H

#include <stddef.h>
#include <stdint.h>

#define MAX_BLOCK 65536

enum method { INT8, INT4, SIGN, TOPK };
enum mode { NONE, FEEDBACK, ABSORB };

/* A row of the table, as in blocks.py: `head` and `body` are offsets into a payload, in bytes. */
typedef struct {
    int32_t start, length, head, body;
    uint32_t first, param;
    int32_t kept;
} block_t;

typedef struct {
    enum method method;
    int stochastic;
    enum mode mode;
    int dtype;
    const void *flat;
    float *residual;
    uint8_t *payload;
    uint32_t key;
} encoding_t;

typedef struct {
    enum method method;
    int dtype;
    const uint8_t *payloads;
    int num_payloads;
    size_t stride; /* bytes from a payload to the next */
    void *flat;
} decoding_t;

/* One of these per instruction set. */
typedef struct {
    void (*encode)(const encoding_t *job, const block_t *blocks, size_t num_blocks);
    void (*decode)(const decoding_t *job, const block_t *blocks, size_t num_blocks);
} codes_t;

#endif
