// Vectors of one instruction set, with the few operations that the products need, under the same names for each set.
//
// A vector holds 4 bytes of each of `rows` rows of weights: lane r is a dword of row r. Weights are the unsigned operand
// of the byte products and activations the signed one, as maddubs and dpbusd want it. All sums are exact integers until
// they are scaled, so each set gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef CPUCHAT_INTRINSICS  // emulated ones, of a test
#include CPUCHAT_INTRINSICS
#else
#include <immintrin.h>
#endif

namespace cpuchat {

inline int32_t load_dword(const void* from) {
    int32_t value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

#if defined(__AVX2__)

// 8 rows; what AVX2 and AVX-VNNI have in common.
struct Simd256 {
    static constexpr int rows = 8;
    static constexpr int bytes = 32;
    using I = __m256i;
    using F = __m256;

    static I load(const void* p) { return _mm256_load_si256(static_cast<const I*>(p)); }
    static I zero() { return _mm256_setzero_si256(); }
    static F zero_f() { return _mm256_setzero_ps(); }
    static I bytes_of(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
    static I dwords_of(int32_t value) { return _mm256_set1_epi32(value); }
    static I broadcast(const void* p) { return _mm256_set1_epi32(load_dword(p)); }
    static F broadcast_f(float value) { return _mm256_set1_ps(value); }
    static I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
    static I bit_or(I a, I b) { return _mm256_or_si256(a, b); }
    // Shifts of 16-bit lanes, left if n is negative. Bits that cross bytes are masked off by the caller.
    template <int n> static I shift(I a) {
        if constexpr (n > 0) return _mm256_srli_epi16(a, n);
        else if constexpr (n < 0) return _mm256_slli_epi16(a, -n);
        else return a;
    }
    static I add(I a, I b) { return _mm256_add_epi32(a, b); }
    static I sub(I a, I b) { return _mm256_sub_epi32(a, b); }
    // Sums of the products of 16-bit pairs, a dword each.
    static I pairs(I a, I b) { return _mm256_madd_epi16(a, b); }
    // Bytes 0 and 2, or 1 and 3, of each dword as two signed words.
    static I even_words(I a) { return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8); }
    static I odd_words(I a) { return _mm256_srai_epi16(a, 8); }
    static I shift_words_left(I a, int n) { return _mm256_slli_epi16(a, n); }
    static I shift_dwords_left(I a, int n) { return _mm256_slli_epi32(a, n); }
    static F halves(const void* p) { return _mm256_cvtph_ps(_mm_load_si128(static_cast<const __m128i*>(p))); }
    static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F fmadd(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F fnmadd(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
    static void store(float* p, F a) { _mm256_storeu_ps(p, a); }
    static void store(uint8_t* p, I a) { _mm256_store_si256(reinterpret_cast<I*>(p), a); }
    static F load_floats(const float* p) { return _mm256_loadu_ps(p); }
    static I lookup(I table, I index) { return _mm256_shuffle_epi8(table, index); }
    static I table(const int8_t* values) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
    }
    // Byte k of each dword with its sign, as a dword, times 1 << n.
    template <int k, int n> static I signed_byte(I a) {
        return _mm256_slli_epi32(_mm256_srai_epi32(_mm256_slli_epi32(a, 24 - 8 * k), 24), n);
    }
    static I sub_bytes(I a, I b) { return _mm256_sub_epi8(a, b); }
    // 2 bytes a row, twice in its dword.
    static I twice(const void* p) {
        const I words = _mm256_cvtepu16_epi32(_mm_load_si128(static_cast<const __m128i*>(p)));
        return _mm256_or_si256(words, _mm256_slli_epi32(words, 16));
    }
    // Half of 2 to the power of a byte - 127, a byte a row; the least two are subnormal.
    static F half_powers(const void* p) {
        const I e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
        const I normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
        const I least = _mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(1)), 21);
        return _mm256_castsi256_ps(_mm256_max_epi32(normal, least));
    }
};

// Products of bytes are summed in 16 bits, as many as fit: `Acc` may take `span / greatest weight` of them.
struct Avx2 : Simd256 {
    static constexpr int tile = 4;
    static constexpr bool wide_sums = false;
    static I accumulate(I sums, I weights, I x) { return _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, x)); }
    // Byte k of each dword with its sign, times 1 << n: two equal words, as multiplying pairs of 16-bit sums takes it.
    template <int k, int n = 0> static I scale(I four) {
        const I place = _mm256_setr_epi8(-1, k, -1, k, -1, k + 4, -1, k + 4, -1, k + 8, -1, k + 8, -1, k + 12, -1, k + 12,
                                         -1, k, -1, k, -1, k + 4, -1, k + 4, -1, k + 8, -1, k + 8, -1, k + 12, -1, k + 12);
        return _mm256_srai_epi16(_mm256_shuffle_epi8(four, place), 8 - n);
    }
    static I apply(I total, I sums, I scale) { return _mm256_add_epi32(total, _mm256_madd_epi16(sums, scale)); }
    static I total_of(I sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
    // Signed weights: |w| is the unsigned operand, and the sign goes to the activation.
    static I signed_start(int32_t) { return zero(); }
    static I signed_weights(I w) { return w; }
    static I accumulate_signed(I total, I w, I x, I scale = _mm256_set1_epi16(1)) {
        const I products = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        return _mm256_add_epi32(total, _mm256_madd_epi16(products, scale));
    }
};

// dpbusd sums in 32 bits.
template <class Base, class Dot> struct Vnni : Base {
    using I = typename Base::I;
    static constexpr bool wide_sums = true;
    static I accumulate(I sums, I weights, I x) { return Dot::dot(sums, weights, x); }
    template <int k, int n = 0> static I scale(I four) { return Base::template signed_byte<k, n>(four); }
    static I apply(I total, I sums, I scale) { return Base::add(total, Dot::mullo(sums, scale)); }
    static I total_of(I sums) { return sums; }
    // Signed weights: 128 is added to each, and subtracted again as 128 times the sum of the activations.
    static I signed_start(int32_t sum_of_x) { return Base::dwords_of(-128 * sum_of_x); }
    static I signed_weights(I w) { return Dot::flip(w, Base::bytes_of(0x80)); }
    static I accumulate_signed(I total, I w, I x) { return Dot::dot(total, w, x); }
};

#endif
#if defined(__AVXVNNI__) && !defined(__AVX512VNNI__)

struct Dot256 {
    static __m256i dot(__m256i sums, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(sums, w, x); }
    static __m256i mullo(__m256i a, __m256i b) { return _mm256_mullo_epi32(a, b); }
    static __m256i flip(__m256i a, __m256i b) { return _mm256_xor_si256(a, b); }
};
struct AvxVnni : Vnni<Simd256, Dot256> {
    static constexpr int tile = 4;
};

#endif
#if defined(__AVX512VNNI__)

struct Simd512 {
    static constexpr int rows = 16;
    static constexpr int bytes = 64;
    using I = __m512i;
    using F = __m512;

    static I load(const void* p) { return _mm512_load_si512(p); }
    static I zero() { return _mm512_setzero_si512(); }
    static F zero_f() { return _mm512_setzero_ps(); }
    static I bytes_of(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
    static I dwords_of(int32_t value) { return _mm512_set1_epi32(value); }
    static I broadcast(const void* p) { return _mm512_set1_epi32(load_dword(p)); }
    static F broadcast_f(float value) { return _mm512_set1_ps(value); }
    static I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
    static I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
    template <int n> static I shift(I a) {
        if constexpr (n > 0) return _mm512_srli_epi16(a, n);
        else if constexpr (n < 0) return _mm512_slli_epi16(a, -n);
        else return a;
    }
    static I add(I a, I b) { return _mm512_add_epi32(a, b); }
    static I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
    static I pairs(I a, I b) { return _mm512_madd_epi16(a, b); }
    static I even_words(I a) { return _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8); }
    static I odd_words(I a) { return _mm512_srai_epi16(a, 8); }
    static I shift_words_left(I a, int n) { return _mm512_slli_epi16(a, n); }
    static I shift_dwords_left(I a, int n) { return _mm512_slli_epi32(a, n); }
    static F halves(const void* p) { return _mm512_cvtph_ps(_mm256_load_si256(static_cast<const __m256i*>(p))); }
    static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F fmadd(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F fnmadd(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
    static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
    static void store(uint8_t* p, I a) { _mm512_store_si512(p, a); }
    static F load_floats(const float* p) { return _mm512_loadu_ps(p); }
    static I lookup(I table, I index) { return _mm512_shuffle_epi8(table, index); }
    static I table(const int8_t* values) {
        return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
    }
    template <int k, int n> static I signed_byte(I a) {
        return _mm512_slli_epi32(_mm512_srai_epi32(_mm512_slli_epi32(a, 24 - 8 * k), 24), n);
    }
    static I sub_bytes(I a, I b) { return _mm512_sub_epi8(a, b); }
    static I twice(const void* p) {
        const I words = _mm512_cvtepu16_epi32(_mm256_load_si256(static_cast<const __m256i*>(p)));
        return _mm512_or_si512(words, _mm512_slli_epi32(words, 16));
    }
    static F half_powers(const void* p) {
        const I e = _mm512_cvtepu8_epi32(_mm_load_si128(static_cast<const __m128i*>(p)));
        const I normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
        const I least = _mm512_slli_epi32(_mm512_add_epi32(e, _mm512_set1_epi32(1)), 21);
        return _mm512_castsi512_ps(_mm512_max_epi32(normal, least));
    }
};
struct Dot512 {
    static __m512i dot(__m512i sums, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(sums, w, x); }
    static __m512i mullo(__m512i a, __m512i b) { return _mm512_mullo_epi32(a, b); }
    static __m512i flip(__m512i a, __m512i b) { return _mm512_xor_si512(a, b); }
};
struct Avx512 : Vnni<Simd512, Dot512> {
    static constexpr int tile = 8;
};

#endif

}  // namespace cpuchat
