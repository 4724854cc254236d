/* BODY, once per instruction set that the compiler can write for: LEVEL names it, TARGET is the attribute that selects
 * it, WIDTH is the bytes of its vectors. `gradsync_level` says which one this processor is to use.
 *
 * Not -march=native: a login node differs from a compute node. Built with -ffp-contract=off, so that all levels and
 * the torch reference give the same bits. */

#define LEVEL portable /* on x86-64: SSE2 */
#define TARGET
#define WIDTH 16
#include BODY
#undef LEVEL
#undef TARGET
#undef WIDTH

#if defined(__x86_64__)
#define LEVEL avx2
#define TARGET __attribute__((target("avx2,f16c")))
#define WIDTH 32
#include BODY
#undef LEVEL
#undef TARGET
#undef WIDTH

#define LEVEL avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx2,f16c")))
#define WIDTH 64
#include BODY
#undef LEVEL
#undef TARGET
#undef WIDTH
#endif

#undef BODY
