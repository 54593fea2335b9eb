// Wide passes with AMX: a tile of 16 tokens by a tile of 16 rows, 64 values deep. Weights in the layout of 16 rows are a
// tile's second operand as they are.
//
// Scales of sub-blocks are multiplied into the weights, whose 16 bits become two planes of bytes: sums of the low plane
// and 256 times those of the high one are the exact integers of the other instruction sets, from where on the float
// operations are the same. Checked by emulation only (tests/kernels), and not timed yet.
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

// Where two tiles of tokens from `token` on begin: the last ones overlap those before, as no token is behind them.
struct Pair {
    int token, first, second;
    Pair(int token, int n) : token(token), first(std::min(token, n - 16)), second(std::min(token + 16, n - 16)) {}
    // Calls f(token, number of its tile, row in it) for each token once.
    template <class F> void each(F f) const {
        for (int i = token; i < first + 16; i++) f(i, 0, i - first);
        for (int i = first + 16; i < second + 16; i++) f(i, 1, i - second);
    }
};

struct TileSums {
    alignas(64) int32_t of[4][tile_bytes / 4];
    I at(int tile, int row) const { return S::load(of[tile] + 16 * row); }
};

template <class Kind> void tiles_of_256(const uint8_t* group, const Activations& x, int64_t token, int n, float* const* out) {
    const int64_t K = x.n_values, n_blocks = K / 256;
    with_results<S>(n, out, [&](float* results) {
        const Tiles tiles(64);
        Unpacked<S> block;
        Planes planes;
        TileSums sums;
        for (int64_t b = 0; b < n_blocks; b++) {
            const int8_t* quants = x.quants + token * K + 256 * b;
            const Block256* blocks = static_cast<const Block256*>(x.blocks) + token * n_blocks + b;
            unpack<S, Kind>(group, b, n_blocks, block);
            split<Kind>(block, planes);
            written(&planes);
            for (int t = 0; t < n; t += 32) {
                const Pair pair(t, n);
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int step = 0; step < 4; step++) {
                    _tile_loadd(4, quants + pair.first * K + 64 * step, K);
                    _tile_loadd(6, planes.low + step * tile_bytes, 64);
                    _tile_dpbsud(0, 4, 6);
                    _tile_loadd(7, planes.high + step * tile_bytes, 64);
                    _tile_dpbssd(1, 4, 7);
                    _tile_loadd(5, quants + pair.second * K + 64 * step, K);
                    _tile_dpbsud(2, 5, 6);
                    _tile_dpbssd(3, 5, 7);
                }
                _tile_stored(0, sums.of[0], 64);
                _tile_stored(1, sums.of[1], 64);
                _tile_stored(2, sums.of[2], 64);
                _tile_stored(3, sums.of[3], 64);
                pair.each([&](int i, int tile, int row) {
                    const I total = sums.at(2 * tile, row) + (sums.at(2 * tile + 1, row) << 8);
                    add_scaled<S, Kind>(block, total, blocks[i * n_blocks], results + 16 * i);
                });
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

template <class Weights> void tiles_of_32(const uint8_t* group, const Activations& x, int64_t token, int n, float* const* out) {
    const int64_t K = x.n_values, n_blocks = K / 32;
    constexpr int bytes = Weights::vectors * S::bytes;
    with_results<S>(n, out, [&](float* results) {
        const Tiles tiles(32);
        alignas(64) uint8_t unpacked[8 * S::bytes];
        TileSums sums;
        for (int64_t b = 0; b < n_blocks; b++) {
            const int8_t* quants = x.quants + token * K + 32 * b;
            const Block32* blocks = static_cast<const Block32*>(x.blocks) + token * n_blocks + b;
            const uint8_t* ds = group + n_blocks * bytes + b * Weights::behind * S::rows;
            const S::F d = scale_of_32<S, Weights>(ds);
            const uint8_t* weights = signed_bytes<Weights>(group + b * bytes, unpacked);
            written(weights);
            _tile_loadd(6, weights, 64);
            for (int t = 0; t < n; t += 32) {
                const Pair pair(t, n);
                _tile_zero(0);
                _tile_zero(1);
                _tile_loadd(4, quants + pair.first * K, K);
                _tile_dpbssd(0, 4, 6);
                _tile_loadd(5, quants + pair.second * K, K);
                _tile_dpbssd(1, 5, 6);
                _tile_stored(0, sums.of[0], 64);
                _tile_stored(1, sums.of[1], 64);
                pair.each([&](int i, int tile, int row) {
                    const Block32& of_token = blocks[i * n_blocks];
                    const S::F dx = S::broadcast_f(of_token.d);
                    S::F sum = S::fmadd(S::to_float(sums.at(tile, row)), d * dx, S::load_floats(results + 16 * i));
                    if constexpr (Weights::behind == 4) {
                        sum = S::fmadd(S::to_float(S::dwords_of(of_token.sum)), S::halves(ds + 2 * S::rows) * dx, sum);
                    }
                    S::store(results + 16 * i, sum);
                });
            }
        }
    });
}

constexpr WideProducts all_wide() {
    WideProducts table{32, {}};  // unpacking and splitting take what AVX-512 VNNI takes for 8 tokens or more: an estimate
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
