// Vectors of one instruction set, with the few operations that the products need, under the same names for each set.
//
// A vector holds 4 bytes of each of `rows` rows of weights: lane r is a dword of row r, and operators are those of dwords.
// Weights are the unsigned operand of the byte products and activations the signed one, as maddubs and dpbusd want it. All
// sums are exact integers until they are scaled, so each set gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef CPUCHAT_INTRINSICS  // emulated ones, of a test
#include CPUCHAT_INTRINSICS
#else
#include <immintrin.h>
#endif

namespace cpuchat {
namespace {  // of each file its own, which is compiled for other instructions

// What GCC's vectors have no operators for, of 256 bits.
struct Bits256 {
    static constexpr int bytes = 32;
    using Raw = __m256i;
    using F = __m256;

    static Raw multiply_pairs(Raw a, Raw b) { return _mm256_madd_epi16(a, b); }
    static Raw shuffle(Raw table, Raw index) { return _mm256_shuffle_epi8(table, index); }
    static Raw repeat(__m128i table) { return _mm256_broadcastsi128_si256(table); }
    static Raw words_to_dwords(const void* p) { return _mm256_cvtepu16_epi32(_mm_load_si128(static_cast<const __m128i*>(p))); }
    static Raw bytes_to_dwords(const void* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))); }
    static F halves(const void* p) { return _mm256_cvtph_ps(_mm_load_si128(static_cast<const __m128i*>(p))); }
    static F broadcast_f(float value) { return _mm256_set1_ps(value); }
    static F fmadd(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F fnmadd(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
};

template <class Bits> struct Simd : Bits {
    using typename Bits::F;
    using typename Bits::Raw;
    static constexpr int bytes = Bits::bytes, rows = bytes / 4;
    using I [[gnu::vector_size(bytes)]] = int32_t;
    using Words [[gnu::vector_size(bytes)]] = uint16_t;
    using SignedWords [[gnu::vector_size(bytes)]] = int16_t;
    using Bytes [[gnu::vector_size(bytes)]] = uint8_t;

    static I load(const void* p) { return I(*static_cast<const Raw*>(p)); }
    static void store(uint8_t* p, I a) { *reinterpret_cast<Raw*>(p) = Raw(a); }
    static F load_floats(const float* p) {
        F a;
        std::memcpy(&a, p, sizeof a);
        return a;
    }
    static void store(float* p, F a) { std::memcpy(p, &a, sizeof a); }
    static I dwords_of(int32_t value) { return I{} + value; }
    static I bytes_of(uint8_t value) { return I(Bytes{} + value); }
    static I broadcast(const void* p) {
        int32_t value;
        std::memcpy(&value, p, sizeof value);
        return dwords_of(value);
    }
    static F to_float(I a) { return __builtin_convertvector(a, F); }
    // Shifts of 16-bit lanes, left if n is negative. Bits that cross bytes are masked off by the caller.
    template <int n> static I shift(I a) {
        if constexpr (n > 0) return I(Words(a) >> n);
        else return I(Words(a) << -n);
    }
    struct Two {
        I low, high;
    };
    static Two nibbles(I both) { return {both & bytes_of(15), shift<4>(both) & bytes_of(15)}; }
    // Sums of the products of 16-bit pairs, a dword each.
    static I pairs(I a, I b) { return I(Bits::multiply_pairs(Raw(a), Raw(b))); }
    // Bytes 0 and 2, or 1 and 3, of each dword as two signed words.
    static I even_words(I a) { return I(SignedWords(Words(a) << 8) >> 8); }
    static I odd_words(I a) { return I(SignedWords(a) >> 8); }
    static I sub_bytes(I a, I b) { return I(Bytes(a) - Bytes(b)); }
    static I lookup(I table, I index) { return I(Bits::shuffle(Raw(table), Raw(index))); }
    static I table(const int8_t* values) { return I(Bits::repeat(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)))); }
    // 2 bytes a row, twice in its dword.
    static I twice(const void* p) {
        const I words = I(Bits::words_to_dwords(p));
        return words | words << 16;
    }
    // Half of 2 to the power of a byte - 127, a byte a row; the least two are subnormal.
    static F half_powers(const void* p) {
        const I e = I(Bits::bytes_to_dwords(p)), normal = (e - 1) << 23, least = (e + 1) << 21;
        return F(normal > least ? normal : least);
    }
};

// Products of bytes are summed in 16 bits, as many as fit.
struct Avx2 : Simd<Bits256> {
    static constexpr int tile = 4;
    static constexpr bool wide_sums = false;
    static I accumulate(I sums, I weights, I x) { return I(Words(sums) + Words(_mm256_maddubs_epi16(Raw(weights), Raw(x)))); }
    // Byte k of each dword with its sign, times 1 << n: two equal words, as multiplying pairs of 16-bit sums takes it.
    template <int k, int n = 0> static I scale(I four) {
        const Raw place = _mm256_setr_epi8(-1, k, -1, k, -1, k + 4, -1, k + 4, -1, k + 8, -1, k + 8, -1, k + 12, -1, k + 12,
                                           -1, k, -1, k, -1, k + 4, -1, k + 4, -1, k + 8, -1, k + 8, -1, k + 12, -1, k + 12);
        return I(SignedWords(shuffle(Raw(four), place)) >> (8 - n));
    }
    static I apply(I total, I sums, I scale) { return total + pairs(sums, scale); }
    static I total_of(I sums) { return pairs(sums, dwords_of(0x00010001)); }
    // Signed weights: |w| is the unsigned operand, and the sign goes to the activation.
    static I signed_start(int32_t) { return I{}; }
    static I signed_weights(I w) { return w; }
    static I accumulate_signed(I total, I w, I x, I scale = dwords_of(0x00010001)) {
        const Raw products = _mm256_maddubs_epi16(_mm256_abs_epi8(Raw(w)), _mm256_sign_epi8(Raw(x), Raw(w)));
        return total + pairs(I(products), scale);
    }
};

// dpbusd sums in 32 bits.
template <class Bits> struct Vnni : Simd<Bits> {
    using typename Simd<Bits>::I;
    using typename Simd<Bits>::Raw;
    static constexpr bool wide_sums = true;
    static I accumulate(I sums, I weights, I x) { return I(Bits::dot(Raw(sums), Raw(weights), Raw(x))); }
    // Byte k of each dword with its sign, as a dword, times 1 << n.
    template <int k, int n = 0> static I scale(I four) { return four << (24 - 8 * k) >> 24 << n; }
    static I apply(I total, I sums, I scale) { return total + sums * scale; }
    static I total_of(I sums) { return sums; }
    // Signed weights: 128 is added to each, and subtracted again as 128 times the sum of the activations.
    static I signed_start(int32_t sum_of_x) { return Simd<Bits>::dwords_of(-128 * sum_of_x); }
    static I signed_weights(I w) { return w ^ Simd<Bits>::bytes_of(0x80); }
    static I accumulate_signed(I total, I w, I x) { return accumulate(total, w, x); }
};

#if defined(__AVXVNNI__) && !defined(__AVX512VNNI__)

struct VnniBits256 : Bits256 {
    static Raw dot(Raw sums, Raw w, Raw x) { return _mm256_dpbusd_avx_epi32(sums, w, x); }
};
struct AvxVnni : Vnni<VnniBits256> {
    static constexpr int tile = 4;
};

#endif
#if defined(__AVX512VNNI__)

struct VnniBits512 {
    static constexpr int bytes = 64;
    using Raw = __m512i;
    using F = __m512;

    static Raw multiply_pairs(Raw a, Raw b) { return _mm512_madd_epi16(a, b); }
    static Raw shuffle(Raw table, Raw index) { return _mm512_shuffle_epi8(table, index); }
    static Raw repeat(__m128i table) { return _mm512_broadcast_i32x4(table); }
    static Raw words_to_dwords(const void* p) { return _mm512_cvtepu16_epi32(_mm256_load_si256(static_cast<const __m256i*>(p))); }
    static Raw bytes_to_dwords(const void* p) { return _mm512_cvtepu8_epi32(_mm_load_si128(static_cast<const __m128i*>(p))); }
    static F halves(const void* p) { return _mm512_cvtph_ps(_mm256_load_si256(static_cast<const __m256i*>(p))); }
    static F broadcast_f(float value) { return _mm512_set1_ps(value); }
    static F fmadd(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F fnmadd(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
    static Raw dot(Raw sums, Raw w, Raw x) { return _mm512_dpbusd_epi32(sums, w, x); }
};
struct Avx512 : Vnni<VnniBits512> {
    static constexpr int tile = 8;
};

#endif

}  // namespace
}  // namespace cpuchat
