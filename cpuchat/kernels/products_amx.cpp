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

using I = __m512i;
using S = Avx512;
constexpr int tile_bytes = 1024;

struct Planes {
    alignas(64) uint8_t low[64 * S::bytes], high[64 * S::bytes];
};

struct UnpackIq4Xs {
    static constexpr int sub_block = 32, offset = 128, n_pairs = 0, up = 0;
    static constexpr bool has_mins = false;
    static void unpack(const uint8_t* group, int64_t b, int64_t, Unpacked<S>& to) {
        const uint8_t* w = group + b * 34 * S::bytes;
        const I nibble = S::bytes_of(15), values = S::signed_weights(S::table(iq4_values));
        I four[2];
        iq4_xs_scales<S>(w, four);
        to.set_scales(0, 1, four[0]), to.set_scales(4, 1, four[1]);
        for (int t = 0; t < 32; t++) {
            const I both = S::load(w + (2 + t) * S::bytes);
            to.set(t / 4 * 8 + t % 4, S::lookup(values, S::bit_and(both, nibble)));
            to.set(t / 4 * 8 + t % 4 + 4, S::lookup(values, S::bit_and(S::shift<4>(both), nibble)));
        }
        to.d = S::halves(w);
    }
};

// (weights - offset) × scales in 16 bits each, and their low and high bytes apart.
template <class Kind> void split(const Unpacked<S>& block, Planes& to) {
    const I low_bytes = _mm512_set1_epi16(0xff), offset = _mm512_set1_epi16(Kind::offset);
    for (int t = 0; t < 64; t++) {
        const I dwords = block.scales[t / (Kind::sub_block / 4)];
        const I scale = S::bit_or(S::bit_and(dwords, S::dwords_of(0xffff)), S::shift_dwords_left(dwords, 16));  // twice
        const I four = S::load(block.weights + t * S::bytes);
        const I even = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_and_si512(four, low_bytes), offset), scale);
        const I odd = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_srli_epi16(four, 8), offset), scale);
        S::store(to.low + t * S::bytes, S::bit_or(_mm512_and_si512(even, low_bytes), _mm512_slli_epi16(odd, 8)));
        S::store(to.high + t * S::bytes, S::bit_or(_mm512_srli_epi16(even, 8), _mm512_slli_epi16(_mm512_srli_epi16(odd, 8), 8)));
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
    I at(int tile, int row) const { return _mm512_load_si512(of[tile] + 16 * row); }
    void take() {
        _tile_stored(0, of[0], 64);
        _tile_stored(1, of[1], 64);
        _tile_stored(2, of[2], 64);
        _tile_stored(3, of[3], 64);
    }
};

template <class Kind>
void blocks_of_256(const uint8_t* group, const Activations& x, int64_t token, int n, float* results) {
    const int64_t K = x.n_values, n_blocks = K / 256;
    const int8_t* quants = x.quants + token * K;
    const Block256* blocks = static_cast<const Block256*>(x.blocks) + token * n_blocks;
    const Tiles tiles(64);
    Unpacked<S> block;
    Planes planes;
    TileSums sums;
    for (int64_t b = 0; b < n_blocks; b++, quants += 256, blocks++) {
        Kind::unpack(group, b, n_blocks, block);
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
            sums.take();
            pair.each([&](int i, int tile, int row) {
                const I total = S::add(sums.at(2 * tile, row), S::shift_dwords_left(sums.at(2 * tile + 1, row), 8));
                add_scaled<S, Kind>(block, total, blocks[i * n_blocks], results + 16 * i);
            });
        }
    }
}

// How blocks of 32 values, of which `products.h` knows all but this, become tiles of 8 vectors of signed bytes.
template <class Weights> struct Bytes : Weights {
    static const uint8_t* unpack(const uint8_t* w, uint8_t*) { return w; }
};
template <class Weights, bool five_bits, int offset, const int8_t* values = nullptr> struct BytesOfNibbles : Weights {
    static const uint8_t* unpack(const uint8_t* w, uint8_t* to) {
        const I nibble = S::bytes_of(15), fifth = S::bytes_of(16);
        I bits = five_bits ? S::load(w) : S::zero();
        for (int t = 0; t < 4; t++, bits = S::shift<1>(bits)) {
            const I both = S::load(w + (five_bits + t) * S::bytes);
            I low = S::bit_and(both, nibble), high = S::bit_and(S::shift<4>(both), nibble);
            if constexpr (values != nullptr) low = S::lookup(S::table(values), low), high = S::lookup(S::table(values), high);
            low = S::bit_or(low, S::bit_and(S::shift<-4>(bits), fifth)), high = S::bit_or(high, S::bit_and(bits, fifth));
            S::store(to + t * S::bytes, S::sub_bytes(low, S::bytes_of(offset)));
            S::store(to + (t + 4) * S::bytes, S::sub_bytes(high, S::bytes_of(offset)));
        }
        return to;
    }
};

template <class Kind>
void blocks_of_32(const uint8_t* group, const Activations& x, int64_t token, int n, float* results) {
    const int64_t K = x.n_values, n_blocks = K / 32;
    const int8_t* quants = x.quants + token * K;
    const Block32* blocks = static_cast<const Block32*>(x.blocks) + token * n_blocks;
    const uint8_t* ds = group + n_blocks * Kind::vectors * S::bytes;
    const Tiles tiles(32);
    alignas(64) uint8_t bytes[8 * S::bytes];
    TileSums sums;
    for (int64_t b = 0; b < n_blocks; b++, quants += 32, blocks++) {
        const uint8_t* weights = Kind::unpack(group + b * Kind::vectors * S::bytes, bytes);
        const uint8_t* at = ds + b * Kind::behind * S::rows;
        const S::F d = Kind::scale(at);
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
                S::F sum = S::fmadd(S::to_float(sums.at(tile, row)), S::mul(d, dx), S::load_floats(results + 16 * i));
                if constexpr (Kind::behind == 4) {
                    sum = S::fmadd(S::to_float(S::dwords_of(of_token.sum)), S::mul(S::halves(at + 2 * S::rows), dx), sum);
                }
                S::store(results + 16 * i, sum);
            });
        }
    }
}

template <void (*multiply)(const uint8_t*, const Activations&, int64_t, int, float*)>
void product(const uint8_t* group, const Activations& x, int64_t token, int n, float* const* out) {
    alignas(64) float results[16 * wide_tile];
    for (int i = 0; i < n; i++) S::store(results + 16 * i, S::zero_f());
    multiply(group, x, token, n, results);
    for (int i = 0; i < n; i++) S::store(out[i], S::load_floats(results + 16 * i));
}

constexpr WideProducts all_wide() {
    WideProducts table{32, {}};  // unpacking and splitting take what AVX-512 VNNI takes for 8 tokens or more: an estimate
    auto set = [&](Format format, WideProduct product) { table.of[static_cast<int>(format)] = product; };
    set(Format::q4_k, product<blocks_of_256<UnpackQ45K<S, false>>>);
    set(Format::q5_k, product<blocks_of_256<UnpackQ45K<S, true>>>);
    set(Format::q6_k, product<blocks_of_256<UnpackQ236K<S, Q6K<S>>>>);
    set(Format::q3_k, product<blocks_of_256<UnpackQ236K<S, Q3K<S>>>>);
    set(Format::q2_k, product<blocks_of_256<UnpackQ236K<S, Q2K<S>>>>);
    set(Format::iq4_xs, product<blocks_of_256<UnpackIq4Xs>>);
    set(Format::q8_0, product<blocks_of_32<Bytes<Q8<S>>>>);
    set(Format::q4_0, product<blocks_of_32<BytesOfNibbles<Q45<S, false, 8>, false, 8>>>);
    set(Format::q5_0, product<blocks_of_32<BytesOfNibbles<Q45<S, true, 16>, true, 16>>>);
    set(Format::q4_1, product<blocks_of_32<BytesOfNibbles<WithMin<S, false>, false, 0>>>);
    set(Format::q5_1, product<blocks_of_32<BytesOfNibbles<WithMin<S, true>, true, 0>>>);
    set(Format::iq4_nl, product<blocks_of_32<BytesOfNibbles<Iq4Nl<S>, false, 0, iq4_values>>>);
    set(Format::mxfp4, product<blocks_of_32<BytesOfNibbles<Mxfp4<S>, false, 12, mxfp4_values>>>);
    return table;
}

}  // namespace
}  // namespace cpuchat

const cpuchat::WideProducts cpuchat::amx_products = cpuchat::all_wide();
