// Products of a group of rows with a few tokens, for any instruction set: each file that includes this is compiled for
// one of them.
//
// Of each block the integer sums are exact; then one multiply-add in float, in the order of the blocks. So an element of
// the result is the same whatever the number of tokens, threads, or the instruction set.
#pragma once

#include <type_traits>

#include "formats.h"
#include "simd.h"

#define UNROLL _Pragma("GCC unroll 16")

namespace cpuchat {
namespace {

constexpr int prefetch_bytes = 4096;  // ahead; measured: 50 to 42 ms a pass on a Xeon, none slower

template <int bytes> inline void prefetch(const uint8_t* p) {
    UNROLL for (int at = 0; at < bytes; at += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(p + prefetch_bytes + at), _MM_HINT_T0);
    }
}

// The sums of T tokens with one kind of weights (a nibble, say), until they are scaled.
template <class S, int T> struct Sums {
    typename S::I of[T];
    void clear() { UNROLL for (int i = 0; i < T; i++) of[i] = S::zero(); }
    void add(typename S::I weights, const int8_t* x, int64_t stride) {
        UNROLL for (int i = 0; i < T; i++) of[i] = S::accumulate(of[i], weights, S::broadcast(x + i * stride));
    }
    void apply_to(typename S::I* totals, typename S::I scale) const {
        UNROLL for (int i = 0; i < T; i++) totals[i] = S::apply(totals[i], of[i], scale);
    }
};

template <class S, int T, bool five_bits>
void q45_k(const uint8_t* w, const Activations& x, int64_t token, float* const* out) {
    using I = typename S::I;
    constexpr int V = S::bytes;
    const int64_t K = x.n_values, n_blocks = K / 256;
    const int8_t* quants = x.quants + token * K;
    const Block256* blocks = static_cast<const Block256*>(x.blocks) + token * n_blocks;
    const I nibble = S::bytes_of(15), fifth = S::bytes_of(16);
    typename S::F result[T];
    UNROLL for (int i = 0; i < T; i++) result[i] = S::zero_f();
    for (int64_t b = 0; b < n_blocks; b++, quants += 256, blocks++) {
        prefetch<4 * V>(w);
        const I v0 = S::load(w + V), v1 = S::load(w + 2 * V), v2 = S::load(w + 3 * V);
        const I six = S::bytes_of(63);
        const I scales[2] = {S::bit_and(v0, six), S::bit_and(v1, six)};
        const I mins[2] = {
            S::bit_and(v2, six),
            S::bit_or(S::bit_and(S::template shift<6>(v0), S::bytes_of(3)),
                      S::bit_or(S::bit_and(S::template shift<4>(v1), S::bytes_of(12)),
                                S::bit_and(S::template shift<2>(v2), S::bytes_of(48)))),
        };
        I totals[T];
        UNROLL for (int i = 0; i < T; i++) totals[i] = S::zero();
        const uint8_t* bits = w + 4 * V;
        const uint8_t* nibbles = bits + (five_bits ? 8 * V : 0);
        auto quarter = [&](auto number) {  // 64 values: two sub-blocks of 32
            constexpr int j = decltype(number)::value;
            const I scale_low = S::scale(S::template unsigned_byte<2 * j % 4>(scales[j / 2]));
            const I scale_high = S::scale(S::template unsigned_byte<2 * j % 4 + 1>(scales[j / 2]));
            Sums<S, T> low, high;
            low.clear(), high.clear();
            UNROLL for (int t = 0; t < 8; t++) {
                const uint8_t* at = nibbles + (8 * j + t) * V;
                if (t * V % 64 == 0) prefetch<64>(at);
                const I both = S::load(at);
                I a = S::bit_and(both, nibble), c = S::bit_and(S::template shift<4>(both), nibble);
                if constexpr (five_bits) {
                    if (j == 0 && t * V % 64 == 0) prefetch<64>(bits + t * V);
                    const I h = S::load(bits + t * V);
                    a = S::bit_or(a, S::bit_and(S::template shift<2 * j - 4>(h), fifth));
                    c = S::bit_or(c, S::bit_and(S::template shift<2 * j - 3>(h), fifth));
                }
                low.add(a, quants + 64 * j + 4 * t, K);
                high.add(c, quants + 64 * j + 32 + 4 * t, K);
                if (five_bits && !S::wide_sums && t == 3) {  // 4 × 2 × 31 × 127 fit into 16 bits
                    low.apply_to(totals, scale_low), high.apply_to(totals, scale_high);
                    low.clear(), high.clear();
                }
            }
            low.apply_to(totals, scale_low), high.apply_to(totals, scale_high);
        };
        quarter(std::integral_constant<int, 0>()), quarter(std::integral_constant<int, 1>());
        quarter(std::integral_constant<int, 2>()), quarter(std::integral_constant<int, 3>());
        const typename S::F d = S::halves(w), min = S::halves(w + 2 * S::rows);
        const I words = S::dwords_of(0x00ff00ff);
        const I m[4] = {S::bit_and(mins[0], words), S::bit_and(S::template shift<8>(mins[0]), words),
                        S::bit_and(mins[1], words), S::bit_and(S::template shift<8>(mins[1]), words)};
        UNROLL for (int i = 0; i < T; i++) {
            const Block256& block = blocks[i * n_blocks];
            I sum = S::pairs(m[0], S::dwords_of(block.mins[0]));
            UNROLL for (int k = 1; k < 4; k++) sum = S::add(sum, S::pairs(m[k], S::dwords_of(block.mins[k])));
            const typename S::F dx = S::broadcast_f(block.d);
            result[i] = S::fmadd(S::to_float(totals[i]), S::mul(d, dx), result[i]);
            result[i] = S::fnmadd(S::to_float(sum), S::mul(min, dx), result[i]);
        }
        w = nibbles + 32 * V;
    }
    UNROLL for (int i = 0; i < T; i++) S::store(out[i], result[i]);
}

template <class S, int T> void q6_k(const uint8_t* w, const Activations& x, int64_t token, float* const* out) {
    using I = typename S::I;
    constexpr int V = S::bytes;
    const int64_t K = x.n_values, n_blocks = K / 256;
    const int8_t* quants = x.quants + token * K;
    const Block256* blocks = static_cast<const Block256*>(x.blocks) + token * n_blocks;
    const I nibble = S::bytes_of(15), upper = S::bytes_of(48);
    const uint8_t* ds = w + n_blocks * 52 * V;
    typename S::F result[T];
    UNROLL for (int i = 0; i < T; i++) result[i] = S::zero_f();
    for (int64_t b = 0; b < n_blocks; b++, quants += 256, blocks++, ds += 2 * S::rows) {
        I totals[T];
        UNROLL for (int i = 0; i < T; i++) totals[i] = S::zero();
        prefetch<4 * V>(w);
        for (int p = 0; p < 4; p++) {
            const uint8_t* at = w + (4 + 12 * p) * V;
            const int8_t* xp = quants + 128 * (p / 2) + 16 * (p % 2);
            const I four = S::load(w + p * V);  // scales
            const I even = S::shift_words_left(S::even_words(four), 5), odd = S::shift_words_left(S::odd_words(four), 5);
            UNROLL for (int i = 0; i < T; i++) {  // the values are 32 lower than their bits
                const int32_t* offsets = blocks[i * n_blocks].offsets + 2 * p;
                totals[i] = S::sub(totals[i], S::pairs(even, S::dwords_of(offsets[0])));
                totals[i] = S::sub(totals[i], S::pairs(odd, S::dwords_of(offsets[1])));
            }
            auto half = [&](auto number) {  // low nibbles of values l and l + 64, or l + 32 and l + 96
                constexpr int h = decltype(number)::value;
                const I scale_low = S::scale(S::template signed_byte<h>(four));
                const I scale_high = S::scale(S::template signed_byte<h + 2>(four));
                Sums<S, T> low, high;
                low.clear(), high.clear();
                UNROLL for (int t = 0; t < 4; t++) {
                    if (h == 0) prefetch<3 * V>(at + 3 * t * V);
                    const I both = S::load(at + (3 * t + h) * V), bits = S::load(at + (3 * t + 2) * V);
                    low.add(S::bit_or(S::bit_and(both, nibble), S::bit_and(S::template shift<2 * h - 4>(bits), upper)),
                            xp + 32 * h + 4 * t, K);
                    high.add(S::bit_or(S::bit_and(S::template shift<4>(both), nibble),
                                       S::bit_and(S::template shift<2 * h>(bits), upper)),
                             xp + 32 * h + 64 + 4 * t, K);
                    if (!S::wide_sums && t == 1) {  // 2 × 2 × 63 × 127 fit into 16 bits
                        low.apply_to(totals, scale_low), high.apply_to(totals, scale_high);
                        low.clear(), high.clear();
                    }
                }
                low.apply_to(totals, scale_low), high.apply_to(totals, scale_high);
            };
            half(std::integral_constant<int, 0>()), half(std::integral_constant<int, 1>());
        }
        const typename S::F d = S::halves(ds);
        UNROLL for (int i = 0; i < T; i++) {
            const typename S::F dx = S::broadcast_f(blocks[i * n_blocks].d);
            result[i] = S::fmadd(S::to_float(totals[i]), S::mul(d, dx), result[i]);
        }
        w += 52 * V;
    }
    UNROLL for (int i = 0; i < T; i++) S::store(out[i], result[i]);
}

// Formats of 32 values a block differ in how a block's weights are read, and in what is subtracted from them.
template <class S> struct Q8 {
    static constexpr int vectors = 8;
    template <int T> static void sum(const uint8_t* w, const int8_t* x, int64_t K, const Block32* const* blocks, typename S::I* totals) {
        UNROLL for (int i = 0; i < T; i++) totals[i] = S::signed_start(blocks[i]->sum);
        UNROLL for (int t = 0; t < 8; t++) {
            const typename S::I weights = S::signed_weights(S::load(w + t * S::bytes));
            UNROLL for (int i = 0; i < T; i++) {
                totals[i] = S::accumulate_signed(totals[i], weights, S::broadcast(x + i * K + 4 * t));
            }
        }
    }
};

template <class S, bool five_bits> struct Q45 {
    static constexpr int vectors = five_bits ? 5 : 4;
    template <int T> static void sum(const uint8_t* w, const int8_t* x, int64_t K, const Block32* const* blocks, typename S::I* totals) {
        using I = typename S::I;
        const I nibble = S::bytes_of(15), fifth = S::bytes_of(16);
        const I bits = five_bits ? S::load(w) : S::zero();
        const uint8_t* nibbles = w + (five_bits ? S::bytes : 0);
        Sums<S, T> low, high;
        low.clear(), high.clear();
        auto step = [&](auto number) {
            constexpr int t = decltype(number)::value;
            const I both = S::load(nibbles + t * S::bytes);
            I a = S::bit_and(both, nibble), c = S::bit_and(S::template shift<4>(both), nibble);
            if constexpr (five_bits) {
                a = S::bit_or(a, S::bit_and(S::template shift<t - 4>(bits), fifth));
                c = S::bit_or(c, S::bit_and(S::template shift<t>(bits), fifth));
            }
            low.add(a, x + 4 * t, K), high.add(c, x + 16 + 4 * t, K);
        };
        step(std::integral_constant<int, 0>()), step(std::integral_constant<int, 1>());
        step(std::integral_constant<int, 2>()), step(std::integral_constant<int, 3>());
        UNROLL for (int i = 0; i < T; i++) {
            const I sum = S::add(S::total_of(low.of[i]), S::total_of(high.of[i]));
            totals[i] = S::sub(sum, S::dwords_of((five_bits ? 16 : 8) * blocks[i]->sum));
        }
    }
};

template <class S, int T, class Weights>
void small_blocks(const uint8_t* w, const Activations& x, int64_t token, float* const* out) {
    constexpr int bytes = Weights::vectors * S::bytes;
    const int64_t K = x.n_values, n_blocks = K / 32;
    const int8_t* quants = x.quants + token * K;
    const Block32* blocks[T];
    UNROLL for (int i = 0; i < T; i++) blocks[i] = static_cast<const Block32*>(x.blocks) + (token + i) * n_blocks;
    const uint8_t* ds = w + n_blocks * bytes;
    typename S::F result[T];
    UNROLL for (int i = 0; i < T; i++) result[i] = S::zero_f();
    for (int64_t b = 0; b < n_blocks; b++, quants += 32, w += bytes, ds += 2 * S::rows) {
        prefetch<bytes>(w);
        typename S::I totals[T];
        Weights::template sum<T>(w, quants, K, blocks, totals);
        const typename S::F d = S::halves(ds);
        UNROLL for (int i = 0; i < T; i++) {
            result[i] = S::fmadd(S::to_float(totals[i]), S::mul(d, S::broadcast_f(blocks[i]->d)), result[i]);
            blocks[i]++;
        }
    }
    UNROLL for (int i = 0; i < T; i++) S::store(out[i], result[i]);
}

template <class S, int T> constexpr void fill(Products& table) {
    auto set = [&](Format format, Product product) { table.of[static_cast<int>(format)][T] = product; };
    set(Format::q4_k, q45_k<S, T, false>);
    set(Format::q5_k, q45_k<S, T, true>);
    set(Format::q6_k, q6_k<S, T>);
    set(Format::q8_0, small_blocks<S, T, Q8<S>>);
    set(Format::q4_0, small_blocks<S, T, Q45<S, false>>);
    set(Format::q5_0, small_blocks<S, T, Q45<S, true>>);
    if constexpr (T > 1) fill<S, T - 1>(table);
}

template <class S> constexpr Products all_products(const char* name) {
    Products table{name, S::rows, S::tile, {}};
    fill<S, S::tile>(table);
    return table;
}

}  // namespace
}  // namespace cpuchat
