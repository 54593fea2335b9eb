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
    template <int shift> void set_pairs(int first, I four) {
        pairs[first] = S::template shift<-shift>(S::even_words(four));
        pairs[first + 1] = S::template shift<-shift>(S::odd_words(four));
    }
};

// What unpacking leaves to do: `lower` is still to be subtracted from weights, whose `n_pairs` are either that or minimums.
// As many as `per_sum` of them fit into sums of 16 bits. Scales are those of 1 << `up` times the weights.
template <class S, bool five_bits> struct UnpackQ45K : Q45K<S, five_bits> {
    using Base = Q45K<S, five_bits>;
    static constexpr int sub_block = 32, lower = 0, per_sum = five_bits ? 16 : 32, n_pairs = 4;

    static void unpack(const uint8_t* w, Unpacked<S>& to) {
        typename S::I scales[2], mins[2];
        Base::scales(w, scales, mins);
        for (int i = 0; i < 2; i++) to.set_scales(4 * i, 1, scales[i]), to.template set_pairs<0>(2 * i, mins[i]);
        each<4>([&](auto number) {
            constexpr int j = decltype(number)::value;
            for (int t = 0; t < 8; t++) {
                const auto [low, high] = Base::template weights<j>(w, t);
                to.set(16 * j + t, low), to.set(16 * j + 8 + t, high);
            }
        });
    }
};

template <class S, template <class> class Packing> struct UnpackQ236K : Q236K<S, Packing> {
    using P = Packing<S>;
    static constexpr int sub_block = 16, per_sum = P::up ? 16 : 8, n_pairs = 8, lower = P::has_mins ? 0 : 1 << (P::offset - P::up);

    static void unpack(const uint8_t* w, Unpacked<S>& to) {
        typename S::I scales[4], mins[4];
        P::scales(w, scales, mins);
        for (int p = 0; p < 4; p++) {
            to.set_scales(8 * (p / 2) + p % 2, 2, scales[p]);
            to.template set_pairs<P::offset - (P::has_mins ? 0 : P::up)>(2 * p, P::has_mins ? mins[p] : scales[p]);
            const uint8_t* at = w + (P::before + p * P::part) * S::bytes;
            each<8>([&](auto number) {
                constexpr int t = decltype(number)::value % 4, h = decltype(number)::value / 4;
                const auto [a, c] = P::template weights<h, t>(at);
                const int vector = 32 * (p / 2) + 4 * (p % 2) + t;
                to.set(vector + 8 * P::template first<h>, a);
                to.set(vector + 8 * P::template second<h>, S::template shift<P::up>(c));
            });
        }
    }
};

// Block b of a group, with its floats.
template <class S, class Kind> void unpack(const uint8_t* group, int64_t b, int64_t n_blocks, Unpacked<S>& to) {
    constexpr int bytes = Kind::vectors * S::bytes, behind = Kind::behind * S::rows;
    const uint8_t *w = group + b * bytes, *ds = behind ? group + n_blocks * bytes + b * behind : w;
    Kind::unpack(w, to);
    to.d = S::halves(ds);
    if constexpr (Kind::has_mins) to.min = S::halves(ds + 2 * S::rows);
}

// What the pairs of a block are times the sums of activations.
template <class S, class Kind> inline typename S::I sum_of_pairs(const Unpacked<S>& block, const Block256& x) {
    const int32_t* sums = Kind::n_pairs == 4 ? x.mins : x.offsets;
    typename S::I sum{};
    UNROLL for (int k = 0; k < Kind::n_pairs; k++) sum += S::pairs(block.pairs[k], S::dwords_of(sums[k]));
    return sum;
}

// Adds a block's products to the results of a token: their exact sum, but for minimums.
template <class S, class Kind>
inline void add_scaled(const Unpacked<S>& block, typename S::I total, const Block256& x, float* result) {
    // A power of two is in the scales that `products.h` multiplies. It matters where they are subnormal.
    const typename S::F d = block.d * S::broadcast_f(x.d / (1 << Kind::up));
    typename S::F sum = S::fmadd(S::to_float(total << Kind::up), d, S::load_floats(result));
    if constexpr (Kind::has_mins) {
        sum = S::fnmadd(S::to_float(sum_of_pairs<S, Kind>(block, x)), block.min * S::broadcast_f(x.d), sum);
    }
    S::store(result, sum);
}

// T tokens with one block.
template <class S, class Kind, int T> void add_block(const Unpacked<S>& block, const Columns& x, float* results) {
    using I = typename S::I;
    I totals[T];
    UNROLL for (int i = 0; i < T; i++) totals[i] = I{};
    constexpr int part = S::wide_sums ? Kind::sub_block : Kind::per_sum;
    const uint8_t* w = block.weights;
    const int8_t* quants = x.quants;
    for (int at = 0; at < 256; at += part, quants += part, w += part / 4 * S::bytes) {
        Sums<S, T> sums;
        UNROLL for (int t = 0; t < part / 4; t++) sums.add(S::load(w + t * S::bytes), quants + 4 * t, x.stride);
        sums.move_to(totals, block.scales[at / Kind::sub_block]);
    }
    UNROLL for (int i = 0; i < T; i++) {
        if constexpr (Kind::lower != 0) totals[i] -= sum_of_pairs<S, Kind>(block, x.block(i));
        add_scaled<S, Kind>(block, totals[i], x.block(i), results + i * S::rows);
    }
}

// Calls `multiply` with room for the results of n tokens, a row of floats each, of whole tiles, and writes them to `out`.
template <class S, class Multiply> inline void with_results(int n, float* const* out, Multiply multiply) {
    alignas(64) float results[wide_tile * S::rows];
    for (int i = 0; i < (n + tile_tokens - 1) / tile_tokens * tile_tokens; i++) S::store(results + i * S::rows, typename S::F{});
    multiply(results);
    for (int i = 0; i < n; i++) S::store(out[i], S::load_floats(results + i * S::rows));
}

template <class S, class Kind>
void wide_product(const uint8_t* group, const Activations& x, int64_t token, int n, float* const* out) {
    const int64_t n_blocks = x.n_values / 256;
    with_results<S>(n, out, [&](float* results) {
        Unpacked<S> block;
        for (int64_t b = 0; b < n_blocks; b++) {
            unpack<S, Kind>(group, b, n_blocks, block);
            int i = 0;
            auto add = [&](auto number) {
                const int64_t at = (token + i) / tile_tokens * tile_tokens * n_blocks + b * tile_tokens + i % tile_tokens;
                const Columns columns{x.quants + 256 * at, 256, static_cast<const Block256*>(x.blocks) + at, 1};
                add_block<S, Kind, decltype(number)::value>(block, columns, results + i * S::rows);
                i += number;
            };
            while (i + 8 <= n) add(std::integral_constant<int, 8>());
            if (n - i >= 4) add(std::integral_constant<int, 4>());
            if (n - i >= 2) add(std::integral_constant<int, 2>());
            if (n > i) add(std::integral_constant<int, 1>());
        }
    });
}

// Q4_K gains too little (4 % with AVX2, where the others gain 16 to 41 % in cache).
template <class S> constexpr Products all_with_wide(const char* name) {
    Products table = all_products<S>(name);
    auto set = [&](Format format, WideProduct product) { table.wide.of[static_cast<int>(format)] = product; };
    table.wide.from = 4 * S::tile;
    set(Format::q5_k, wide_product<S, UnpackQ45K<S, true>>);
    set(Format::q6_k, wide_product<S, UnpackQ236K<S, Q6K>>);
    set(Format::q3_k, wide_product<S, UnpackQ236K<S, Q3K>>);
    set(Format::q2_k, wide_product<S, UnpackQ236K<S, Q2K>>);
    return table;
}

}  // namespace
}  // namespace cpuchat
