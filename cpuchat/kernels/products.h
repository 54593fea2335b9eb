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

// Several streams are fastest with little: the CPU fetches ahead itself.
constexpr int ahead_of_several = 1024;

template <int bytes, int G> inline void prefetch(const uint8_t* p) {
    const int ahead = G > 1 ? ahead_of_several : ahead_alone;
    UNROLL for (int at = 0; at < bytes; at += 64) _mm_prefetch(reinterpret_cast<const char*>(p + ahead + at), _MM_HINT_T0);
}

// Calls `step` with each number below n as a constant.
template <int n, class Step, int... numbers> inline void each(Step step, std::integer_sequence<int, numbers...>) {
    (step(std::integral_constant<int, numbers>()), ...);
}
template <int n, class Step> inline void each(Step step) { each<n>(step, std::make_integer_sequence<int, n>()); }

// The sums of T tokens with one kind of weights (a nibble, say), until they are scaled.
template <class S, int T> struct Sums {
    using I = typename S::I;
    I of[T];
    Sums() { clear(); }
    void clear() { UNROLL for (int i = 0; i < T; i++) of[i] = I{}; }
    void add(I weights, const int8_t* x, int64_t stride) {
        UNROLL for (int i = 0; i < T; i++) of[i] = S::accumulate(of[i], weights, S::broadcast(x + i * stride));
    }
    void move_to(I* totals, I scale) {
        UNROLL for (int i = 0; i < T; i++) totals[i] = S::apply(totals[i], of[i], scale);
        clear();
    }
};

template <class S, int T, class... Scale>
inline void add_signed(typename S::I* totals, typename S::I weights, const int8_t* x, int64_t stride, Scale... scale) {
    UNROLL for (int i = 0; i < T; i++) totals[i] = S::accumulate_signed(totals[i], weights, S::broadcast(x + i * stride), scale...);
}

// The results of T tokens with each of G groups.
template <class S, int T, int G> struct Results {
    typename S::F of[G][T];
    Results() {
        for (auto& group : of) UNROLL for (int i = 0; i < T; i++) group[i] = typename S::F{};
    }
    void store(const Groups& groups, float* const* out) const {
        for (int g = 0; g < G; g++) UNROLL for (int i = 0; i < T; i++) S::store(out[i] + g * groups.rows, of[g][i]);
    }
};

// Low and high nibbles with their fifth bits: those of the numbers `first` and `second` of each byte.
template <class S, int first, int second> inline typename S::Two with_fifths(typename S::Two nibbles, typename S::I bits) {
    const typename S::I fifth = S::bytes_of(16);
    return {nibbles.low | (S::template shift<first - 4>(bits) & fifth),
            nibbles.high | (S::template shift<second - 4>(bits) & fifth)};
}

// Four vectors of 6 bits that lie in three: the last two bits of each are those of the fourth.
template <class S> inline void split_sixes(const uint8_t* w, typename S::I* four) {
    const typename S::I v0 = S::load(w), v1 = S::load(w + S::bytes), v2 = S::load(w + 2 * S::bytes), six = S::bytes_of(63);
    four[0] = v0 & six, four[1] = v1 & six, four[2] = v2 & six;
    four[3] = (S::template shift<6>(v0) & S::bytes_of(3)) | (S::template shift<4>(v1) & S::bytes_of(12)) |
              (S::template shift<2>(v2) & S::bytes_of(48));
}

// Blocks of 256 activations of tokens.
struct Columns {
    const int8_t* quants;
    int64_t stride;
    const Block256* blocks;
    int64_t n_blocks;
    const Block256& block(int token) const { return blocks[token * n_blocks]; }
};

// The bytes of n vectors, 1 << shift times, times the sums of activations that they belong to: of 32 where a block has two
// such vectors, of 16 where it has four.
template <class S, int T, int n, int shift>
inline void scaled_sums(const typename S::I* vectors, const Columns& x, typename S::I* sums) {
    using I = typename S::I;
    UNROLL for (int i = 0; i < T; i++) sums[i] = I{};
    UNROLL for (int v = 0; v < n; v++) {
        const I even = S::template shift<-shift>(S::even_words(vectors[v]));
        const I odd = S::template shift<-shift>(S::odd_words(vectors[v]));
        UNROLL for (int i = 0; i < T; i++) {
            const int32_t* of_x = (n == 2 ? x.block(i).mins : x.block(i).offsets) + 2 * v;
            sums[i] += S::pairs(even, S::dwords_of(of_x[0]));
            sums[i] += S::pairs(odd, S::dwords_of(of_x[1]));
        }
    }
}

// Formats of 256 values a block differ in how its vectors of weights, two kinds at a time, and its scales are read: in
// `sum`, the sums of a block with T tokens, which are those of 1 << `up` times the weights, and those of its minimums.
template <class S, bool five_bits> struct Q45K {
    using I = typename S::I;
    static constexpr int vectors = five_bits ? 44 : 36, behind = 0, up = 0;
    static constexpr bool has_mins = true;

    static void scales(const uint8_t* w, I* two, I* mins) {
        I four[4];
        split_sixes<S>(w + S::bytes, four);
        two[0] = four[0], two[1] = four[1], mins[0] = four[2], mins[1] = four[3];
    }
    // Vector t of the sub-blocks 2 j and 2 j + 1.
    template <int j> static typename S::Two weights(const uint8_t* w, int t) {
        const typename S::Two two = S::nibbles(S::load(w + (vectors - 32 + 8 * j + t) * S::bytes));
        if constexpr (five_bits) return with_fifths<S, 2 * j, 2 * j + 1>(two, S::load(w + (4 + t) * S::bytes));
        else return two;
    }
    template <int T, int G> static void sum(const uint8_t* w, const Columns& x, I* totals, I* sums_of_mins) {
        I two[2], mins[2];
        prefetch<4 * S::bytes, G>(w);
        scales(w, two, mins);
        auto quarter = [&](auto number) {
            constexpr int j = decltype(number)::value;
            const I scale_low = S::template scale<2 * j % 4>(two[j / 2]);
            const I scale_high = S::template scale<2 * j % 4 + 1>(two[j / 2]);
            const int8_t* quants = x.quants + 64 * j;
            Sums<S, T> low, high;
            UNROLL for (int t = 0; t < 8; t++) {
                if (t * S::bytes % 64 == 0) prefetch<64, G>(w + (vectors - 32 + 8 * j + t) * S::bytes);
                const auto [a, c] = weights<j>(w, t);
                if (five_bits && j == 0 && t * S::bytes % 64 == 0) prefetch<64, G>(w + (4 + t) * S::bytes);
                low.add(a, quants + 4 * t, x.stride), high.add(c, quants + 32 + 4 * t, x.stride);
                if (five_bits && !S::wide_sums && t == 3) {  // 4 × 2 × 31 × 127 fit into 16 bits
                    low.move_to(totals, scale_low), high.move_to(totals, scale_high);
                }
            }
            low.move_to(totals, scale_low), high.move_to(totals, scale_high);
        };
        each<4>(quarter);
        scaled_sums<S, T, 2, 0>(mins, x, sums_of_mins);
    }
};

// Those with 16 values a scale differ in their scales, and in how the weights of two of the four sub-blocks of a part are
// read, which are numbers `first<h>` and `second<h>`. Of Q3_K and Q2_K the second stay where they lie, 2 bits up: so all
// sums are 4 times as great, and the scales of the first.
template <class S> struct Q6K {
    using I = typename S::I;
    static constexpr int before = 4, part = 12, behind = 2, span = 2, offset = 5, up = 0;  // values are 32 lower than their bits
    static constexpr bool has_mins = false;
    template <int h> static constexpr int first = h;
    template <int h> static constexpr int second = h + 2;
    static void scales(const uint8_t* w, I* four, I*) {
        UNROLL for (int p = 0; p < 4; p++) four[p] = S::load(w + p * S::bytes);
    }
    template <int h, int t> static typename S::Two weights(const uint8_t* w) {
        const I upper = S::bytes_of(48), bits = S::load(w + (3 * t + 2) * S::bytes);
        const auto [low, high] = S::nibbles(S::load(w + (3 * t + h) * S::bytes));
        return {low | (S::template shift<2 * h - 4>(bits) & upper), high | (S::template shift<2 * h>(bits) & upper)};
    }
};

struct TwoBits {
    static constexpr int span = 4, up = 2;
    template <int h> static constexpr int first = 2 * h;
    template <int h> static constexpr int second = 2 * h + 1;
};

template <class S> struct Q3K : TwoBits {
    using I = typename S::I;
    static constexpr int before = 3, part = 6, behind = 2, offset = 4;  // 4 lower, 4 times
    static constexpr bool has_mins = false;
    static void scales(const uint8_t* w, I* four, I*) {
        split_sixes<S>(w, four);
        UNROLL for (int p = 0; p < 4; p++) four[p] = S::sub_bytes(four[p], S::bytes_of(32));
    }
    template <int h, int t> static typename S::Two weights(const uint8_t* w) {
        constexpr int bit = t % 2 * 4 + 2 * h;
        const I third = S::load(w + t / 2 * S::bytes), two = S::template shift<4 * h>(S::load(w + (2 + t) * S::bytes));
        return {(two & S::bytes_of(3)) | (S::template shift<bit - 2>(third) & S::bytes_of(4)),
                (two & S::bytes_of(12)) | (S::template shift<bit + 1 - 4>(third) & S::bytes_of(16))};
    }
};

template <class S> struct Q2K : TwoBits {
    using I = typename S::I;
    static constexpr int before = 4, part = 4, behind = 4, offset = 0;
    static constexpr bool has_mins = true;
    static void scales(const uint8_t* w, I* four, I* mins) {
        UNROLL for (int p = 0; p < 4; p++) {
            const auto [low, high] = S::nibbles(S::load(w + p * S::bytes));
            four[p] = low, mins[p] = high;
        }
    }
    template <int h, int t> static typename S::Two weights(const uint8_t* w) {
        const I two = S::template shift<4 * h>(S::load(w + t * S::bytes));
        return {two & S::bytes_of(3), two & S::bytes_of(12)};
    }
};

template <class S, template <class> class Packing> struct Q236K : Packing<S> {
    using I = typename S::I;
    using P = Packing<S>;
    static constexpr int vectors = P::before + 4 * P::part;

    template <int T, int G> static void sum(const uint8_t* w, const Columns& x, I* totals, I* sums) {
        I four[4], mins[4];
        prefetch<P::before * S::bytes, G>(w);
        P::scales(w, four, mins);
        for (int p = 0; p < 4; p++) {
            const uint8_t* at = w + (P::before + p * P::part) * S::bytes;
            const int8_t* quants = x.quants + 128 * (p / 2) + 16 * (p % 2);
            prefetch<P::part * S::bytes, G>(at);
            auto half = [&](auto number) {
                constexpr int h = decltype(number)::value, i = P::template first<h>, j = P::template second<h>;
                const I scale_low = S::template scale<i, P::up>(four[p]), scale_high = S::template scale<j>(four[p]);
                Sums<S, T> low, high;
                auto step = [&](auto number) {
                    constexpr int t = decltype(number)::value;
                    const auto [a, c] = P::template weights<h, t>(at);
                    low.add(a, quants + 32 * i + 4 * t, x.stride), high.add(c, quants + 32 * j + 4 * t, x.stride);
                    if (!S::wide_sums && t % P::span == P::span - 1 && t < 3) {  // as many as fit into 16 bits
                        low.move_to(totals, scale_low), high.move_to(totals, scale_high);
                    }
                };
                each<4>(step);
                low.move_to(totals, scale_low), high.move_to(totals, scale_high);
            };
            each<2>(half);
        }
        scaled_sums<S, T, 4, P::offset>(P::has_mins ? mins : four, x, sums);
        UNROLL for (int i = 0; i < T && !P::has_mins; i++) totals[i] -= sums[i];
    }
};

// The values of a nibble of IQ4_NL and IQ4_XS, and of MXFP4, of which those are 12 higher.
constexpr int8_t iq4_values[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t mxfp4_values[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <class S> struct Iq4Xs {
    using I = typename S::I;
    static constexpr int vectors = 34, behind = 0, up = 0;
    static constexpr bool has_mins = false;

    static void scales(const uint8_t* w, I* two) {
        const I bits = S::twice(w + 2 * S::rows), near = S::dwords_of(0x00003030), far = S::dwords_of(0x30300000);
        const auto [low, high] = S::nibbles(S::load(w + S::bytes));
        const I first = (bits & near) | (S::template shift<-4>(bits) & far);
        const I second = (S::template shift<2>(bits) & near) | (S::template shift<-2>(bits) & far);
        two[0] = S::sub_bytes(low | first, S::bytes_of(32)), two[1] = S::sub_bytes(high | second, S::bytes_of(32));
    }
    // Vector t of the first and the second half of sub-block j.
    static typename S::Two weights(const uint8_t* w, int j, int t) {
        const I values = S::signed_weights(S::table(iq4_values));
        const auto [low, high] = S::nibbles(S::load(w + (2 + 4 * j + t) * S::bytes));
        return {S::lookup(values, low), S::lookup(values, high)};
    }
    template <int T, int G> static void sum(const uint8_t* w, const Columns& x, I* totals, I* sums) {
        I two[2];
        prefetch<2 * S::bytes, G>(w);
        scales(w, two);
        auto eighth = [&](auto number) {
            constexpr int j = decltype(number)::value;
            const I scale = S::template scale<j % 4>(two[j / 4]);
            const int8_t* quants = x.quants + 32 * j;
            prefetch<4 * S::bytes, G>(w + (2 + 4 * j) * S::bytes);
            Sums<S, T> of_both;
            UNROLL for (int t = 0; t < 4; t++) {
                const auto [a, c] = weights(w, j, t);
                if constexpr (S::wide_sums) {
                    of_both.add(a, quants + 4 * t, x.stride), of_both.add(c, quants + 16 + 4 * t, x.stride);
                } else {  // products are scaled one by one
                    add_signed<S, T>(totals, a, quants + 4 * t, x.stride, scale);
                    add_signed<S, T>(totals, c, quants + 16 + 4 * t, x.stride, scale);
                }
            }
            if constexpr (S::wide_sums) of_both.move_to(totals, scale);
        };
        each<8>(eighth);
        if constexpr (S::wide_sums) {  // whose weights are 128 higher
            scaled_sums<S, T, 2, 7>(two, x, sums);
            UNROLL for (int i = 0; i < T; i++) totals[i] -= sums[i];
        }
    }
};

template <class S, int T, class Weights, int G = 1>
void blocks_of_256(const Groups& groups, const Activations& x, int64_t token, float* const* out) {
    using F = typename S::F;
    constexpr int bytes = Weights::vectors * S::bytes, behind = Weights::behind * S::rows;
    const int64_t n_blocks = x.n_values / 256;
    Columns columns{x.quants + token * x.n_values, x.n_values, static_cast<const Block256*>(x.blocks) + token * n_blocks, n_blocks};
    Results<S, T, G> results;
    const uint8_t *first = groups.first, *first_ds = behind ? first + n_blocks * bytes : first;
    for (int64_t b = 0; b < n_blocks; b++, first += bytes, first_ds += behind ? behind : bytes) {
        for (int g = 0; g < G; g++) {
            const uint8_t *w = first + g * groups.bytes, *ds = first_ds + g * groups.bytes;
            F* result = results.of[g];
            typename S::I totals[T], sums_of_mins[T];
            UNROLL for (int i = 0; i < T; i++) totals[i] = typename S::I{};
            Weights::template sum<T, G>(w, columns, totals, sums_of_mins);
            const F d = S::halves(ds);
            UNROLL for (int i = 0; i < T; i++) {
                const float dx = columns.block(i).d;
                result[i] = S::fmadd(S::to_float(totals[i]), d * S::broadcast_f(dx / (1 << Weights::up)), result[i]);
                if constexpr (Weights::has_mins) {
                    const F min = S::halves(ds + 2 * S::rows);
                    result[i] = S::fnmadd(S::to_float(sums_of_mins[i]), min * S::broadcast_f(dx), result[i]);
                }
            }
        }
        columns.quants += 256, columns.blocks++;
    }
    results.store(groups, out);
}

// Formats of 32 values a block: signed bytes, as they are or by nibbles; or nibbles, with fifth bits or not, whose values
// are lower by `offset`. `behind` are the bytes of a row that lie behind all blocks.
template <class S> struct Q8 {
    using I = typename S::I;
    static constexpr int vectors = 8, behind = 2;
    template <int T> static void sum(const uint8_t* w, const int8_t* x, int64_t stride, const Block32* const* blocks, I* totals) {
        UNROLL for (int i = 0; i < T; i++) totals[i] = S::signed_start(blocks[i]->sum);
        UNROLL for (int t = 0; t < 8; t++) {
            add_signed<S, T>(totals, S::signed_weights(S::load(w + t * S::bytes)), x + 4 * t, stride);
        }
    }
};

// The values 4 t ... + 3 and those 16 later: nibbles with their fifth bits, or what they stand for.
template <class S, class Weights, int t> inline typename S::Two bytes_of_nibbles(const uint8_t* w) {
    const typename S::Two two = S::nibbles(S::load(w + (Weights::five_bits + t) * S::bytes));
    if constexpr (Weights::five_bits) return with_fifths<S, t, t + 4>(two, S::load(w));
    else if constexpr (Weights::values == nullptr) return two;
    else return {S::lookup(S::table(Weights::values), two.low), S::lookup(S::table(Weights::values), two.high)};
}

template <class S> struct Iq4Nl {
    using I = typename S::I;
    static constexpr int vectors = 4, behind = 2, offset = 0;
    static constexpr bool five_bits = false;
    static constexpr const int8_t* values = iq4_values;
    template <int T> static void sum(const uint8_t* w, const int8_t* x, int64_t stride, const Block32* const* blocks, I* totals) {
        const I table = S::signed_weights(S::table(values));
        UNROLL for (int i = 0; i < T; i++) totals[i] = S::signed_start(blocks[i]->sum);
        UNROLL for (int t = 0; t < 4; t++) {
            const auto [low, high] = S::nibbles(S::load(w + t * S::bytes));
            add_signed<S, T>(totals, S::lookup(table, low), x + 4 * t, stride);
            add_signed<S, T>(totals, S::lookup(table, high), x + 16 + 4 * t, stride);
        }
    }
};

template <class S, bool has_fifths, int lower, int n_behind = 2, const int8_t* of_nibbles = nullptr> struct Nibbles {
    using I = typename S::I;
    static constexpr int vectors = has_fifths ? 5 : 4, behind = n_behind, offset = lower;
    static constexpr bool five_bits = has_fifths;
    static constexpr const int8_t* values = of_nibbles;
    template <int T> static void sum(const uint8_t* w, const int8_t* x, int64_t stride, const Block32* const* blocks, I* totals) {
        Sums<S, T> of_low, of_high;
        auto step = [&](auto number) {
            constexpr int t = decltype(number)::value;
            const typename S::Two two = bytes_of_nibbles<S, Nibbles, t>(w);
            of_low.add(two.low, x + 4 * t, stride), of_high.add(two.high, x + 16 + 4 * t, stride);
        };
        each<4>(step);
        UNROLL for (int i = 0; i < T; i++) {
            totals[i] = S::total_of(of_low.of[i]) + S::total_of(of_high.of[i]) - S::dwords_of(offset * blocks[i]->sum);
        }
    }
};

template <class S> using Q4_0 = Nibbles<S, false, 8>;
template <class S> using Q5_0 = Nibbles<S, true, 16>;
template <class S> using Q4_1 = Nibbles<S, false, 0, 4>;
template <class S> using Q5_1 = Nibbles<S, true, 0, 4>;
template <class S> using Mxfp4 = Nibbles<S, false, 12, 1, mxfp4_values>;

template <class S, class Weights> inline typename S::F scale_of_32(const uint8_t* p) {
    if constexpr (Weights::behind == 1) return S::half_powers(p);
    else return S::halves(p);
}

template <class S, int T, class Weights, int G = 1>
void blocks_of_32(const Groups& groups, const Activations& x, int64_t token, float* const* out) {
    using F = typename S::F;
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
            F* result = results.of[g];
            prefetch<bytes, G>(w);
            typename S::I totals[T];
            Weights::template sum<T>(w, quants, K, blocks, totals);
            const F d = scale_of_32<S, Weights>(ds);
            UNROLL for (int i = 0; i < T; i++) {
                result[i] = S::fmadd(S::to_float(totals[i]), d * S::broadcast_f(blocks[i]->d), result[i]);
                if constexpr (Weights::behind == 4) {
                    const F dx = S::broadcast_f(blocks[i]->d), sum = S::to_float(S::dwords_of(blocks[i]->sum));
                    result[i] = S::fmadd(sum, S::halves(ds + 2 * S::rows) * dx, result[i]);
                }
            }
        }
        UNROLL for (int i = 0; i < T; i++) blocks[i]++;
    }
    results.store(groups, out);
}

template <class S, int T> constexpr void fill(Products& table) {
    auto set = [&](Format format, Product product) { table.of[static_cast<int>(format)][T] = product; };
    set(Format::q4_k, blocks_of_256<S, T, Q45K<S, false>>);
    set(Format::q5_k, blocks_of_256<S, T, Q45K<S, true>>);
    set(Format::q6_k, blocks_of_256<S, T, Q236K<S, Q6K>>);
    set(Format::q3_k, blocks_of_256<S, T, Q236K<S, Q3K>>);
    set(Format::q2_k, blocks_of_256<S, T, Q236K<S, Q2K>>);
    set(Format::iq4_xs, blocks_of_256<S, T, Iq4Xs<S>>);
    set(Format::q8_0, blocks_of_32<S, T, Q8<S>>);
    set(Format::q4_0, blocks_of_32<S, T, Q4_0<S>>);
    set(Format::q5_0, blocks_of_32<S, T, Q5_0<S>>);
    set(Format::q4_1, blocks_of_32<S, T, Q4_1<S>>);
    set(Format::q5_1, blocks_of_32<S, T, Q5_1<S>>);
    set(Format::iq4_nl, blocks_of_32<S, T, Iq4Nl<S>>);
    set(Format::mxfp4, blocks_of_32<S, T, Mxfp4<S>>);
    if constexpr (T > 1) fill<S, T - 1>(table);
}

template <class S> constexpr void fill_several(Products& table) {
    auto set = [&](Format format, Product product) { table.several[static_cast<int>(format)] = product; };
    constexpr int G = most_groups;
    set(Format::q4_k, blocks_of_256<S, 1, Q45K<S, false>, G>);
    set(Format::q8_0, blocks_of_32<S, 1, Q8<S>, G>);
    set(Format::q4_0, blocks_of_32<S, 1, Q4_0<S>, G>);
    set(Format::q5_0, blocks_of_32<S, 1, Q5_0<S>, G>);
    set(Format::q4_1, blocks_of_32<S, 1, Q4_1<S>, G>);
    set(Format::q5_1, blocks_of_32<S, 1, Q5_1<S>, G>);
}

template <class S> constexpr Products all_products(const char* name) {
    Products table{name, S::rows, S::tile, {}, {}, {}};
    fill<S, S::tile>(table), fill_several<S>(table);
    return table;
}

}  // namespace
}  // namespace cpuchat
