/* Waiting for a word in shared memory: spin briefly, then sleep in the kernel, and look after the peers.
 *
 *     count_up(word, 1, target)                     wait_for(word, target, …)
 *       value += 1                                    value ≥ target? done
 *       value = target and somebody sleeps? wake      sleepers += 1, sleep while value is what I saw, sleepers −= 1
 *
 * Both sides touch `value` and `sleepers` in opposite order with sequential consistency, and the kernel compares
 * `value` again before it sleeps, so no wake-up is lost. A rank that is killed while it sleeps leaves `sleepers` one
 * too high, which costs a useless wake-up and nothing else. Counters wrap around; differences are compared. */
#define _GNU_SOURCE
#include "waiting.h"

#include <errno.h>
#include <linux/futex.h>
#include <limits.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

static const double SLICE_S = 0.02; /* between two looks at the peers */

double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int reached(word_t *word, uint32_t target) {
    return (int32_t)(atomic_load_explicit(&word->value, memory_order_acquire) - target) >= 0;
}

int given_up(const watch_t *watch) {
    return atomic_load(watch->aborted) || (watch->abandoned && atomic_load(watch->abandoned));
}

static int somebody_died(watch_t *watch) {
    for (int rank = 0; rank < watch->size; rank++) {
        struct pollfd one = {.fd = watch->pidfds[rank], .events = POLLIN};
        if (one.fd >= 0 && poll(&one, 1, 0) == 1) {
            watch->culprit = rank;
            return 1;
        }
    }
    return 0;
}

/* DONE, DEAD, ABORTED, or PENDING when the deadline has passed or a signal came. */
int wait_for(word_t *word, uint32_t target, watch_t *watch) {
    for (int i = 0; i <= watch->spin; i++) {
        if (reached(word, target)) return DONE;
        PAUSE();
    }
    for (;;) {
        if (given_up(watch)) return reached(word, target) ? DONE : ABORTED;
        double left = watch->deadline - now_s();
        if (left <= 0) return PENDING;
        if (left > SLICE_S) left = SLICE_S;
        struct timespec slice = {.tv_sec = (time_t)left, .tv_nsec = (long)(1e9 * (left - (double)(time_t)left))};
        atomic_fetch_add(&word->sleepers, 1);
        uint32_t seen = atomic_load(&word->value);
        long woken = 0;
        if ((int32_t)(seen - target) < 0)
            woken = syscall(SYS_futex, &word->value, FUTEX_WAIT, seen, &slice, NULL, 0);
        int why = woken ? errno : 0;
        atomic_fetch_sub(&word->sleepers, 1);
        if (reached(word, target)) return DONE;
        if (why == EINTR) return PENDING;
        if (why == ETIMEDOUT && somebody_died(watch)) return reached(word, target) ? DONE : DEAD;
    }
}

/* Add `amount`; whoever brings the word to `target` wakes those who wait for it. */
void count_up(word_t *word, uint32_t amount, uint32_t target) {
    uint32_t value = atomic_fetch_add(&word->value, amount) + amount;
    if (value == target && atomic_load(&word->sleepers))
        syscall(SYS_futex, &word->value, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
