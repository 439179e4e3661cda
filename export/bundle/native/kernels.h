// Inner products, chosen once for the processor at hand.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#define BIDMATCH_X86 1
#include <immintrin.h>
#endif

namespace bidmatch {

// Sum of a[i] * b[i]; n may be any number.
using Dot = float (*)(const float* a, const float* b, size_t n);
// Sum of a[i] * b[i], b in 8 bits.
using DotInt8 = float (*)(const float* a, const int8_t* b, size_t n);
// The same in whole numbers; the caller keeps the sum within 32 bits.
using DotCodes = int32_t (*)(const int16_t* a, const int8_t* b, size_t n);

inline float dot_portable(const float* a, const float* b, size_t n) {
    float sums[8] = {};
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (size_t j = 0; j < 8; ++j) sums[j] += a[i + j] * b[i + j];
    float sum = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
    for (; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

inline float dot_int8_portable(const float* a, const int8_t* b, size_t n) {
    float sums[8] = {};
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (size_t j = 0; j < 8; ++j) sums[j] += a[i + j] * static_cast<float>(b[i + j]);
    float sum = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
    for (; i < n; ++i) sum += a[i] * static_cast<float>(b[i]);
    return sum;
}

inline int32_t dot_codes_portable(const int16_t* a, const int8_t* b, size_t n) {
    int32_t sum = 0;
    for (size_t i = 0; i < n; ++i) sum += static_cast<int32_t>(a[i]) * b[i];
    return sum;
}

#ifdef BIDMATCH_X86
__attribute__((target("avx2,fma"))) inline float sum_of_lanes(__m256 lanes) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

__attribute__((target("avx2,fma"))) inline float dot_avx2(const float* a, const float* b, size_t n) {
    __m256 x = _mm256_setzero_ps(), y = _mm256_setzero_ps(), z = _mm256_setzero_ps(), w = _mm256_setzero_ps();
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        x = _mm256_fmadd_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i), x);
        y = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + 8), _mm256_loadu_ps(b + i + 8), y);
        z = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + 16), _mm256_loadu_ps(b + i + 16), z);
        w = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + 24), _mm256_loadu_ps(b + i + 24), w);
    }
    for (; i + 8 <= n; i += 8) x = _mm256_fmadd_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i), x);
    float sum = sum_of_lanes(_mm256_add_ps(_mm256_add_ps(x, y), _mm256_add_ps(z, w)));
    for (; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

__attribute__((target("avx2,fma"))) inline __m256 eight_of_int8(const int8_t* b) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(b))));
}

__attribute__((target("avx2,fma"))) inline float dot_int8_avx2(const float* a, const int8_t* b, size_t n) {
    __m256 x = _mm256_setzero_ps(), y = _mm256_setzero_ps();
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        x = _mm256_fmadd_ps(_mm256_loadu_ps(a + i), eight_of_int8(b + i), x);
        y = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + 8), eight_of_int8(b + i + 8), y);
    }
    float sum = sum_of_lanes(_mm256_add_ps(x, y));
    for (; i < n; ++i) sum += a[i] * static_cast<float>(b[i]);
    return sum;
}

__attribute__((target("avx2"))) inline __m256i sixteen_products(const int16_t* a, const int8_t* b) {
    const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b)));
    return _mm256_madd_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)), codes);
}

__attribute__((target("avx2"))) inline int32_t dot_codes_avx2(const int16_t* a, const int8_t* b, size_t n) {
    __m256i x = _mm256_setzero_si256(), y = _mm256_setzero_si256();
    size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        x = _mm256_add_epi32(x, sixteen_products(a + i, b + i));
        y = _mm256_add_epi32(y, sixteen_products(a + i + 16, b + i + 16));
    }
    for (; i + 16 <= n; i += 16) x = _mm256_add_epi32(x, sixteen_products(a + i, b + i));
    x = _mm256_add_epi32(x, y);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    int32_t sum = _mm_cvtsi128_si32(four);
    for (; i < n; ++i) sum += static_cast<int32_t>(a[i]) * b[i];
    return sum;
}
#endif

struct Kernels {
    Dot dot = dot_portable;
    DotInt8 dot_int8 = dot_int8_portable;
    DotCodes dot_codes = dot_codes_portable;
    const char* name = "portable";

    Kernels() {
#ifdef BIDMATCH_X86
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
            dot = dot_avx2;
            dot_int8 = dot_int8_avx2;
            dot_codes = dot_codes_avx2;
            name = "avx2";
        }
#endif
    }
};

inline const Kernels& kernels() {
    static const Kernels chosen;
    return chosen;
}

inline void prefetch(const void* address) { __builtin_prefetch(address); }

// The first `bytes` of a vector, a cache line at a time.
inline void prefetch_vector(const float* vector, size_t dim) {
    const char* start = reinterpret_cast<const char*>(vector);
    for (size_t at = 0; at < dim * sizeof(float); at += 64) prefetch(start + at);
}

}  // namespace bidmatch
