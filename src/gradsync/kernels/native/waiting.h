/* Words in shared memory that ranks count up and wait for; see waiting.c. */
#ifndef GRADSYNC_WAITING_H
#define GRADSYNC_WAITING_H

#include <stdatomic.h>
#include <stdint.h>

enum result { DONE, PENDING, MISMATCH, DEAD, ABORTED };

/* A counter on a cache line of its own. */
typedef struct {
    _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
    char pad[56];
} word_t;

/* What a wait looks after: who may die, whether we gave up, how long to spin, when to return. */
typedef struct {
    const int *pidfds; /* -1: not watched */
    int size;
    int culprit; /* who died */
    int spin;
    _Atomic int *aborted;        /* by this rank */
    _Atomic uint32_t *abandoned; /* by any rank, in shared memory; NULL: not watched */
    double deadline; /* on now_s()'s clock */
} watch_t;

double now_s(void);
int given_up(const watch_t *watch);
int wait_for(word_t *word, uint32_t target, watch_t *watch);
void count_up(word_t *word, uint32_t amount, uint32_t target);
int reached(word_t *word, uint32_t target);

#endif
