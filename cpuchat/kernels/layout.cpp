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

template <int rows> void lay_out_small(Format format, const uint8_t* const* from, Writer& to, Writer& ds) {
    const int quants = format == Format::q5_0 ? 6 : 2;
    for (int r = 0; format == Format::q5_0 && r < rows; r++) {
        uint8_t bits[4];
        for (int c = 0; c < 4; c++) bits[c] = every_fourth_bit(from[r] + 2, c);
        to.dword(bits);
    }
    for (int t = 0; t < (format == Format::q8_0 ? 8 : 4); t++) {
        for (int r = 0; r < rows; r++) to.dword(from[r] + quants + 4 * t);
    }
    for (int r = 0; r < rows; r++) ds.half(from[r]);
}

template <int rows>
void lay_out_group(Format format, int64_t n_values, const uint8_t* from, size_t row_bytes, int n_rows, uint8_t* to) {
    const int64_t n_blocks = n_values / block_values(format);
    const size_t bytes = block_bytes(format), end = group_bytes(format, n_values, rows);
    const bool has_ds = format != Format::q4_k && format != Format::q5_k;
    Writer blocks{to}, ds{to + n_blocks * rows * (bytes - 2)};
    for (int64_t b = 0; b < n_blocks; b++) {
        const uint8_t* row[rows];
        for (int r = 0; r < rows; r++) row[r] = r < n_rows ? from + r * row_bytes + b * bytes : no_block;
        if (format == Format::q6_k) lay_out_q6_k<rows>(row, blocks, ds);
        else if (has_ds) lay_out_small<rows>(format, row, blocks, ds);
        else lay_out_q45_k<rows>(format == Format::q5_k, row, blocks);
    }
    uint8_t* written = has_ds ? ds.to : blocks.to;
    std::memset(written, 0, to + end - written);
}

}  // namespace

void lay_out(Format format, int64_t n_values, int rows, const uint8_t* from, size_t row_bytes, int n_rows, uint8_t* to) {
    if (rows == 8) lay_out_group<8>(format, n_values, from, row_bytes, n_rows, to);
    else lay_out_group<16>(format, n_values, from, row_bytes, n_rows, to);
}

}  // namespace cpuchat
