// Lays weights out for the products. Formats of blocks: ggml-common.h of llama.cpp.
#include <cstring>

#include "formats.h"

namespace cpuchat {
namespace {

// Writes what is taken from the blocks of all rows, one row after the other.
template <int rows> struct Writer {
    uint8_t* to;

    // A vector of byte(row, 0 to 3).
    template <class Byte> void bytes(Byte byte) {
        for (int r = 0; r < rows; r++) {
            for (int c = 0; c < 4; c++) *to++ = static_cast<uint8_t>(byte(r, c));
        }
    }
    // 16 bytes of sub-blocks as 4 vectors, in the order of q6_k.
    void sub_blocks(const uint8_t* const* from, int at) {
        for (int p = 0; p < 4; p++) bytes([&](int r, int c) { return from[r][at + 8 * (p / 2) + p % 2 + 2 * c]; });
    }
    // Four vectors of 6 bits in three.
    void sixes(const uint8_t (&six)[4][4 * rows]) {
        for (int v = 0; v < 3; v++) bytes([&](int r, int c) { return six[v][4 * r + c] | (six[3][4 * r + c] >> 2 * v & 3) << 6; });
    }
};
// The n bytes at `at` of each block.
template <int n, int rows> void take(Writer<rows>& to, const uint8_t* const* from, int at) {
    for (int r = 0; r < rows; r++) std::memcpy(to.to + n * r, from[r] + at, n);
    to.to += n * rows;
}

constexpr uint8_t no_block[210] = {};  // of a row that is not there

// Scale and minimum of sub-block j, of 12 bytes of Q4_K and Q5_K.
void scale_and_min(const uint8_t* from, int j, uint8_t* scale, uint8_t* min) {
    if (j < 4) {
        *scale = from[j] & 63, *min = from[j + 4] & 63;
    } else {
        *scale = (from[j + 4] & 15) | (from[j - 4] >> 6) << 4, *min = from[j + 4] >> 4 | (from[j] >> 6) << 4;
    }
}

template <int rows> void lay_out_q45_k(bool five_bits, const uint8_t* const* from, Writer<rows>& to) {
    uint8_t six[4][4 * rows];  // scales 0 to 3 and 4 to 7, mins 0 to 3 and 4 to 7
    for (int r = 0; r < rows; r++) {
        for (int j = 0; j < 8; j++) scale_and_min(from[r] + 4, j, &six[j / 4][4 * r + j % 4], &six[2 + j / 4][4 * r + j % 4]);
    }
    take<2>(to, from, 0), take<2>(to, from, 2);
    to.sixes(six);
    for (int t = 0; t < (five_bits ? 40 : 32); t++) take<4>(to, from, 16 + 4 * t);  // fifth bits lie first here, too
}

template <int rows> void lay_out_q6_k(const uint8_t* const* from, Writer<rows>& to, Writer<rows>& ds) {
    to.sub_blocks(from, 192);
    for (int p = 0; p < 4; p++) {
        const int half = p / 2;
        for (int t = 4 * (p % 2); t < 4 * (p % 2) + 4; t++) {
            take<4>(to, from, 64 * half + 4 * t), take<4>(to, from, 64 * half + 32 + 4 * t);
            take<4>(to, from, 128 + 32 * half + 4 * t);
        }
    }
    take<2>(ds, from, 208);
}

// Bits first, first + 4, first + 8 ... of 32.
uint8_t every_fourth_bit(const uint8_t* from, int first) {
    uint32_t bits;
    std::memcpy(&bits, from, 4);
    bits = bits >> first & 0x11111111;
    bits = (bits | bits >> 3) & 0x03030303;
    bits = (bits | bits >> 6) & 0x000f000f;
    return static_cast<uint8_t>(bits | bits >> 12);
}

template <int rows> void lay_out_q3_k(const uint8_t* const* from, Writer<rows>& to, Writer<rows>& ds) {
    uint8_t scales[4][4 * rows];
    for (int r = 0; r < rows; r++) {
        const uint8_t* packed = from[r] + 96;
        for (int b = 0; b < 16; b++) {
            const int low = packed[b % 8] >> (b < 8 ? 0 : 4) & 15, high = packed[8 + b % 4] >> b / 4 * 2 & 3;
            scales[b / 8 * 2 + b % 2][4 * r + b % 8 / 2] = static_cast<uint8_t>(low | high << 4);
        }
    }
    to.sixes(scales);
    for (int p = 0; p < 4; p++) {
        const int h = p / 2, l = p % 2;
        for (int u = 0; u < 2; u++) {
            to.bytes([&](int r, int c) {
                const uint8_t* bits = from[r] + 16 * l + 8 * u + c;
                return (bits[0] >> 4 * h & 15) | (bits[4] >> 4 * h & 15) << 4;
            });
        }
        for (int t = 0; t < 4; t++) take<4>(to, from, 32 + 32 * h + 16 * l + 4 * t);
    }
    take<2>(ds, from, 108);
}

template <int rows> void lay_out_q2_k(const uint8_t* const* from, Writer<rows>& to, Writer<rows>& ds) {
    to.sub_blocks(from, 0);
    for (int p = 0; p < 4; p++) {
        for (int t = 0; t < 4; t++) take<4>(to, from, 16 + p / 2 * 32 + p % 2 * 16 + 4 * t);
    }
    take<2>(ds, from, 80), take<2>(ds, from, 82);
}

template <int rows> void lay_out_iq4_xs(const uint8_t* const* from, Writer<rows>& to) {
    take<2>(to, from, 0);
    for (int r = 0; r < rows; r++) {
        const int packed = from[r][2] | from[r][3] << 8;
        auto high = [&](int j) { return packed >> 2 * j & 3; };
        for (int c = 0; c < 2; c++) {
            *to.to++ = static_cast<uint8_t>(high(c + 2) | high(c + 6) << 2 | high(c) << 4 | high(c + 4) << 6);
        }
    }
    to.bytes([&](int r, int c) {
        auto nibble = [&](int j) { return from[r][4 + j / 2] >> j % 2 * 4 & 15; };
        return nibble(c) | nibble(c + 4) << 4;
    });
    for (int t = 0; t < 32; t++) take<4>(to, from, 8 + 4 * t);
}

template <int rows> void lay_out_small(Format format, const uint8_t* const* from, Writer<rows>& to, Writer<rows>& ds) {
    const int behind = static_cast<int>(block_size(format).behind);  // lies before the quants
    const bool five_bits = format == Format::q5_0 || format == Format::q5_1;
    if (five_bits) to.bytes([&](int r, int c) { return every_fourth_bit(from[r] + behind, c); });
    for (int t = 0; t < (format == Format::q8_0 ? 8 : 4); t++) take<4>(to, from, behind + (five_bits ? 4 : 0) + 4 * t);
    if (behind == 1) take<1>(ds, from, 0);
    for (int at = 0; at + 2 <= behind; at += 2) take<2>(ds, from, at);
}

template <int rows> void lay_out_group(Format format, int64_t n_values, const uint8_t* from, int64_t n_rows, uint8_t* to) {
    const BlockSize size = block_size(format);
    const int64_t n_blocks = n_values / size.values;
    Writer<rows> blocks{to}, ds{to + n_blocks * rows * (size.bytes - size.behind)};
    for (int64_t b = 0; b < n_blocks; b++) {
        const uint8_t* row[rows];
        for (int r = 0; r < rows; r++) row[r] = r < n_rows ? from + (r * n_blocks + b) * size.bytes : no_block;
        switch (format) {
            case Format::q4_k:
            case Format::q5_k: lay_out_q45_k<rows>(format == Format::q5_k, row, blocks); break;
            case Format::q6_k: lay_out_q6_k<rows>(row, blocks, ds); break;
            case Format::q3_k: lay_out_q3_k<rows>(row, blocks, ds); break;
            case Format::q2_k: lay_out_q2_k<rows>(row, blocks, ds); break;
            case Format::iq4_xs: lay_out_iq4_xs<rows>(row, blocks); break;
            default: lay_out_small<rows>(format, row, blocks, ds);
        }
    }
    std::memset(ds.to, 0, to + group_bytes(format, n_values, rows) - ds.to);
}

}  // namespace

void lay_out(
    Format format, int64_t n_values, int64_t n_rows, int rows, int64_t first, int64_t end, const uint8_t* from, uint8_t* to) {
    const BlockSize size = block_size(format);
    for (int64_t g = first; g < end; g++) {
        const uint8_t* from_rows = from + g * rows * (n_values / size.values) * size.bytes;
        uint8_t* to_group = to + g * group_bytes(format, n_values, rows);
        if (rows == 8) lay_out_group<8>(format, n_values, from_rows, n_rows - 8 * g, to_group);
        else lay_out_group<16>(format, n_values, from_rows, n_rows - 16 * g, to_group);
    }
}

}  // namespace cpuchat
