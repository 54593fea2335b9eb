// Compares the products of the kernels with plain scalar ones, bit by bit: of a case that a test wrote (its "case.bin").
//
//     check_products CASE INSTRUCTION_SET...
//
// A case is int64 format, values, rows, tokens, bytes of a row, whether there are minimums; then the rows as ggml's blocks;
// of each value its weight as an integer and its minimum (int16 each); of each block its scale and the minimums' (float);
// the activations (float).
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "formats.h"

using namespace cpuchat;

namespace {

// Memory whose bounds the sanitizer knows, on a cache line.
struct Lines {
    explicit Lines(size_t bytes) : at(static_cast<uint8_t*>(aligned_alloc(64, (bytes + 63) / 64 * 64))) {}
    ~Lines() { free(at); }
    Lines(const Lines&) = delete;
    uint8_t* at;
};

struct Case {
    int64_t format, n_values, n_rows, n_tokens, row_bytes, has_minimums;
    std::vector<uint8_t> raw;
    std::vector<int16_t> weights, minimums;
    std::vector<float> scales, scales_of_minimums, x;

    Format kind() const { return static_cast<Format>(format); }
    int64_t n_blocks() const { return n_values / block_values(kind()); }
};

template <class T> void read(std::ifstream& file, std::vector<T>& to, int64_t n) {
    to.resize(n);
    file.read(reinterpret_cast<char*>(to.data()), n * sizeof(T));
}

Case read_case(const char* name) {
    std::ifstream file(name, std::ios::binary);
    Case c;
    file.read(reinterpret_cast<char*>(&c), 6 * sizeof(int64_t));
    read(file, c.raw, c.n_rows * c.row_bytes);
    read(file, c.weights, c.n_rows * c.n_values), read(file, c.minimums, c.n_rows * c.n_values);
    read(file, c.scales, c.n_rows * c.n_blocks()), read(file, c.scales_of_minimums, c.n_rows * c.n_blocks());
    read(file, c.x, c.n_tokens * c.n_values);
    if (!file || file.peek() != EOF) printf("%s is not a case\n", name), exit(2);
    return c;
}

// Activations as signed bytes, with a scale for each block.
struct Quantized {
    std::vector<int8_t> quants;
    std::vector<float> scales;
};

Quantized quantized(const Case& c) {
    const int per = block_values(c.kind());
    Quantized to;
    for (size_t at = 0; at < c.x.size(); at += per) {
        float top = 0;
        for (int i = 0; i < per; i++) top = std::max(top, std::fabs(c.x[at + i]));
        const bool is_zero = !(top > 1e-30f);
        const float inverse = is_zero ? 0 : 127.0f / top;
        to.scales.push_back(is_zero ? 0 : top / 127.0f);
        for (int i = 0; i < per; i++) to.quants.push_back(static_cast<int8_t>(std::nearbyint(c.x[at + i] * inverse)));
    }
    return to;
}

// Exact integers in a block, then one multiply-add, and one for the minimums, in the order of the blocks.
float product(const Case& c, const Quantized& x, int64_t row, int64_t token) {
    const int per = block_values(c.kind());
    float result = 0;
    for (int64_t b = 0; b < c.n_blocks(); b++) {
        int64_t sum = 0, sum_of_minimums = 0;
        for (int i = 0; i < per; i++) {
            const int64_t at = row * c.n_values + b * per + i;
            const int quant = x.quants[token * c.n_values + b * per + i];
            sum += quant * c.weights[at], sum_of_minimums += quant * c.minimums[at];
        }
        const float scale = x.scales[token * c.n_blocks() + b];
        const size_t block = row * c.n_blocks() + b;
        result = std::fma(static_cast<float>(sum), c.scales[block] * scale, result);
        if (c.has_minimums) result = std::fma(-static_cast<float>(sum_of_minimums), c.scales_of_minimums[block] * scale, result);
    }
    return result;
}

// What the kernels work on.
struct LaidOut {
    LaidOut(const Case& c, int rows)
        : n_groups((c.n_rows + rows - 1) / rows), bytes(group_bytes(c.kind(), c.n_values, rows)), weights(n_groups * bytes),
          quants(c.n_tokens * c.n_values), blocks(c.n_tokens * c.n_blocks() * activation_block(c.kind())) {
        lay_out(c.kind(), c.n_values, c.n_rows, rows, 0, n_groups, c.raw.data(), weights.at);
        quantize(c.kind(), c.n_tokens * c.n_values, c.x.data(), reinterpret_cast<int8_t*>(quants.at), blocks.at);
    }
    Activations activations(const Case& c) const { return {reinterpret_cast<const int8_t*>(quants.at), blocks.at, c.n_values}; }
    int64_t n_groups;
    size_t bytes;
    Lines weights, quants, blocks;
};

// The activations of a wide pass, in tiles, whose last one may lack some.
struct InTiles {
    InTiles(const Case& c, int64_t token, int width)
        : n((width + tile_tokens - 1) / tile_tokens * tile_tokens), quants(n * c.n_values),
          blocks(n * c.n_blocks() * activation_block(c.kind())), x{reinterpret_cast<const int8_t*>(quants.at), blocks.at, c.n_values} {
        for (int64_t i = 0; i < n; i++) {
            const int64_t lane = i % tile_tokens, first = i - lane;
            const float* values = i < width ? &c.x[(token + i) * c.n_values] : nullptr;
            quantize(c.kind(), c.n_values, values, reinterpret_cast<int8_t*>(quants.at) + first * c.n_values,
                     blocks.at + first * c.n_blocks() * activation_block(c.kind()), tile_tokens, lane);
        }
    }
    int64_t n;
    Lines quants, blocks;
    Activations x;
};

// Passes of `width` tokens over all tokens; every result against `expected`. Returns the number of those that differ.
int n_different(const Case& c, const Products& table, const LaidOut& laid, int width, const std::vector<float>& expected) {
    const Activations x = laid.activations(c);
    int n = 0;
    for (int64_t token = 0; token + width <= c.n_tokens; token += width) {
        const InTiles in_tiles(c, token, width);
        for (int64_t g = 0; g < laid.n_groups; g++) {
            std::vector<float> results(width * table.rows, NAN);
            std::vector<float*> out;
            for (int i = 0; i < width; i++) out.push_back(&results[i * table.rows]);
            const uint8_t* group = laid.weights.at + g * laid.bytes;
            if (width > table.tile) table.wide.of[c.format](group, in_tiles.x, 0, width, out.data());
            else table.of[c.format][width]({group, 0, 0}, x, token, out.data());
            for (int64_t i = 0; i < width; i++) {
                for (int64_t r = 0; r < table.rows; r++) {
                    const int64_t row = g * table.rows + r;
                    const float wanted = row < c.n_rows ? expected[(token + i) * c.n_rows + row] : 0;
                    n += std::memcmp(&wanted, &results[i * table.rows + r], sizeof wanted) != 0;
                }
            }
        }
    }
    return n;
}

}  // namespace

int main(int n_arguments, char** arguments) {
#ifdef SYS_arch_prctl
    syscall(SYS_arch_prctl, 0x1023, 18);  // the kernel's permission for AMX
#endif
    const Case c = read_case(arguments[1]);
    const Quantized x = quantized(c);
    std::vector<float> expected;
    for (int64_t token = 0; token < c.n_tokens; token++) {
        for (int64_t row = 0; row < c.n_rows; row++) expected.push_back(product(c, x, row, token));
    }
    int n_failed = 0;
    const Products amx = with_amx();
    for (const Products* table : {&avx2_products, &avx_vnni_products, &avx512_products, &amx}) {
        bool is_wanted = false;
        for (int i = 2; i < n_arguments; i++) is_wanted |= std::string(arguments[i]) == table->name;
        if (!is_wanted) continue;
        const LaidOut laid(c, table->rows);
        if (std::memcmp(laid.quants.at, x.quants.data(), x.quants.size())) n_failed++, printf("%s: activations differ\n", table->name);
        std::vector<int> widths;
        for (int width = 1; width <= table->tile; width++) widths.push_back(width);
        for (int width : {table->wide.from, 37, 48, 49, 64, wide_tile}) {
            if (table->wide.of[c.format] && width >= table->wide.from && width <= c.n_tokens) widths.push_back(width);
        }
        for (int width : widths) {
            const int n = n_different(c, *table, laid, width, expected);
            if (n) n_failed++, printf("%s: %d results of passes of %d tokens differ\n", table->name, n, width);
        }
        printf("%s: compared\n", table->name);
    }
    return n_failed != 0;
}
