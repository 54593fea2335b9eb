// Wide passes with AMX: a tile of 16 tokens by a tile of 16 rows, 64 values deep. Weights in the layout of 16 rows are a
// tile's second operand as they are.
//
// Scales of sub-blocks are multiplied into the weights, whose 16 bits become two planes of bytes: sums of the low plane
// and 256 times those of the high one are the exact integers of the other instruction sets, from where on the float
// operations are the same.
#include <algorithm>

#include "wide.h"

namespace cpuchat {
namespace {

// GCC does not know that loads of tiles and of their configuration read all of what was written.
inline void written(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// Tiles of this thread while it lives. ggml keeps a configuration of its own, which comes back afterwards.
class Tiles {
    struct alignas(64) Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    static_assert(sizeof(Config) == 64);
    Config before;

public:
    // 0 to 3: sums; 4 and 5: activations of 16 tokens; 6 and 7: weights, `depth` values of 16 rows.
    explicit Tiles(int depth) {
        _tile_storeconfig(&before);
        written(&before);
        Config config{};
        config.palette = 1;
        for (int i = 0; i < 8; i++) {
            config.rows[i] = static_cast<uint8_t>(i < 6 ? 16 : depth / 4);
            config.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? depth : 64);
        }
        written(&config);
        _tile_loadconfig(&config);
    }
    ~Tiles() {
        if (before.palette) _tile_loadconfig(&before);
        else _tile_release();
    }
    Tiles(const Tiles&) = delete;
};

using S = Avx512;
using I = S::I;
constexpr int tile_bytes = 1024;

struct Planes {
    alignas(64) uint8_t low[64 * S::bytes], high[64 * S::bytes];
};

struct UnpackIq4Xs : Iq4Xs<S> {
    static constexpr int sub_block = 32, lower = 128, n_pairs = 0;
    static void unpack(const uint8_t* w, Unpacked<S>& to) {
        I two[2];
        scales(w, two);
        to.set_scales(0, 1, two[0]), to.set_scales(4, 1, two[1]);
        for (int t = 0; t < 32; t++) {
            const auto [low, high] = weights(w, t / 4, t % 4);
            to.set(t / 4 * 8 + t % 4, low), to.set(t / 4 * 8 + t % 4 + 4, high);
        }
    }
};

// (weights - lower) × scales in 16 bits each, and their low and high bytes apart.
template <class Kind> void split(const Unpacked<S>& block, Planes& to) {
    using Words = S::Words;
    constexpr uint16_t lower = Kind::lower;
    const I low_bytes = S::dwords_of(0x00ff00ff);
    for (int t = 0; t < 64; t++) {
        const I dwords = block.scales[t / (Kind::sub_block / 4)];
        const Words scale = Words((dwords & 0xffff) | dwords << 16);  // twice
        const I four = S::load(block.weights + t * S::bytes);
        const I even = I((Words(four & low_bytes) - lower) * scale), odd = I((Words(S::shift<8>(four)) - lower) * scale);
        S::store(to.low + t * S::bytes, (even & low_bytes) | S::shift<-8>(odd));
        S::store(to.high + t * S::bytes, S::shift<8>(even) | (odd & ~low_bytes));
    }
}

using TileSums = int32_t[tile_tokens * S::rows];

// The sums of both planes of a tile of tokens, and what follows in float.
template <class Kind> void add_block(const Unpacked<S>& block, const TileSums& low, const TileSums& high, const Block256* x, float* results) {
    UNROLL for (int i = 0; i < tile_tokens; i++) {
        const I total = S::load(low + S::rows * i) + (S::load(high + S::rows * i) << 8);
        add_scaled<S, Kind>(block, total, x[i], results + S::rows * i);
    }
}

template <class Kind> void tiles_of_256(const uint8_t* group, const Activations& x, int64_t token, int n, float* const* out) {
    const int64_t K = x.n_values, n_blocks = K / 256;
    with_results<S>(n, out, [&](float* results) {
        const Tiles tiles(64);
        Unpacked<S> block;
        Planes planes;
        alignas(64) TileSums sums[4];
        for (int64_t b = 0; b < n_blocks; b++) {
            const int8_t* quants = x.quants + token * K + 256 * tile_tokens * b;
            const Block256* blocks = static_cast<const Block256*>(x.blocks) + token * n_blocks + tile_tokens * b;
            unpack<S, Kind>(group, b, n_blocks, block);
            split<Kind>(block, planes);
            written(&planes);
            for (int t = 0; t < n; t += 2 * tile_tokens) {
                const int second = t + tile_tokens < n ? t + tile_tokens : t;  // the last one may be alone
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int step = 0; step < 4; step++) {
                    _tile_loadd(4, quants + t * K + 64 * step, 256);
                    _tile_loadd(6, planes.low + step * tile_bytes, 64);
                    _tile_dpbsud(0, 4, 6);
                    _tile_loadd(7, planes.high + step * tile_bytes, 64);
                    _tile_dpbssd(1, 4, 7);
                    if (second == t) continue;
                    _tile_loadd(5, quants + second * K + 64 * step, 256);
                    _tile_dpbsud(2, 5, 6);
                    _tile_dpbssd(3, 5, 7);
                }
                _tile_stored(0, sums[0], 64);
                _tile_stored(1, sums[1], 64);
                _tile_stored(2, sums[2], 64);
                _tile_stored(3, sums[3], 64);
                add_block<Kind>(block, sums[0], sums[1], blocks + t * n_blocks, results + S::rows * t);
                if (second != t) add_block<Kind>(block, sums[2], sums[3], blocks + second * n_blocks, results + S::rows * second);
            }
        }
    });
}

// Blocks of 32 values as a tile of 8 vectors of signed bytes.
template <class Weights> const uint8_t* signed_bytes(const uint8_t* w, uint8_t* to) {
    if constexpr (Weights::vectors == 8) {
        return w;
    } else {
        each<4>([&](auto number) {
            constexpr int t = decltype(number)::value;
            const S::Two two = bytes_of_nibbles<S, Weights, t>(w);
            S::store(to + t * S::bytes, S::sub_bytes(two.low, S::bytes_of(Weights::offset)));
            S::store(to + (t + 4) * S::bytes, S::sub_bytes(two.high, S::bytes_of(Weights::offset)));
        });
        return to;
    }
}

// The float operations of a tile of tokens with the sums of `count` blocks, whose scales are `ds` and, of the tokens, `x`.
template <class Weights>
void add_blocks(int count, const TileSums* sums, const S::F* ds, const S::F* mins, const float* x, float* results) {
    S::F of_tile[tile_tokens];
    UNROLL for (int i = 0; i < tile_tokens; i++) of_tile[i] = S::load_floats(results + S::rows * i);
    for (int b = 0; b < count; b++, x += 2 * tile_tokens) {
        const S::F d = ds[b];
        UNROLL for (int i = 0; i < tile_tokens; i++) {
            const S::F dx = S::broadcast_f(x[i]);
            of_tile[i] = S::fmadd(S::to_float(S::load(sums[b] + S::rows * i)), d * dx, of_tile[i]);
            if constexpr (Weights::behind == 4) {
                of_tile[i] = S::fmadd(S::to_float(S::broadcast(x + tile_tokens + i)), mins[b] * dx, of_tile[i]);
            }
        }
    }
    UNROLL for (int i = 0; i < tile_tokens; i++) S::store(results + S::rows * i, of_tile[i]);
}

// A few blocks at a time: first all their tiles, then their floats. (In turn, block by block, it takes half as long again.)
template <class Weights> void tiles_of_32(const uint8_t* group, const Activations& x, int64_t token, int n, float* const* out) {
    const int64_t K = x.n_values, n_blocks = K / 32;
    constexpr int bytes = Weights::vectors * S::bytes, behind = Weights::behind * S::rows, most = 8;
    with_results<S>(n, out, [&](float* results) {
        const Tiles tiles(32);
        alignas(64) uint8_t unpacked[most][8 * S::bytes];
        alignas(64) TileSums sums[2][most];
        S::F ds[most], mins[most];
        for (int64_t begin = 0; begin < n_blocks; begin += most) {
            const int count = static_cast<int>(std::min<int64_t>(most, n_blocks - begin));
            const uint8_t* weights[most];
            for (int b = 0; b < count; b++) {
                weights[b] = signed_bytes<Weights>(group + (begin + b) * bytes, unpacked[b]);
                const uint8_t* scales = group + n_blocks * bytes + (begin + b) * behind;
                ds[b] = scale_of_32<S, Weights>(scales);
                if constexpr (Weights::behind == 4) mins[b] = S::halves(scales + 2 * S::rows);
            }
            written(unpacked);
            const int8_t* quants = x.quants + token * K + 32 * tile_tokens * begin;
            const float* scales = static_cast<const float*>(x.blocks) + 2 * (token * n_blocks + tile_tokens * begin);
            for (int t = 0; t < n; t += 2 * tile_tokens) {
                const int second = t + tile_tokens < n ? t + tile_tokens : t;  // the last one may be alone
                for (int b = 0; b < count; b++) {
                    _tile_loadd(6, weights[b], 64);
                    _tile_loadd(4, quants + t * K + 32 * tile_tokens * b, 32);
                    _tile_loadd(5, quants + second * K + 32 * tile_tokens * b, 32);
                    _tile_zero(0);
                    _tile_zero(1);
                    _tile_dpbssd(0, 4, 6);
                    _tile_dpbssd(1, 5, 6);
                    _tile_stored(0, sums[0][b], 64);
                    _tile_stored(1, sums[1][b], 64);
                }
                add_blocks<Weights>(count, sums[0], ds, mins, scales + 2 * t * n_blocks, results + S::rows * t);
                if (second != t) add_blocks<Weights>(count, sums[1], ds, mins, scales + 2 * second * n_blocks, results + S::rows * second);
            }
        }
    });
}

constexpr WideProducts all_wide() {
    WideProducts table{32, {}};
    auto set = [&](Format format, WideProduct product) { table.of[static_cast<int>(format)] = product; };
    set(Format::q4_k, tiles_of_256<UnpackQ45K<S, false>>);
    set(Format::q5_k, tiles_of_256<UnpackQ45K<S, true>>);
    set(Format::q6_k, tiles_of_256<UnpackQ236K<S, Q6K>>);
    set(Format::q3_k, tiles_of_256<UnpackQ236K<S, Q3K>>);
    set(Format::q2_k, tiles_of_256<UnpackQ236K<S, Q2K>>);
    set(Format::iq4_xs, tiles_of_256<UnpackIq4Xs>);
    set(Format::q8_0, tiles_of_32<Q8<S>>);
    set(Format::q4_0, tiles_of_32<Q4_0<S>>);
    set(Format::q5_0, tiles_of_32<Q5_0<S>>);
    set(Format::q4_1, tiles_of_32<Q4_1<S>>);
    set(Format::q5_1, tiles_of_32<Q5_1<S>>);
    set(Format::iq4_nl, tiles_of_32<Iq4Nl<S>>);
    set(Format::mxfp4, tiles_of_32<Mxfp4<S>>);
    return table;
}

}  // namespace
}  // namespace cpuchat

const cpuchat::WideProducts cpuchat::amx_products = cpuchat::all_wide();
