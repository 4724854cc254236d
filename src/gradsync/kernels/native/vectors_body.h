/* Vectors of one instruction set, and half types to and from them: included by each body. LEVEL names the set, TARGET
 * is the attribute that selects it, WIDTH is the bytes of its vectors. Needs halves.h, and immintrin.h if there is. */

#define GLUE_(a, b) a##_##b
#define GLUE(a, b) GLUE_(a, b)
#define NAME(base) GLUE(base, LEVEL)
#define INLINE TARGET __attribute__((always_inline)) static inline
#define VECTOR(ITEM, NBYTES) __attribute__((vector_size(NBYTES), aligned(sizeof(ITEM)), may_alias))

typedef float NAME(vf32) VECTOR(float, WIDTH);
typedef double NAME(vf64) VECTOR(double, WIDTH);
typedef uint8_t NAME(vu8) VECTOR(uint8_t, WIDTH);
typedef uint16_t NAME(vu16) VECTOR(uint16_t, WIDTH);
typedef uint32_t NAME(vu32) VECTOR(uint32_t, WIDTH);
typedef uint64_t NAME(vu64) VECTOR(uint64_t, WIDTH);
typedef uint16_t NAME(vhalf) VECTOR(uint16_t, WIDTH / 2);

INLINE NAME(vf32) NAME(load_bf16)(const uint16_t *p) {
    return (NAME(vf32))(__builtin_convertvector(*(const NAME(vhalf) *)p, NAME(vu32)) << 16);
}

INLINE void NAME(store_bf16)(uint16_t *p, NAME(vf32) f) {
    NAME(vu32) bits = (NAME(vu32))f, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    NAME(vu32) nan = (NAME(vu32))(f != f);
    *(NAME(vhalf) *)p = __builtin_convertvector((rounded & ~nan) | (0x7fc0 & nan), NAME(vhalf));
}

INLINE NAME(vf32) NAME(load_f16)(const uint16_t *p) {
#if WIDTH == 64
    return (NAME(vf32))_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif WIDTH == 32
    return (NAME(vf32))_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    NAME(vf32) f;
    for (int i = 0; i < WIDTH / 4; i++) f[i] = float_of_f16(p[i]);
    return f;
#endif
}

INLINE void NAME(store_f16)(uint16_t *p, NAME(vf32) f) {
#if WIDTH == 64
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)f, _MM_FROUND_TO_NEAREST_INT));
#elif WIDTH == 32
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)f, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < WIDTH / 4; i++) p[i] = f16_of_float(f[i]);
#endif
}
