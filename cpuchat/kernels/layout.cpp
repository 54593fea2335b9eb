// Lays weights out for the products. Formats of blocks: ggml-common.h of llama.cpp.
#include <cstring>

#include "formats.h"

namespace cpuchat {
namespace {

// Writes vectors: a dword of each row, one row after the other.
struct Writer {
    uint8_t* to;
    void dword(const uint8_t* from) { std::memcpy(to, from, 4), to += 4; }
    void half(const uint8_t* from) { std::memcpy(to, from, 2), to += 2; }
};

constexpr uint8_t no_block[210] = {};  // of a row that is not there

// Scale and minimum of sub-block j, of 12 bytes of Q4_K and Q5_K.
void scale_and_min(const uint8_t* from, int j, uint8_t* scale, uint8_t* min) {
    if (j < 4) {
        *scale = from[j] & 63, *min = from[j + 4] & 63;
    } else {
        *scale = (from[j + 4] & 15) | (from[j - 4] >> 6) << 4, *min = from[j + 4] >> 4 | (from[j] >> 6) << 4;
    }
}

template <int rows> void lay_out_q45_k(bool five_bits, const uint8_t* const* from, Writer& to) {
    const int bits = 16, nibbles = five_bits ? 48 : 16;
    for (int r = 0; r < rows; r++) to.half(from[r]);
    for (int r = 0; r < rows; r++) to.half(from[r] + 2);
    uint8_t six[4][4 * rows];  // scales 0 to 3 and 4 to 7, mins 0 to 3 and 4 to 7
    for (int r = 0; r < rows; r++) {
        for (int j = 0; j < 8; j++) scale_and_min(from[r] + 4, j, &six[j / 4][4 * r + j % 4], &six[2 + j / 4][4 * r + j % 4]);
    }
    for (int v = 0; v < 3; v++) {
        for (int i = 0; i < 4 * rows; i++) *to.to++ = six[v][i] | (six[3][i] >> 2 * v & 3) << 6;
    }
    for (int t = 0; five_bits && t < 8; t++) {
        for (int r = 0; r < rows; r++) to.dword(from[r] + bits + 4 * t);
    }
    for (int t = 0; t < 32; t++) {
        for (int r = 0; r < rows; r++) to.dword(from[r] + nibbles + 4 * t);
    }
}

template <int rows> void lay_out_q6_k(const uint8_t* const* from, Writer& to, Writer& ds) {
    for (int p = 0; p < 4; p++) {
        for (int r = 0; r < rows; r++) {
            for (int c = 0; c < 4; c++) *to.to++ = from[r][192 + 8 * (p / 2) + p % 2 + 2 * c];
        }
    }
    for (int p = 0; p < 4; p++) {
        for (int t = 4 * (p % 2); t < 4 * (p % 2) + 4; t++) {
            const int half = p / 2;
            for (int r = 0; r < rows; r++) to.dword(from[r] + 64 * half + 4 * t);
            for (int r = 0; r < rows; r++) to.dword(from[r] + 64 * half + 32 + 4 * t);
            for (int r = 0; r < rows; r++) to.dword(from[r] + 128 + 32 * half + 4 * t);
        }
    }
    for (int r = 0; r < rows; r++) ds.half(from[r] + 208);
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

template <int rows> void lay_out_q3_k(const uint8_t* const* from, Writer& to, Writer& ds) {
    uint8_t scales[4][4 * rows];
    for (int r = 0; r < rows; r++) {
        const uint8_t* packed = from[r] + 96;
        for (int b = 0; b < 16; b++) {
            const int low = packed[b % 8] >> (b < 8 ? 0 : 4) & 15, high = packed[8 + b % 4] >> b / 4 * 2 & 3;
            scales[b / 8 * 2 + b % 2][4 * r + b % 8 / 2] = static_cast<uint8_t>(low | high << 4);
        }
    }
    for (int v = 0; v < 3; v++) {
        for (int i = 0; i < 4 * rows; i++) *to.to++ = scales[v][i] | (scales[3][i] >> 2 * v & 3) << 6;
    }
    for (int p = 0; p < 4; p++) {
        const int h = p / 2, l = p % 2;
        for (int u = 0; u < 2; u++) {
            for (int r = 0; r < rows; r++) {
                const uint8_t* bits = from[r] + 16 * l + 8 * u;
                for (int c = 0; c < 4; c++) *to.to++ = (bits[c] >> 4 * h & 15) | (bits[c + 4] >> 4 * h & 15) << 4;
            }
        }
        for (int t = 0; t < 4; t++) {
            for (int r = 0; r < rows; r++) to.dword(from[r] + 32 + 32 * h + 16 * l + 4 * t);
        }
    }
    for (int r = 0; r < rows; r++) ds.half(from[r] + 108);
}

template <int rows> void lay_out_q2_k(const uint8_t* const* from, Writer& to, Writer& ds) {
    for (int p = 0; p < 4; p++) {
        for (int r = 0; r < rows; r++) {
            for (int c = 0; c < 4; c++) *to.to++ = from[r][p / 2 * 8 + p % 2 + 2 * c];
        }
    }
    for (int p = 0; p < 4; p++) {
        for (int t = 0; t < 4; t++) {
            for (int r = 0; r < rows; r++) to.dword(from[r] + 16 + p / 2 * 32 + p % 2 * 16 + 4 * t);
        }
    }
    for (int r = 0; r < rows; r++) ds.half(from[r] + 80);
    for (int r = 0; r < rows; r++) ds.half(from[r] + 82);
}

template <int rows> void lay_out_iq4_xs(const uint8_t* const* from, Writer& to) {
    for (int r = 0; r < rows; r++) to.half(from[r]);
    uint8_t low[4 * rows];
    for (int r = 0; r < rows; r++) {
        const int packed = from[r][2] | from[r][3] << 8;
        auto high = [&](int j) { return packed >> 2 * j & 3; };
        auto nibble = [&](int j) { return from[r][4 + j / 2] >> j % 2 * 4 & 15; };
        for (int c = 0; c < 4; c++) low[4 * r + c] = static_cast<uint8_t>(nibble(c) | nibble(c + 4) << 4);
        for (int c = 0; c < 2; c++) {
            *to.to++ = static_cast<uint8_t>(high(c + 2) | high(c + 6) << 2 | high(c) << 4 | high(c + 4) << 6);
        }
    }
    std::memcpy(to.to, low, sizeof low), to.to += sizeof low;
    for (int t = 0; t < 32; t++) {
        for (int r = 0; r < rows; r++) to.dword(from[r] + 8 + 4 * t);
    }
}

template <int rows> void lay_out_small(Format format, const uint8_t* const* from, Writer& to, Writer& ds) {
    const size_t behind = block_size(format).behind;  // lies before the quants
    const bool five_bits = format == Format::q5_0 || format == Format::q5_1;
    for (int r = 0; five_bits && r < rows; r++) {
        uint8_t bits[4];
        for (int c = 0; c < 4; c++) bits[c] = every_fourth_bit(from[r] + behind, c);
        to.dword(bits);
    }
    for (int t = 0; t < (format == Format::q8_0 ? 8 : 4); t++) {
        for (int r = 0; r < rows; r++) to.dword(from[r] + behind + (five_bits ? 4 : 0) + 4 * t);
    }
    if (behind == 1) {
        for (int r = 0; r < rows; r++) *ds.to++ = *from[r];
    }
    for (size_t at = 0; at + 2 <= behind; at += 2) {
        for (int r = 0; r < rows; r++) ds.half(from[r] + at);
    }
}

template <int rows>
void lay_out_group(Format format, int64_t n_values, const uint8_t* from, size_t row_bytes, int n_rows, uint8_t* to) {
    const BlockSize size = block_size(format);
    const int64_t n_blocks = n_values / size.values;
    Writer blocks{to}, ds{to + n_blocks * rows * (size.bytes - size.behind)};
    for (int64_t b = 0; b < n_blocks; b++) {
        const uint8_t* row[rows];
        for (int r = 0; r < rows; r++) row[r] = r < n_rows ? from + r * row_bytes + b * size.bytes : no_block;
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

void lay_out(Format format, int64_t n_values, int rows, const uint8_t* from, size_t row_bytes, int n_rows, uint8_t* to) {
    if (rows == 8) lay_out_group<8>(format, n_values, from, row_bytes, n_rows, to);
    else lay_out_group<16>(format, n_values, from, row_bytes, n_rows, to);
}

}  // namespace cpuchat
