// Wide passes, such as prompts: a block of a group is unpacked once for all tokens of the pass, which spares most of what
// `products.h` does for every few tokens. The float operations and their order are the same, and so are the bits.
#pragma once

#include "products.h"

namespace cpuchat {
namespace {

// 256 values of each row of a group.
template <class S> struct Unpacked {
    using I = typename S::I;
    alignas(64) uint8_t weights[64 * S::bytes];  // unsigned; vector t holds the values 4 t ... + 3
    I scales[16];                                // of sub-blocks, as S::apply takes them
    I pairs[8];                                  // in the order of Block256::mins, or of its offsets
    typename S::F d, min;

    void set(int vector, I bytes) { S::store(weights + vector * S::bytes, bytes); }
    // Those of the sub-blocks `first`, `first + step` ..., of signed bytes.
    void set_scales(int first, int step, I four) {
        each<4>([&](auto c) { scales[first + c * step] = S::template scale<decltype(c)::value>(four); });
    }
    void set_pairs(int first, I four, int shift) {
        pairs[first] = S::shift_words_left(S::even_words(four), shift);
        pairs[first + 1] = S::shift_words_left(S::odd_words(four), shift);
    }
};

// What unpacking leaves to do: `offset` is still to be subtracted from weights, whose `n_pairs` are either that or minimums.
// As many as `per_sum` of them fit into sums of 16 bits. Scales are those of 1 << `up` times the weights.
template <class S, bool five_bits> struct UnpackQ45K {
    static constexpr int sub_block = 32, offset = 0, per_sum = five_bits ? 16 : 32, n_pairs = 4, up = 0;
    static constexpr bool has_mins = true;
    using I = typename S::I;

    static void unpack(const uint8_t* group, int64_t b, int64_t, Unpacked<S>& to) {
        constexpr int V = S::bytes;
        const uint8_t* w = group + b * (five_bits ? 44 : 36) * V;
        const uint8_t *bits = w + 4 * V, *nibbles = bits + (five_bits ? 8 * V : 0);
        I four[4];
        split_sixes<S>(w + V, four);
        to.set_scales(0, 1, four[0]), to.set_scales(4, 1, four[1]);
        to.set_pairs(0, four[2], 0), to.set_pairs(2, four[3], 0);
        to.d = S::halves(w), to.min = S::halves(w + 2 * S::rows);
        each<4>([&](auto number) {
            constexpr int j = decltype(number)::value;
            const I nibble = S::bytes_of(15), fifth = S::bytes_of(16);
            for (int t = 0; t < 8; t++) {
                const I both = S::load(nibbles + (8 * j + t) * V);
                I low = S::bit_and(both, nibble), high = S::bit_and(S::template shift<4>(both), nibble);
                if constexpr (five_bits) {
                    const I h = S::load(bits + t * V);
                    low = S::bit_or(low, S::bit_and(S::template shift<2 * j - 4>(h), fifth));
                    high = S::bit_or(high, S::bit_and(S::template shift<2 * j - 3>(h), fifth));
                }
                to.set(16 * j + t, low), to.set(16 * j + 8 + t, high);
            }
        });
    }
};

template <class S, class Weights> struct UnpackQ236K {
    static constexpr int sub_block = 16, up = Weights::up, per_sum = up ? 16 : 8, n_pairs = 8;
    static constexpr bool has_mins = Weights::has_mins;
    static constexpr int offset = has_mins ? 0 : 1 << (Weights::offset - up);
    using I = typename S::I;

    static void unpack(const uint8_t* group, int64_t b, int64_t n_blocks, Unpacked<S>& to) {
        constexpr int V = S::bytes, block_bytes = (Weights::before + 4 * Weights::part) * V;
        const uint8_t* w = group + b * block_bytes;
        const uint8_t* ds = group + n_blocks * block_bytes + b * (has_mins ? 4 : 2) * S::rows;
        I scales[4], mins[4];
        Weights::scales(w, scales, mins);
        for (int p = 0; p < 4; p++) {
            to.set_scales(8 * (p / 2) + p % 2, 2, scales[p]);
            to.set_pairs(2 * p, has_mins ? mins[p] : scales[p], Weights::offset - (has_mins ? 0 : up));
            const uint8_t* at = w + (Weights::before + p * Weights::part) * V;
            each<8>([&](auto number) {
                constexpr int t = decltype(number)::value % 4, h = decltype(number)::value / 4;
                I a, c;
                Weights::template weights<h, t>(at, &a, &c);
                const int vector = 32 * (p / 2) + 4 * (p % 2) + t;
                to.set(vector + 8 * Weights::template first<h>, a);
                to.set(vector + 8 * Weights::template second<h>, S::template shift<up>(c));
            });
        }
        to.d = S::halves(ds);
        if constexpr (has_mins) to.min = S::halves(ds + 2 * S::rows);
    }
};

// What the pairs of a block are times the sums of activations.
template <class S, class Kind> inline typename S::I sum_of_pairs(const Unpacked<S>& block, const Block256& x) {
    const int32_t* sums = Kind::n_pairs == 4 ? x.mins : x.offsets;
    typename S::I sum = S::pairs(block.pairs[0], S::dwords_of(sums[0]));
    UNROLL for (int k = 1; k < Kind::n_pairs; k++) sum = S::add(sum, S::pairs(block.pairs[k], S::dwords_of(sums[k])));
    return sum;
}

// Adds a block's products to the results of a token: their exact sum, but for minimums.
template <class S, class Kind>
inline void add_scaled(const Unpacked<S>& block, typename S::I total, const Block256& x, float* result) {
    // A power of two is in the scales that `products.h` multiplies. It matters where they are subnormal.
    const typename S::I times = S::shift_dwords_left(total, Kind::up);
    const typename S::F d = S::mul(block.d, S::broadcast_f(x.d / (1 << Kind::up)));
    typename S::F sum = S::fmadd(S::to_float(times), d, S::load_floats(result));
    if constexpr (Kind::has_mins) {
        const typename S::I mins = sum_of_pairs<S, Kind>(block, x);
        sum = S::fnmadd(S::to_float(mins), S::mul(block.min, S::broadcast_f(x.d)), sum);
    }
    S::store(result, sum);
}

// T tokens with one block.
template <class S, class Kind, int T>
void add_block(const Unpacked<S>& block, const int8_t* x, int64_t K, const Block256* blocks, int64_t n_blocks, float* results) {
    using I = typename S::I;
    I totals[T];
    UNROLL for (int i = 0; i < T; i++) totals[i] = S::zero();
    constexpr int part = S::wide_sums ? Kind::sub_block : Kind::per_sum;
    const uint8_t* w = block.weights;
    for (int at = 0; at < 256; at += part, x += part, w += part / 4 * S::bytes) {
        Sums<S, T> sums;
        sums.clear();
        UNROLL for (int t = 0; t < part / 4; t++) sums.add(S::load(w + t * S::bytes), x + 4 * t, K);
        sums.apply_to(totals, block.scales[at / Kind::sub_block]);
    }
    UNROLL for (int i = 0; i < T; i++) {
        const Block256& of_token = blocks[i * n_blocks];
        if constexpr (Kind::offset != 0) totals[i] = S::sub(totals[i], sum_of_pairs<S, Kind>(block, of_token));
        add_scaled<S, Kind>(block, totals[i], of_token, results + i * S::rows);
    }
}

template <class S, class Kind>
void wide_product(const uint8_t* group, const Activations& x, int64_t token, int n, float* const* out) {
    const int64_t K = x.n_values, n_blocks = K / 256;
    const int8_t* quants = x.quants + token * K;
    const Block256* blocks = static_cast<const Block256*>(x.blocks) + token * n_blocks;
    alignas(64) float results[wide_tile * S::rows];
    for (int i = 0; i < n; i++) S::store(results + i * S::rows, S::zero_f());
    Unpacked<S> block;
    for (int64_t b = 0; b < n_blocks; b++, quants += 256, blocks++) {
        Kind::unpack(group, b, n_blocks, block);
        auto add = [&](auto number, int i) {
            add_block<S, Kind, decltype(number)::value>(block, quants + i * K, K, blocks + i * n_blocks, n_blocks, results + i * S::rows);
        };
        int i = 0;
        for (; i + 8 <= n; i += 8) add(std::integral_constant<int, 8>(), i);
        if (n - i >= 4) add(std::integral_constant<int, 4>(), i), i += 4;
        if (n - i >= 2) add(std::integral_constant<int, 2>(), i), i += 2;
        if (n > i) add(std::integral_constant<int, 1>(), i);
    }
    for (int i = 0; i < n; i++) S::store(out[i], S::load_floats(results + i * S::rows));
}

// Q4_K gains too little (4 % with AVX2, where the others gain 16 to 41 % in cache).
template <class S> constexpr Products all_with_wide(const char* name) {
    Products table = all_products<S>(name);
    auto set = [&](Format format, WideProduct product) { table.wide.of[static_cast<int>(format)] = product; };
    table.wide.from = 4 * S::tile;
    set(Format::q5_k, wide_product<S, UnpackQ45K<S, true>>);
    set(Format::q6_k, wide_product<S, UnpackQ236K<S, Q6K<S>>>);
    set(Format::q3_k, wide_product<S, UnpackQ236K<S, Q3K<S>>>);
    set(Format::q2_k, wide_product<S, UnpackQ236K<S, Q2K<S>>>);
    return table;
}

}  // namespace
}  // namespace cpuchat
