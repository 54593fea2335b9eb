// Products of groups of rows with a few tokens, for any instruction set: each file that includes this is compiled for
// one of them.
//
// Of each block the integer sums are exact; then one multiply-add in float, in the order of the blocks. So an element of
// the result is the same whatever the number of tokens, threads, or the instruction set.
#pragma once

#include <type_traits>
#include <utility>

#include "formats.h"
#include "simd.h"

#define UNROLL _Pragma("GCC unroll 16")

namespace cpuchat {
namespace {

// Measured: 50 to 42 ms a pass on a Xeon with AVX-512 and 4 KB; on Zen 3 a thread reads 4 to 29 % faster with 8 KB than
// with 4, by type, and without 0.6 to 0.9 as fast. Several streams are fastest with little: the CPU fetches ahead itself.
#ifdef __AVX512VNNI__
constexpr int ahead_alone = 4096;
#else
constexpr int ahead_alone = 8192;
#endif
constexpr int ahead_of_several = 1024;

template <int bytes, int G> inline void prefetch(const uint8_t* p) {
    constexpr int ahead = G > 1 ? ahead_of_several : ahead_alone;
    UNROLL for (int at = 0; at < bytes; at += 64) _mm_prefetch(reinterpret_cast<const char*>(p + ahead + at), _MM_HINT_T0);
}

// Calls `step` with each number below n as a constant.
template <int n, class Step, int... numbers> inline void each(Step step, std::integer_sequence<int, numbers...>) {
    (step(std::integral_constant<int, numbers>()), ...);
}
template <int n, class Step> inline void each(Step step) { each<n>(step, std::make_integer_sequence<int, n>()); }

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

// Four vectors of 6 bits that lie in three: the last two bits of each are those of the fourth.
template <class S> void split_sixes(const uint8_t* w, typename S::I* four) {
    using I = typename S::I;
    const I v0 = S::load(w), v1 = S::load(w + S::bytes), v2 = S::load(w + 2 * S::bytes), six = S::bytes_of(63);
    four[0] = S::bit_and(v0, six), four[1] = S::bit_and(v1, six), four[2] = S::bit_and(v2, six);
    four[3] = S::bit_or(S::bit_and(S::template shift<6>(v0), S::bytes_of(3)),
                        S::bit_or(S::bit_and(S::template shift<4>(v1), S::bytes_of(12)),
                                  S::bit_and(S::template shift<2>(v2), S::bytes_of(48))));
}

// The same of signed weights. Where products are scaled one by one, there is nothing between them and the totals.
template <class S, int T> struct SignedSums {
    typename S::I* totals;
    Sums<S, T> sums;
    explicit SignedSums(typename S::I* totals) : totals(totals) { sums.clear(); }
    void add(typename S::I weights, typename S::I scale, const int8_t* x, int64_t stride) {
        if constexpr (S::wide_sums) {
            sums.add(weights, x, stride);
        } else {
            UNROLL for (int i = 0; i < T; i++) totals[i] = S::accumulate_signed(totals[i], weights, S::broadcast(x + i * stride), scale);
        }
    }
    void end(typename S::I scale) {
        if constexpr (S::wide_sums) sums.apply_to(totals, scale);
    }
};

// The results of T tokens with each of G groups.
template <class S, int T, int G> struct Results {
    typename S::F of[G][T];
    Results() {
        for (auto& group : of) UNROLL for (int i = 0; i < T; i++) group[i] = S::zero_f();
    }
    void store(const Groups& groups, float* const* out) const {
        for (int g = 0; g < G; g++) UNROLL for (int i = 0; i < T; i++) S::store(out[i] + g * groups.rows, of[g][i]);
    }
};

template <class S, int T, bool five_bits, int G = 1>
void q45_k(const Groups& groups, const Activations& x, int64_t token, float* const* out) {
    using I = typename S::I;
    constexpr int V = S::bytes;
    const int64_t K = x.n_values, n_blocks = K / 256;
    const int8_t* quants = x.quants + token * K;
    const Block256* blocks = static_cast<const Block256*>(x.blocks) + token * n_blocks;
    const I nibble = S::bytes_of(15), fifth = S::bytes_of(16);
    Results<S, T, G> results;
    const uint8_t* first = groups.first;
    for (int64_t b = 0; b < n_blocks; b++, first += (five_bits ? 44 : 36) * V, quants += 256, blocks++) {
        for (int g = 0; g < G; g++) {
            const uint8_t* w = first + g * groups.bytes;
            typename S::F* result = results.of[g];
            prefetch<4 * V, G>(w);
            I scales[4];  // and minimums, from the third on
            split_sixes<S>(w + V, scales);
            I totals[T];
            UNROLL for (int i = 0; i < T; i++) totals[i] = S::zero();
            const uint8_t* bits = w + 4 * V;
            const uint8_t* nibbles = bits + (five_bits ? 8 * V : 0);
            auto quarter = [&](auto number) {  // 64 values: two sub-blocks of 32
                constexpr int j = decltype(number)::value;
                const I scale_low = S::template scale<2 * j % 4>(scales[j / 2]);
                const I scale_high = S::template scale<2 * j % 4 + 1>(scales[j / 2]);
                Sums<S, T> low, high;
                low.clear(), high.clear();
                UNROLL for (int t = 0; t < 8; t++) {
                    const uint8_t* at = nibbles + (8 * j + t) * V;
                    if (t * V % 64 == 0) prefetch<64, G>(at);
                    const I both = S::load(at);
                    I a = S::bit_and(both, nibble), c = S::bit_and(S::template shift<4>(both), nibble);
                    if constexpr (five_bits) {
                        if (j == 0 && t * V % 64 == 0) prefetch<64, G>(bits + t * V);
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
            each<4>(quarter);
            const typename S::F d = S::halves(w), min = S::halves(w + 2 * S::rows);
            const I words = S::dwords_of(0x00ff00ff);
            const I m[4] = {S::bit_and(scales[2], words), S::bit_and(S::template shift<8>(scales[2]), words),
                            S::bit_and(scales[3], words), S::bit_and(S::template shift<8>(scales[3]), words)};
            UNROLL for (int i = 0; i < T; i++) {
                const Block256& block = blocks[i * n_blocks];
                I sum = S::pairs(m[0], S::dwords_of(block.mins[0]));
                UNROLL for (int k = 1; k < 4; k++) sum = S::add(sum, S::pairs(m[k], S::dwords_of(block.mins[k])));
                const typename S::F dx = S::broadcast_f(block.d);
                result[i] = S::fmadd(S::to_float(totals[i]), S::mul(d, dx), result[i]);
                result[i] = S::fnmadd(S::to_float(sum), S::mul(min, dx), result[i]);
            }
        }
    }
    results.store(groups, out);
}

// Formats of 16 values a scale differ in their scales, and in how the weights of two of the four sub-blocks of a part are
// read, which are numbers `first<h>` and `second<h>`. Of Q3_K and Q2_K the second stay where they lie, 2 bits up: so all
// sums are 4 times as great, and the scales of the first.
template <class S> struct Q6K {
    using I = typename S::I;
    static constexpr int before = 4, part = 12, span = 2, offset = 5, up = 0;  // values are 32 lower than their bits
    static constexpr bool has_mins = false;
    template <int h> static constexpr int first = h;
    template <int h> static constexpr int second = h + 2;
    static void scales(const uint8_t* w, I* four, I*) {
        UNROLL for (int p = 0; p < 4; p++) four[p] = S::load(w + p * S::bytes);
    }
    template <int h, int t> static void weights(const uint8_t* w, I* a, I* c) {
        const I nibble = S::bytes_of(15), upper = S::bytes_of(48);
        const I both = S::load(w + (3 * t + h) * S::bytes), bits = S::load(w + (3 * t + 2) * S::bytes);
        *a = S::bit_or(S::bit_and(both, nibble), S::bit_and(S::template shift<2 * h - 4>(bits), upper));
        *c = S::bit_or(S::bit_and(S::template shift<4>(both), nibble), S::bit_and(S::template shift<2 * h>(bits), upper));
    }
};

template <class S> struct Q3K {
    using I = typename S::I;
    static constexpr int before = 3, part = 6, span = 4, offset = 4, up = 2;  // 4 lower, 4 times
    static constexpr bool has_mins = false;
    template <int h> static constexpr int first = 2 * h;
    template <int h> static constexpr int second = 2 * h + 1;
    static void scales(const uint8_t* w, I* four, I*) {
        split_sixes<S>(w, four);
        UNROLL for (int p = 0; p < 4; p++) four[p] = S::sub_bytes(four[p], S::bytes_of(32));
    }
    template <int h, int t> static void weights(const uint8_t* w, I* a, I* c) {
        constexpr int bit = t % 2 * 4 + 2 * h;
        const I third = S::load(w + t / 2 * S::bytes), two = S::template shift<4 * h>(S::load(w + (2 + t) * S::bytes));
        *a = S::bit_or(S::bit_and(two, S::bytes_of(3)), S::bit_and(S::template shift<bit - 2>(third), S::bytes_of(4)));
        *c = S::bit_or(S::bit_and(two, S::bytes_of(12)), S::bit_and(S::template shift<bit + 1 - 4>(third), S::bytes_of(16)));
    }
};

template <class S> struct Q2K {
    using I = typename S::I;
    static constexpr int before = 4, part = 4, span = 4, offset = 0, up = 2;
    static constexpr bool has_mins = true;
    template <int h> static constexpr int first = 2 * h;
    template <int h> static constexpr int second = 2 * h + 1;
    static void scales(const uint8_t* w, I* four, I* mins) {
        UNROLL for (int p = 0; p < 4; p++) {
            const I both = S::load(w + p * S::bytes);
            four[p] = S::bit_and(both, S::bytes_of(15)), mins[p] = S::bit_and(S::template shift<4>(both), S::bytes_of(15));
        }
    }
    template <int h, int t> static void weights(const uint8_t* w, I* a, I* c) {
        const I two = S::template shift<4 * h>(S::load(w + t * S::bytes));
        *a = S::bit_and(two, S::bytes_of(3)), *c = S::bit_and(two, S::bytes_of(12));
    }
};

// Scales of sub-blocks times the sums of their activations.
template <class S, int T>
void scaled_sums(const typename S::I* scales, int shift, const Block256* blocks, int64_t n_blocks, typename S::I* sums) {
    UNROLL for (int i = 0; i < T; i++) sums[i] = S::zero();
    UNROLL for (int p = 0; p < 4; p++) {
        const typename S::I even = S::shift_words_left(S::even_words(scales[p]), shift);
        const typename S::I odd = S::shift_words_left(S::odd_words(scales[p]), shift);
        UNROLL for (int i = 0; i < T; i++) {
            const int32_t* offsets = blocks[i * n_blocks].offsets + 2 * p;
            sums[i] = S::add(sums[i], S::pairs(even, S::dwords_of(offsets[0])));
            sums[i] = S::add(sums[i], S::pairs(odd, S::dwords_of(offsets[1])));
        }
    }
}

template <class S, int T, class Weights, int G = 1>
void q236_k(const Groups& groups, const Activations& x, int64_t token, float* const* out) {
    using I = typename S::I;
    constexpr int V = S::bytes, block_bytes = (Weights::before + 4 * Weights::part) * V;
    const int64_t K = x.n_values, n_blocks = K / 256;
    const int8_t* quants = x.quants + token * K;
    const Block256* blocks = static_cast<const Block256*>(x.blocks) + token * n_blocks;
    Results<S, T, G> results;
    const uint8_t *first = groups.first, *first_ds = first + n_blocks * block_bytes;
    for (int64_t b = 0; b < n_blocks; b++, first += block_bytes, quants += 256, blocks++) {
        for (int g = 0; g < G; g++) {
            const uint8_t *w = first + g * groups.bytes, *ds = first_ds + g * groups.bytes;
            typename S::F* result = results.of[g];
            I totals[T], sums[T], scales[4], mins[4];
            UNROLL for (int i = 0; i < T; i++) totals[i] = S::zero();
            prefetch<Weights::before * V, G>(w);
            Weights::scales(w, scales, mins);
            for (int p = 0; p < 4; p++) {
                const uint8_t* at = w + (Weights::before + p * Weights::part) * V;
                const int8_t* xp = quants + 128 * (p / 2) + 16 * (p % 2);
                prefetch<Weights::part * V, G>(at);
                auto half = [&](auto number) {
                    constexpr int h = decltype(number)::value, i = Weights::template first<h>, j = Weights::template second<h>;
                    const I scale_low = S::template scale<i, Weights::up>(scales[p]), scale_high = S::template scale<j>(scales[p]);
                    Sums<S, T> low, high;
                    low.clear(), high.clear();
                    auto step = [&](auto number) {
                        constexpr int t = decltype(number)::value;
                        I a, c;
                        Weights::template weights<h, t>(at, &a, &c);
                        low.add(a, xp + 32 * i + 4 * t, K), high.add(c, xp + 32 * j + 4 * t, K);
                        if (!S::wide_sums && t % Weights::span == Weights::span - 1 && t < 3) {  // as many as fit into 16 bits
                            low.apply_to(totals, scale_low), high.apply_to(totals, scale_high);
                            low.clear(), high.clear();
                        }
                    };
                    each<4>(step);
                    low.apply_to(totals, scale_low), high.apply_to(totals, scale_high);
                };
                each<2>(half);
            }
            scaled_sums<S, T>(Weights::has_mins ? mins : scales, Weights::offset, blocks, n_blocks, sums);
            const typename S::F d = S::halves(ds);
            UNROLL for (int i = 0; i < T; i++) {
                const float dx = blocks[i * n_blocks].d;
                const I total = Weights::has_mins ? totals[i] : S::sub(totals[i], sums[i]);
                result[i] = S::fmadd(S::to_float(total), S::mul(d, S::broadcast_f(dx / (1 << Weights::up))), result[i]);
                if constexpr (Weights::has_mins) {
                    const typename S::F min = S::halves(ds + 2 * S::rows);
                    result[i] = S::fnmadd(S::to_float(sums[i]), S::mul(min, S::broadcast_f(dx)), result[i]);
                }
            }
        }
        first_ds += (Weights::has_mins ? 4 : 2) * S::rows;
    }
    results.store(groups, out);
}

// The values of a nibble of IQ4_NL and IQ4_XS, and of MXFP4, of which those are 12 higher.
constexpr int8_t iq4_values[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t mxfp4_values[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <class S> inline void iq4_xs_scales(const uint8_t* w, typename S::I* scales) {
    using I = typename S::I;
    const I high = S::twice(w + 2 * S::rows), low = S::load(w + S::bytes), nibble = S::bytes_of(15);
    const I near = S::dwords_of(0x00003030), far = S::dwords_of(0x30300000), bias = S::bytes_of(32);
    const I first = S::bit_or(S::bit_and(high, near), S::bit_and(S::template shift<-4>(high), far));
    const I second = S::bit_or(S::bit_and(S::template shift<2>(high), near), S::bit_and(S::template shift<-2>(high), far));
    scales[0] = S::sub_bytes(S::bit_or(S::bit_and(low, nibble), first), bias);
    scales[1] = S::sub_bytes(S::bit_or(S::bit_and(S::template shift<4>(low), nibble), second), bias);
}

template <class S, int T, int G = 1>
void iq4_xs(const Groups& groups, const Activations& x, int64_t token, float* const* out) {
    using I = typename S::I;
    constexpr int V = S::bytes;
    const int64_t K = x.n_values, n_blocks = K / 256;
    const int8_t* quants = x.quants + token * K;
    const Block256* blocks = static_cast<const Block256*>(x.blocks) + token * n_blocks;
    const I nibble = S::bytes_of(15), values = S::signed_weights(S::table(iq4_values));
    Results<S, T, G> results;
    const uint8_t* first = groups.first;
    for (int64_t b = 0; b < n_blocks; b++, first += 34 * V, quants += 256, blocks++) {
        for (int g = 0; g < G; g++) {
            const uint8_t* w = first + g * groups.bytes;
            typename S::F* result = results.of[g];
            prefetch<2 * V, G>(w);
            I scales[2];
            iq4_xs_scales<S>(w, scales);
            I totals[T];
            UNROLL for (int i = 0; i < T; i++) totals[i] = S::zero();
            auto eighth = [&](auto number) {
                constexpr int j = decltype(number)::value;
                const uint8_t* at = w + (2 + 4 * j) * V;
                const I scale = S::template scale<j % 4>(scales[j / 4]);
                prefetch<4 * V, G>(at);
                SignedSums<S, T> sums(totals);
                UNROLL for (int t = 0; t < 4; t++) {
                    const I both = S::load(at + t * V);
                    sums.add(S::lookup(values, S::bit_and(both, nibble)), scale, quants + 32 * j + 4 * t, K);
                    sums.add(S::lookup(values, S::bit_and(S::template shift<4>(both), nibble)), scale, quants + 32 * j + 16 + 4 * t, K);
                }
                sums.end(scale);
            };
            each<8>(eighth);
            const typename S::F d = S::halves(w);
            UNROLL for (int i = 0; i < T; i++) {
                const Block256& block = blocks[i * n_blocks];
                if constexpr (S::wide_sums) {  // whose weights are 128 higher
                    UNROLL for (int k = 0; k < 4; k++) {
                        const I words = k % 2 ? S::odd_words(scales[k / 2]) : S::even_words(scales[k / 2]);
                        totals[i] = S::sub(totals[i], S::pairs(S::shift_words_left(words, 7), S::dwords_of(block.mins[k])));
                    }
                }
                result[i] = S::fmadd(S::to_float(totals[i]), S::mul(d, S::broadcast_f(block.d)), result[i]);
            }
        }
    }
    results.store(groups, out);
}

// Formats of 32 values a block differ in how a block's weights are read, what is subtracted from them, and in scales.
template <class S> struct OneScale {
    static constexpr int behind = 2;  // bytes of a row that lie behind all blocks
    static typename S::F scale(const uint8_t* p) { return S::halves(p); }
};

template <class S> struct Q8 : OneScale<S> {
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

template <class S> struct Iq4Nl : OneScale<S> {
    static constexpr int vectors = 4;
    template <int T> static void sum(const uint8_t* w, const int8_t* x, int64_t K, const Block32* const* blocks, typename S::I* totals) {
        using I = typename S::I;
        const I nibble = S::bytes_of(15), values = S::signed_weights(S::table(iq4_values));
        UNROLL for (int i = 0; i < T; i++) totals[i] = S::signed_start(blocks[i]->sum);
        UNROLL for (int t = 0; t < 4; t++) {
            const I both = S::load(w + t * S::bytes);
            const I a = S::lookup(values, S::bit_and(both, nibble));
            const I c = S::lookup(values, S::bit_and(S::template shift<4>(both), nibble));
            UNROLL for (int i = 0; i < T; i++) {
                totals[i] = S::accumulate_signed(totals[i], a, S::broadcast(x + i * K + 4 * t));
                totals[i] = S::accumulate_signed(totals[i], c, S::broadcast(x + i * K + 16 + 4 * t));
            }
        }
    }
};

// Nibbles, with fifth bits or not, whose values are lower by `offset`.
template <class S, bool five_bits, int offset> struct Q45 : OneScale<S> {
    static constexpr int vectors = five_bits ? 5 : 4;
    static typename S::I value(typename S::I bits) { return bits; }
    template <int T, class Value = Q45>
    static void sum(const uint8_t* w, const int8_t* x, int64_t K, const Block32* const* blocks, typename S::I* totals) {
        using I = typename S::I;
        const I nibble = S::bytes_of(15), fifth = S::bytes_of(16);
        const I bits = five_bits ? S::load(w) : S::zero();
        const uint8_t* nibbles = w + (five_bits ? S::bytes : 0);
        Sums<S, T> low, high;
        low.clear(), high.clear();
        auto step = [&](auto number) {
            constexpr int t = decltype(number)::value;
            const I both = S::load(nibbles + t * S::bytes);
            I a = Value::value(S::bit_and(both, nibble)), c = Value::value(S::bit_and(S::template shift<4>(both), nibble));
            if constexpr (five_bits) {
                a = S::bit_or(a, S::bit_and(S::template shift<t - 4>(bits), fifth));
                c = S::bit_or(c, S::bit_and(S::template shift<t>(bits), fifth));
            }
            low.add(a, x + 4 * t, K), high.add(c, x + 16 + 4 * t, K);
        };
        each<4>(step);
        UNROLL for (int i = 0; i < T; i++) {
            const I sum = S::add(S::total_of(low.of[i]), S::total_of(high.of[i]));
            totals[i] = S::sub(sum, S::dwords_of(offset * blocks[i]->sum));
        }
    }
};
template <class S, bool five_bits> struct WithMin : Q45<S, five_bits, 0> {
    static constexpr int behind = 4;
};
template <class S> struct Mxfp4 : Q45<S, false, 12> {
    static constexpr int behind = 1;
    static typename S::F scale(const uint8_t* p) { return S::half_powers(p); }
    static typename S::I value(typename S::I bits) { return S::lookup(S::table(mxfp4_values), bits); }
    template <int T> static void sum(const uint8_t* w, const int8_t* x, int64_t K, const Block32* const* blocks, typename S::I* totals) {
        Q45<S, false, 12>::template sum<T, Mxfp4>(w, x, K, blocks, totals);
    }
};

template <class S, int T, class Weights, int G = 1>
void small_blocks(const Groups& groups, const Activations& x, int64_t token, float* const* out) {
    constexpr int bytes = Weights::vectors * S::bytes;
    const int64_t K = x.n_values, n_blocks = K / 32;
    const int8_t* quants = x.quants + token * K;
    const Block32* blocks[T];
    UNROLL for (int i = 0; i < T; i++) blocks[i] = static_cast<const Block32*>(x.blocks) + (token + i) * n_blocks;
    Results<S, T, G> results;
    const uint8_t *first = groups.first, *first_ds = first + n_blocks * bytes;
    for (int64_t b = 0; b < n_blocks; b++, quants += 32, first += bytes, first_ds += Weights::behind * S::rows) {
        for (int g = 0; g < G; g++) {
            const uint8_t *w = first + g * groups.bytes, *ds = first_ds + g * groups.bytes;
            typename S::F* result = results.of[g];
            prefetch<bytes, G>(w);
            typename S::I totals[T];
            Weights::template sum<T>(w, quants, K, blocks, totals);
            const typename S::F d = Weights::scale(ds);
            UNROLL for (int i = 0; i < T; i++) {
                result[i] = S::fmadd(S::to_float(totals[i]), S::mul(d, S::broadcast_f(blocks[i]->d)), result[i]);
                if constexpr (Weights::behind == 4) {
                    const typename S::F dx = S::broadcast_f(blocks[i]->d), sum = S::to_float(S::dwords_of(blocks[i]->sum));
                    result[i] = S::fmadd(sum, S::mul(S::halves(ds + 2 * S::rows), dx), result[i]);
                }
            }
        }
        UNROLL for (int i = 0; i < T; i++) blocks[i]++;
    }
    results.store(groups, out);
}

template <class S, int T> constexpr void fill(Products& table) {
    auto set = [&](Format format, Product product) { table.of[static_cast<int>(format)][T] = product; };
    set(Format::q4_k, q45_k<S, T, false>);
    set(Format::q5_k, q45_k<S, T, true>);
    set(Format::q6_k, q236_k<S, T, Q6K<S>>);
    set(Format::q3_k, q236_k<S, T, Q3K<S>>);
    set(Format::q2_k, q236_k<S, T, Q2K<S>>);
    set(Format::iq4_xs, iq4_xs<S, T>);
    set(Format::q8_0, small_blocks<S, T, Q8<S>>);
    set(Format::q4_0, small_blocks<S, T, Q45<S, false, 8>>);
    set(Format::q5_0, small_blocks<S, T, Q45<S, true, 16>>);
    set(Format::q4_1, small_blocks<S, T, WithMin<S, false>>);
    set(Format::q5_1, small_blocks<S, T, WithMin<S, true>>);
    set(Format::iq4_nl, small_blocks<S, T, Iq4Nl<S>>);
    set(Format::mxfp4, small_blocks<S, T, Mxfp4<S>>);
    if constexpr (T > 1) fill<S, T - 1>(table);
}

template <class S> constexpr void fill_several(Products& table) {
    auto set = [&](Format format, Product product) { table.several[static_cast<int>(format)] = product; };
    constexpr int G = most_groups;
    set(Format::q4_k, q45_k<S, 1, false, G>);
    set(Format::q8_0, small_blocks<S, 1, Q8<S>, G>);
    set(Format::q4_0, small_blocks<S, 1, Q45<S, false, 8>, G>);
    set(Format::q5_0, small_blocks<S, 1, Q45<S, true, 16>, G>);
    set(Format::q4_1, small_blocks<S, 1, WithMin<S, false>, G>);
    set(Format::q5_1, small_blocks<S, 1, WithMin<S, true>, G>);
}

template <class S> constexpr Products all_products(const char* name) {
    Products table{name, S::rows, S::tile, {}, {}, {}};
    fill<S, S::tile>(table), fill_several<S>(table);
    return table;
}

}  // namespace
}  // namespace cpuchat
