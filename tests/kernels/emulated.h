// The intrinsics that the kernels use, as loops over lanes, in place of immintrin.h: so the code for AVX2, AVX-VNNI,
// AVX-512 VNNI and AMX runs, and is checked, on every machine. What they compute is Intel's Intrinsics Guide's. (GCC has
// the operators of vectors everywhere.)
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {

template <class L, class V> struct Lanes {
    static constexpr int n = sizeof(V) / sizeof(L);
    L of[n];
    explicit Lanes(const V& v) { std::memcpy(of, &v, sizeof v); }
    L operator[](int i) const { return of[i]; }
};

// A vector whose lane i is f(i).
template <class V, class L, class F> V lanes(F f) {
    L of[sizeof(V) / sizeof(L)];
    for (int i = 0; i < static_cast<int>(sizeof(V) / sizeof(L)); i++) of[i] = static_cast<L>(f(i));
    V v;
    std::memcpy(&v, of, sizeof v);
    return v;
}
template <class V> V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V> V load_aligned(const void* from) {
    if (reinterpret_cast<uintptr_t>(from) % sizeof(V)) std::abort();
    return load<V>(from);
}
inline int saturated(int value, int least, int most) { return std::min(std::max(value, least), most); }
inline float half(uint16_t bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                        : exponent     ? std::ldexp(1024.0f + fraction, exponent - 25)
                                       : std::ldexp(static_cast<float>(fraction), -24);
    return bits >> 15 ? -value : value;
}

}  // namespace emulated

using __m128i [[gnu::vector_size(16)]] = long long;
using __m256i [[gnu::vector_size(32)]] = long long;
using __m512i [[gnu::vector_size(64)]] = long long;
using __m128 [[gnu::vector_size(16)]] = float;
using __m256 [[gnu::vector_size(32)]] = float;
using __m512 [[gnu::vector_size(64)]] = float;

// Operations of lanes of type L, of 256 and of 512 bits. `a`, `b` and `c` are the operands' lanes, `i` is the lane.
#define UNARY(name, L, value) \
    inline __m256i _mm256_##name(__m256i v) { \
        const emulated::Lanes<L, __m256i> a(v); \
        return emulated::lanes<__m256i, L>([&](int i) { return value; }); \
    } \
    inline __m512i _mm512_##name(__m512i v) { \
        const emulated::Lanes<L, __m512i> a(v); \
        return emulated::lanes<__m512i, L>([&](int i) { return value; }); \
    }
#define BINARY_OF(type, name, P, L, value) \
    inline type name(type v, type w) { \
        const emulated::Lanes<P, type> a(v), b(w); \
        return emulated::lanes<type, L>([&](int i) { return value; }); \
    }
#define BINARY(name, P, L, value) BINARY_OF(__m256i, _mm256_##name, P, L, value) BINARY_OF(__m512i, _mm512_##name, P, L, value)
#define SET(name, T, L) \
    inline __m256i _mm256_##name(T value) { return emulated::lanes<__m256i, L>([&](int) { return value; }); } \
    inline __m512i _mm512_##name(T value) { return emulated::lanes<__m512i, L>([&](int) { return value; }); }

BINARY_OF(__m256i, _mm256_and_si256, uint32_t, uint32_t, a[i] & b[i])
BINARY(max_epi32, int32_t, int32_t, std::max(a[i], b[i]))
BINARY(madd_epi16, int16_t, uint32_t, static_cast<uint32_t>(a[2 * i] * b[2 * i]) + static_cast<uint32_t>(a[2 * i + 1] * b[2 * i + 1]))
BINARY(maddubs_epi16, int8_t, int16_t,
       emulated::saturated(static_cast<uint8_t>(a[2 * i]) * b[2 * i] + static_cast<uint8_t>(a[2 * i + 1]) * b[2 * i + 1], -32768, 32767))
BINARY(sign_epi8, int8_t, int8_t, b[i] > 0 ? a[i] : b[i] < 0 ? -a[i] : 0)
BINARY(shuffle_epi8, uint8_t, uint8_t, b[i] & 0x80 ? 0 : a[i / 16 * 16 + b[i] % 16])
// Lanes of 128 bits: the first half of each from v, the other from w.
BINARY(packs_epi32, int32_t, int16_t, emulated::saturated(((i / 4) % 2 ? b : a)[i / 8 * 4 + i % 4], -32768, 32767))
BINARY(packs_epi16, int16_t, int8_t, emulated::saturated(((i / 8) % 2 ? b : a)[i / 16 * 8 + i % 8], -128, 127))
BINARY(hadd_epi32, uint32_t, uint32_t, ((i / 2) % 2 ? b : a)[i / 4 * 4 + i % 2 * 2] + ((i / 2) % 2 ? b : a)[i / 4 * 4 + i % 2 * 2 + 1])
BINARY(permutevar8x32_epi32, uint32_t, uint32_t, a[b[i] % 8])
UNARY(abs_epi8, int8_t, a[i] < 0 ? -a[i] : a[i])
SET(set1_epi8, char, char)
SET(set1_epi16, short, int16_t)
SET(set1_epi32, int, int32_t)

#define DOT(type, name) \
    inline type name(type sums, type v, type w) { \
        const emulated::Lanes<uint32_t, type> from(sums); \
        const emulated::Lanes<uint8_t, type> a(v); \
        const emulated::Lanes<int8_t, type> b(w); \
        return emulated::lanes<type, uint32_t>([&](int i) { \
            int sum = 0; \
            for (int k = 4 * i; k < 4 * i + 4; k++) sum += a[k] * b[k]; \
            return from[i] + static_cast<uint32_t>(sum); \
        }); \
    }
DOT(__m256i, _mm256_dpbusd_avx_epi32)
DOT(__m512i, _mm512_dpbusd_epi32)

#define FLOATS(F, I, H, p) \
    inline F p##_set1_ps(float value) { return emulated::lanes<F, float>([&](int) { return value; }); } \
    inline F p##_loadu_ps(const float* from) { return emulated::load<F>(from); } \
    inline F p##_cvtph_ps(H v) { \
        const emulated::Lanes<uint16_t, H> a(v); \
        return emulated::lanes<F, float>([&](int i) { return emulated::half(a[i]); }); \
    } \
    inline I p##_cvtps_epi32(F v) { \
        const emulated::Lanes<float, F> a(v); \
        return emulated::lanes<I, int32_t>([&](int i) { return std::nearbyint(a[i]); }); \
    } \
    BINARY_OF(F, p##_mul_ps, float, float, a[i] * b[i]) \
    BINARY_OF(F, p##_max_ps, float, float, a[i] > b[i] ? a[i] : b[i]) \
    BINARY_OF(F, p##_andnot_ps, uint32_t, uint32_t, ~a[i] & b[i]) \
    inline F p##_fmadd_ps(F u, F v, F w) { \
        const emulated::Lanes<float, F> a(u), b(v), c(w); \
        return emulated::lanes<F, float>([&](int i) { return std::fma(a[i], b[i], c[i]); }); \
    } \
    inline F p##_fnmadd_ps(F u, F v, F w) { \
        const emulated::Lanes<float, F> a(u), b(v), c(w); \
        return emulated::lanes<F, float>([&](int i) { return std::fma(-a[i], b[i], c[i]); }); \
    }
FLOATS(__m256, __m256i, __m128i, _mm256)
FLOATS(__m512, __m512i, __m256i, _mm512)

inline __m128i _mm_load_si128(const void* from) { return emulated::load_aligned<__m128i>(from); }
inline __m128i _mm_loadu_si128(const void* from) { return emulated::load<__m128i>(from); }
inline __m256i _mm256_loadu_si256(const void* from) { return emulated::load<__m256i>(from); }
inline __m256i _mm256_load_si256(const void* from) { return emulated::load_aligned<__m256i>(from); }
inline void _mm256_storeu_si256(void* to, __m256i v) { std::memcpy(to, &v, sizeof v); }
inline __m128i _mm_loadl_epi64(const void* from) {
    __m128i v{};
    std::memcpy(&v, from, 8);
    return v;
}
template <class V, class L> V widened(const void* from) {
    return emulated::lanes<V, int32_t>([&](int i) { return static_cast<const L*>(from)[i]; });
}
inline __m256i _mm256_cvtepu8_epi32(__m128i v) { return widened<__m256i, uint8_t>(&v); }
inline __m512i _mm512_cvtepu8_epi32(__m128i v) { return widened<__m512i, uint8_t>(&v); }
inline __m256i _mm256_cvtepu16_epi32(__m128i v) { return widened<__m256i, uint16_t>(&v); }
inline __m512i _mm512_cvtepu16_epi32(__m256i v) { return widened<__m512i, uint16_t>(&v); }
template <class... B> __m256i _mm256_setr_epi8(B... values) {
    const int8_t of[] = {static_cast<int8_t>(values)...};
    return emulated::load<__m256i>(of);
}
template <class V> V repeated(__m128i v) {
    const emulated::Lanes<uint8_t, __m128i> a(v);
    return emulated::lanes<V, uint8_t>([&](int i) { return a[i % 16]; });
}
inline __m256i _mm256_broadcastsi128_si256(__m128i v) { return repeated<__m256i>(v); }
inline __m512i _mm512_broadcast_i32x4(__m128i v) { return repeated<__m512i>(v); }
inline __m256i _mm256_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h) {
    const int of[] = {a, b, c, d, e, f, g, h};
    return emulated::load<__m256i>(of);
}
inline int _mm256_extract_epi32(__m256i v, int i) { return emulated::Lanes<int32_t, __m256i>(v)[i]; }
inline __m128 _mm256_extractf128_ps(__m256 v, int half) { return emulated::load<__m128>(reinterpret_cast<const char*>(&v) + 16 * half); }
inline __m128 _mm256_castps256_ps128(__m256 v) { return _mm256_extractf128_ps(v, 0); }
BINARY_OF(__m128, _mm_max_ps, float, float, a[i] > b[i] ? a[i] : b[i])
BINARY_OF(__m128, _mm_max_ss, float, float, i == 0 && b[i] >= a[i] ? b[i] : a[i])
BINARY_OF(__m128, _mm_movehl_ps, float, float, i < 2 ? b[i + 2] : a[i])
inline __m128 _mm_shuffle_ps(__m128 v, __m128 w, int order) {
    const emulated::Lanes<float, __m128> a(v), b(w);
    return emulated::lanes<__m128, float>([&](int i) { return (i < 2 ? a : b)[order >> 2 * i & 3]; });
}
inline float _mm_cvtss_f32(__m128 v) { return emulated::Lanes<float, __m128>(v)[0]; }

constexpr int _MM_HINT_T0 = 3;
inline void _mm_prefetch(const char*, int) {}

// The tiles of AMX: up to 16 rows of up to 64 bytes.
namespace emulated {

struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
struct Tile {
    alignas(64) uint8_t of[16][64];
};
inline Config config{};
inline Tile tiles[8];

inline void check(bool is_right) {
    if (!is_right) std::abort();
}
// Rows of `depth` dwords by as many rows of weights; `Weight` is the type of their bytes.
template <class Weight> void multiply_tiles(int sums, int x, int weights) {
    const int n = config.rows[sums], depth = config.rows[weights];
    check(config.palette == 1 && config.rows[x] == n && config.row_bytes[x] == 4 * depth);
    check(config.row_bytes[weights] == config.row_bytes[sums]);
    for (int m = 0; m < n; m++) {
        for (int r = 0; r < config.row_bytes[sums] / 4; r++) {
            int32_t sum;
            std::memcpy(&sum, tiles[sums].of[m] + 4 * r, 4);
            for (int k = 0; k < 4 * depth; k++) {
                sum += static_cast<int8_t>(tiles[x].of[m][k]) * static_cast<Weight>(tiles[weights].of[k / 4][4 * r + k % 4]);
            }
            std::memcpy(tiles[sums].of[m] + 4 * r, &sum, 4);
        }
    }
}

}  // namespace emulated

inline void _tile_storeconfig(void* to) { std::memcpy(to, &emulated::config, sizeof emulated::config); }
inline void _tile_loadconfig(const void* from) {
    std::memcpy(&emulated::config, from, sizeof emulated::config);
    std::memset(emulated::tiles, 0, sizeof emulated::tiles);
}
inline void _tile_release() { emulated::config = {}; }
inline void _tile_zero(int tile) { emulated::tiles[tile] = {}; }
inline void _tile_loadd(int tile, const void* from, int64_t stride) {
    emulated::check(emulated::config.palette == 1);
    emulated::tiles[tile] = {};
    for (int i = 0; i < emulated::config.rows[tile]; i++) {
        std::memcpy(emulated::tiles[tile].of[i], static_cast<const uint8_t*>(from) + i * stride, emulated::config.row_bytes[tile]);
    }
}
inline void _tile_stored(int tile, void* to, int64_t stride) {
    for (int i = 0; i < emulated::config.rows[tile]; i++) {
        std::memcpy(static_cast<uint8_t*>(to) + i * stride, emulated::tiles[tile].of[i], emulated::config.row_bytes[tile]);
    }
}
inline void _tile_dpbsud(int sums, int x, int weights) { emulated::multiply_tiles<uint8_t>(sums, x, weights); }
inline void _tile_dpbssd(int sums, int x, int weights) { emulated::multiply_tiles<int8_t>(sums, x, weights); }
