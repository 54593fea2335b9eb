// The weights as they lie in memory, the activations, and the table of products that an instruction set offers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace cpuchat {

enum class Format { q4_k, q5_k, q6_k, q8_0, q4_0, q5_0, mxfp4, iq4_nl, iq4_xs, q3_k, q2_k, q4_1, q5_1, count, none = -1 };

// A group is `rows` rows (8 or 16, a lane each) of weights, laid out for them together. A "vector" below is 4 bytes of
// each row, one row after the other, and the numbers are those of a row's values.
//
// Formats of blocks of 256 values: the blocks one after the other, each
//
//   q4_k    d, min       2 bytes a row each
//           scales       3 vectors: 6 bits of 4 sub-blocks each, and the last two bits of the fourth in the first three
//           quants       32 vectors; number 8 j + t: low nibbles are 64 j + 4 t ... + 3, high ones 32 values later
//   q5_k    the same, and 8 vectors of fifth bits before the quants: number t has bit 2 j of 64 j + 4 t, bit 2 j + 1
//           of the value 32 later
//   q6_k    scales       4 vectors p = 2 h + l: bytes are the scales of the sub-blocks 8 h + l + 0, 2, 4, 6
//           quants       4 × 4 × 3 vectors (p, t): low nibbles of 128 h + 16 l + 4 t (+ 64: high), those of 32 later,
//                        and two bits each of the four
//           after all blocks of the group: d, 2 bytes a row and block
//   q3_k    scales       3 vectors of 6 bits for p = 0, 1, 2, and the last two bits of each are of p = 3
//           quants       4 × 6 vectors: for p, 2 of third bits, number u: bit j of 128 h + 16 l + 32 j + 8 u ... + 3, bit
//                        j + 4 of those 4 later; 4 of two bits each, number t: 128 h + 16 l + 4 t and 32, 64, 96 later
//           after all blocks: d, as q6_k
//   q2_k    scales       4 vectors, p as in q6_k: low nibbles are scales, high ones minimums
//           quants       4 × 4 vectors (p, t), as in q3_k
//           after all blocks: d of all rows and min of all rows, 2 bytes each, for each block
//   iq4_xs  d            2 bytes a row
//           scales       2 bytes a row; byte c has two bits each of the sub-blocks c + 2, c + 6, c, and c + 4, then a
//                        vector; byte c has nibbles of c (low) and c + 4: the last two and first four bits of a scale
//           quants       32 vectors; number 4 j + t: low nibbles are 32 j + 4 t ... + 3, high ones 16 later
//
// Formats of blocks of 32 values: quants of all blocks, then d, 2 bytes a row and block
//
//   q8_0    8 vectors; number t: 4 t ... + 3
//   q4_0    4 vectors; number t: low nibbles 4 t ... + 3, high ones 16 later
//   q5_0    the same, after a vector of fifth bits: byte c has bit t of 4 t + c, bit t + 4 of the value 16 later
//   q4_1, q5_1, iq4_nl as q4_0, q5_0, q4_0; the first two have d of all rows and min of all rows for each block
//   mxfp4   as q4_0, with an exponent, 1 byte a row and block, for d

struct BlockSize {
    int values;
    size_t bytes;   // of a row, as in ggml-common.h
    size_t behind;  // of these lie behind all blocks of the group
};
constexpr BlockSize block_size(Format format) {
    constexpr BlockSize sizes[] = {
        {256, 144, 0}, {256, 176, 0}, {256, 210, 2},               // q4_k to q6_k
        {32, 34, 2}, {32, 18, 2}, {32, 22, 2}, {32, 17, 1},        // q8_0, q4_0, q5_0, mxfp4
        {32, 18, 2}, {256, 136, 0}, {256, 110, 2}, {256, 84, 4},   // iq4_nl, iq4_xs, q3_k, q2_k
        {32, 20, 4}, {32, 24, 4},                                  // q4_1, q5_1
    };
    return sizes[static_cast<int>(format)];
}
constexpr int block_values(Format format) { return block_size(format).values; }
constexpr bool has_large_blocks(Format format) { return block_values(format) == 256; }

// Bytes of a group, a multiple of a cache line.
constexpr size_t group_bytes(Format format, int64_t n_values, int rows) {
    const size_t bytes = block_size(format).bytes * static_cast<size_t>(n_values / block_values(format)) * rows;
    return (bytes + 63) / 64 * 64;
}

// Lay out groups `first` to `end` of a matrix: `n_rows` rows of ggml's blocks; rows that the last group lacks become zero.
void lay_out(
    Format format, int64_t n_values, int64_t n_rows, int rows, int64_t first, int64_t end, const uint8_t* from, uint8_t* to);

// Of 256 activations of a token. Pairs are two 16-bit sums in a dword, in the order in which scales come in pairs.
struct Block256 {
    float d;
    int32_t mins[4];     // sums of 32: (0, 2) (1, 3) (4, 6) (5, 7)
    int32_t offsets[8];  // sums of 16: for p of q6_k (b, b + 4) (b + 2, b + 6), b = 8 h + l
    int32_t unused[3];
};
static_assert(sizeof(Block256) == 64);

// Of 32 activations of a token.
struct Block32 {
    float d;
    int32_t sum;
};

// Activations as signed bytes, `n_values` a token, and what belongs to each block of a token. Tokens lie one after the
// other; those of wide passes in tiles of 16, which have block after block of all 16 tokens: their 16 rows of bytes, and
// their 16 Block256, or the 16 `d` and the 16 `sum` of their Block32.
struct Activations {
    const int8_t* quants;
    const void* blocks;
    int64_t n_values;
};
constexpr int tile_tokens = 16;

// Bytes of what belongs to a block of activations.
constexpr size_t activation_block(Format format) { return has_large_blocks(format) ? sizeof(Block256) : sizeof(Block32); }

// Quantizes some blocks of one token: number `lane` of the `width` tokens (1, or those of a tile) whose first such block
// is at `quants` and `blocks`. Without `x`, for a tile that is not full, its results become zero.
void quantize(Format format, int64_t n_values, const float* x, int8_t* quants, void* blocks, int width = 1, int lane = 0);

// Groups `bytes` apart, whose results are `rows` floats apart.
struct Groups {
    const uint8_t* first;
    size_t bytes;
    int64_t rows;
};

// How many bytes ahead of what they read the products of one group fetch. Measured: 50 to 42 ms a pass on a Xeon with
// AVX-512 and 4 KB; on Zen 3 a thread reads 4 to 29 % faster with 8 KB than with 4, by type, and without 0.6 to 0.9 as
// fast; on Zen 5 eight tokens of Q4_K and Q8_0 take 9 and 20 % less with 8 KB than with 4.
inline int ahead_alone = 8192;

// Products of one group, or of `most_groups` side by side, with `n_tokens` (up to `tile`) tokens from `token` on: `rows`
// floats of each group to each of `out`.
using Product = void (*)(const Groups& groups, const Activations& x, int64_t token, float* const* out);
constexpr int most_groups = 4;

// The same for up to `wide_tile` tokens, in tiles, of which `token` begins one; for passes of `from` tokens or more.
using WideProduct = void (*)(const uint8_t* group, const Activations& x, int64_t token, int n_tokens, float* const* out);
constexpr int wide_tile = 128;
struct WideProducts {
    int from;
    WideProduct of[static_cast<int>(Format::count)];  // null where it gains nothing
};

struct Products {
    const char* name;
    int rows;
    int tile;
    std::array<std::array<Product, 9>, static_cast<int>(Format::count)> of;  // of a group, by format and number of tokens
    // Of several groups with one token, a block of each in turn: one stream alone does not use up the memory. Measured on
    // Zen 3 with two threads, four against one: Q4_K 43 and 35 GB/s, Q8_0 30 and 22. Null where more arithmetic is in the
    // way: Q6_K 26 and 29. Zen 5 with AVX-512 reads one stream faster: Q4_K 74 and 50 GB/s, Q8_0 71 and 64.
    std::array<Product, static_cast<int>(Format::count)> several;
    WideProducts wide;
};

extern const Products avx2_products;
extern const Products avx_vnni_products;
extern const Products avx512_products;
extern const WideProducts amx_products;

inline Products with_amx() {
    return {"AVX-512 VNNI, AMX", avx512_products.rows, avx512_products.tile, avx512_products.of, avx512_products.several, amx_products};
}

}  // namespace cpuchat
