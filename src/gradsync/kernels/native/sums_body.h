/* The loops, included once per instruction set: LEVEL names it, TARGET is the attribute that selects it, WIDTH is
 * the bytes of its vectors. Four vectors are under way at once. */

#include "vectors_body.h"

/* LANES elements in a vector: LOAD makes an accumulator of them, STORE rounds it back, FINISH scales. */
#define DEFINE_SUM(TYPE, ITEM, ACC, LANES, LOAD, STORE, FINISH, LOAD1, STORE1, ACC1)                                  \
    TARGET static void NAME(sum_##TYPE)(const void *const *in, int num_in, void *const *out, int num_out,             \
                                        size_t count, double scale) {                                                 \
        size_t i = 0;                                                                                                 \
        (void)scale;                                                                                                  \
        for (; i + 4 * (LANES) <= count; i += 4 * (LANES)) {                                                          \
            const ITEM *p = (const ITEM *)in[0] + i;                                                                  \
            ACC a = LOAD(p), b = LOAD(p + (LANES)), c = LOAD(p + 2 * (LANES)), d = LOAD(p + 3 * (LANES));             \
            for (int r = 1; r < num_in; r++) {                                                                        \
                p = (const ITEM *)in[r] + i;                                                                          \
                a += LOAD(p);                                                                                         \
                b += LOAD(p + (LANES));                                                                               \
                c += LOAD(p + 2 * (LANES));                                                                           \
                d += LOAD(p + 3 * (LANES));                                                                           \
            }                                                                                                         \
            FINISH(a);                                                                                                \
            FINISH(b);                                                                                                \
            FINISH(c);                                                                                                \
            FINISH(d);                                                                                                \
            for (int r = 0; r < num_out; r++) {                                                                       \
                ITEM *q = (ITEM *)out[r] + i;                                                                         \
                STORE(q, a);                                                                                          \
                STORE(q + (LANES), b);                                                                                \
                STORE(q + 2 * (LANES), c);                                                                            \
                STORE(q + 3 * (LANES), d);                                                                            \
            }                                                                                                         \
        }                                                                                                             \
        for (; i < count; i++) {                                                                                      \
            ACC1 a = LOAD1(((const ITEM *)in[0])[i]);                                                                 \
            for (int r = 1; r < num_in; r++) a += LOAD1(((const ITEM *)in[r])[i]);                                    \
            FINISH(a);                                                                                                \
            for (int r = 0; r < num_out; r++) ((ITEM *)out[r])[i] = STORE1(a);                                        \
        }                                                                                                             \
    }

#define SAME(x) (x)
#define UNSCALED(a) ((void)0)
#define SCALED_F32(a) ((a) *= (float)scale)
#define SCALED_F64(a) ((a) *= scale)

#define DEFINE_PLAIN(TYPE, ITEM, VEC, FINISH)                                                                         \
    INLINE NAME(VEC) NAME(load_##TYPE)(const ITEM *p) { return *(const NAME(VEC) *)p; }                               \
    INLINE void NAME(store_##TYPE)(ITEM *p, NAME(VEC) v) { *(NAME(VEC) *)p = v; }                                     \
    DEFINE_SUM(TYPE, ITEM, NAME(VEC), WIDTH / (int)sizeof(ITEM), NAME(load_##TYPE), NAME(store_##TYPE), FINISH, SAME, \
               SAME, ITEM)

DEFINE_PLAIN(f32, float, vf32, SCALED_F32)
DEFINE_PLAIN(f64, double, vf64, SCALED_F64)
DEFINE_PLAIN(i8, uint8_t, vu8, UNSCALED)
DEFINE_PLAIN(i16, uint16_t, vu16, UNSCALED)
DEFINE_PLAIN(i32, uint32_t, vu32, UNSCALED)
DEFINE_PLAIN(i64, uint64_t, vu64, UNSCALED)

DEFINE_SUM(bf16, uint16_t, NAME(vf32), WIDTH / 4, NAME(load_bf16), NAME(store_bf16), SCALED_F32, float_of_bf16,
           bf16_of_float, float)

DEFINE_SUM(f16, uint16_t, NAME(vf32), WIDTH / 4, NAME(load_f16), NAME(store_f16), SCALED_F32, float_of_f16,
           f16_of_float, float)

static const sum_t NAME(sums)[NUM_DTYPES] = {
    [F32] = NAME(sum_f32), [F64] = NAME(sum_f64), [F16] = NAME(sum_f16), [BF16] = NAME(sum_bf16),
    [I8] = NAME(sum_i8),   [I16] = NAME(sum_i16), [I32] = NAME(sum_i32), [I64] = NAME(sum_i64),
};

#undef GLUE_
#undef GLUE
#undef NAME
#undef INLINE
#undef VECTOR
#undef DEFINE_SUM
#undef DEFINE_PLAIN
#undef SAME
#undef UNSCALED
#undef SCALED_F32
#undef SCALED_F64
