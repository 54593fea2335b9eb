// llama.cpp reads the cache once for every token and every head of a pass. Here the heads that share keys and values, and
// all tokens, are rows that go over the same cells together, up to six at a time:
//
//     cache of a KV head    | part of 512 cells                 | part ...
//     tile: up to six rows  | block of 64 cells | block | ...   |
//
// A row goes over the blocks of a part in order, with the maximum of the scores so far; then its parts are merged in
// order. So a row has the same bits whatever the other rows and the number of threads. Where there are tiles enough for
// all threads, each takes some with all their parts, and one part after the other, so that it stays in the L2 cache.
#include "floats.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ggml-cpu-impl.h"

namespace cpuchat {
namespace {

constexpr int64_t part_cells = 512, tiles_at_once = 8;
constexpr int block_cells = 64, most_values = 256, most_rows = 6;
using Half = uint16_t;
constexpr Half minus_infinity = 0xfc00;

// Up to `most_rows` rows of a KV head, in a sequence of the pass.
struct Tile {
    int64_t sequence, kv_head, first, n_rows;
};

struct Shape {
    const ggml_tensor *q, *k, *v, *mask;
    int64_t n_values, n_heads, n_kv_heads, n_cells, n_shared, n_rows, n_tiles, n_parts;  // tiles of a KV head
    int64_t all_tiles;  // of all KV heads of all sequences, each of which has cells of its own
    float scale;

    explicit Shape(const ggml_tensor* op) : q(op->src[0]), k(op->src[1]), v(op->src[2]), mask(op->src[3]) {
        n_values = q->ne[0], n_heads = q->ne[2], n_kv_heads = k->ne[2], n_cells = k->ne[1];
        n_shared = n_heads / n_kv_heads, n_parts = (n_cells + part_cells - 1) / part_cells;
        n_rows = q->ne[1] * n_shared, n_tiles = (n_rows + most_rows - 1) / most_rows, all_tiles = n_tiles * n_kv_heads * q->ne[3];
        memcpy(&scale, op->op_params, sizeof scale);
    }
    // Rows of a KV head are ordered by token, then head.
    int64_t token(int64_t row) const { return row / n_shared; }
    int64_t head(int64_t kv_head, int64_t row) const { return kv_head * n_shared + row % n_shared; }
    // Tile i of all KV heads of all sequences, one head after the other.
    Tile tile(int64_t i) const {
        const int64_t first = i % n_tiles * most_rows, head = i / n_tiles;
        return {head / n_kv_heads, head % n_kv_heads, first, std::min<int64_t>(most_rows, n_rows - first)};
    }

    // What a row has found in a part: its maximum, the sum of its weights, and from 8 on the weighted values.
    int64_t found_floats() const { return n_values + 8; }
    int64_t tile_floats() const { return most_rows * found_floats(); }
    bool has_tiles_enough(int64_t n_threads) const { return all_tiles >= 2 * n_threads; }
};

const char* at(const ggml_tensor* t, int64_t i1, int64_t i2, int64_t i3) {
    return static_cast<const char*>(t->data) + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
}

__m256 halves(const char* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

#define AVX512 __attribute__((target("avx512f,avx512dq,avx512vl")))
const bool has_avx512 = (__builtin_cpu_init(), __builtin_cpu_supports("avx512dq")) && __builtin_cpu_supports("avx512vl");

// 8 values at `p`, and 8 that lie `apart` bytes behind them.
AVX512 inline __m512 halves_of_two(const char* p, int64_t apart) {
    const auto *first = reinterpret_cast<const __m128i*>(p), *second = reinterpret_cast<const __m128i*>(p + apart);
    return _mm512_cvtph_ps(_mm256_set_m128i(_mm_loadu_si128(second), _mm_loadu_si128(first)));
}

float sum_of(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_hadd_ps(s, s);
    return _mm_cvtss_f32(_mm_hadd_ps(s, s));
}

// Of four at once, each in the order of `sum_of`.
__m128 sums_of(__m256 a, __m256 b, __m256 c, __m256 d) {
    auto half = [](__m256 v) { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); };
    return _mm_hadd_ps(_mm_hadd_ps(half(a), half(b)), _mm_hadd_ps(half(c), half(d)));
}

AVX512 inline __m128 sums_of(__m512 a, __m512 b) {
    return sums_of(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1), _mm512_castps512_ps256(b), _mm512_extractf32x8_ps(b, 1));
}

// Of a multiple of 8.
float max_of(const float* values, int n) {
    __m256 most = _mm256_load_ps(values);
    for (int i = 8; i < n; i += 8) most = _mm256_max_ps(most, _mm256_load_ps(values + i));
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, most);
    return *std::max_element(lanes, lanes + 8);
}

// e to the power of up to 0, within 2e-7; 0 below -87, and NaN of a NaN, which the maximum has as its second. Range
// reduction and polynomial as in Cephes' expf.
__m256 exponential(__m256 x) {
    const __m256 low = _mm256_set1_ps(-87.0f), is_zero = _mm256_cmp_ps(x, low, _CMP_LT_OQ);
    x = _mm256_max_ps(low, x);
    const __m256 k = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(k, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(k, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
    }
    p = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(p, r), r, r), _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(k), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(is_zero, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

// R rows of one KV head, and what they have found in a part so far.
template <int R> struct Rows {
    alignas(32) float q[R][most_values];
    alignas(32) float scores[R][block_cells];
    const Half* masks[R];
    float* to[R];  // maximum, sum, ..., values from 8 on

    void score(const Shape& s, const char* k, int64_t first, int n) {
        for (int c = 0; !has_avx512 && c < n; c += 2) {  // two cells share each load of a row
            const char *k0 = k + c * s.k->nb[1], *k1 = k0 + s.k->nb[1];
            __m256 a[R], b[R];
            for (int i = 0; i < R; i++) a[i] = b[i] = _mm256_setzero_ps();
            for (int64_t d = 0; d < s.n_values; d += 8) {
                const __m256 x = halves(k0 + 2 * d), y = halves(k1 + 2 * d);
                for (int i = 0; i < R; i++) {
                    const __m256 w = _mm256_load_ps(q[i] + d);
                    a[i] = _mm256_fmadd_ps(x, w, a[i]), b[i] = _mm256_fmadd_ps(y, w, b[i]);
                }
            }
            for (int i = 0; i < R; i++) _mm_storel_pi(reinterpret_cast<__m64*>(scores[i] + c), sums_of(a[i], b[i], a[i], b[i]));
        }
        if (has_avx512) dot_avx512(s, k, n);
        for (int i = 0; i < R; i++) {
            std::fill(scores[i] + n, scores[i] + block_cells, -INFINITY);
            for (int c = 0; masks[i] && c < n; c += 8) {
                const __m256 mask = halves(reinterpret_cast<const char*>(masks[i] + first + c));
                _mm256_store_ps(scores[i] + c, _mm256_add_ps(_mm256_load_ps(scores[i] + c), mask));
            }
        }
    }
    // The same with two cells in each vector, of which every lane adds what it does above.
    AVX512 void dot_avx512(const Shape& s, const char* k, int n) {
        const int64_t apart = s.k->nb[1];
        for (int c = 0; c < n; c += 4) {
            const char* cell = k + c * apart;
            __m512 a[R], b[R];
            for (int i = 0; i < R; i++) a[i] = b[i] = _mm512_setzero_ps();
            for (int64_t d = 0; d < s.n_values; d += 8, cell += 16) {
                const __m512 x = halves_of_two(cell, apart), y = halves_of_two(cell + 2 * apart, apart);
                for (int i = 0; i < R; i++) {
                    const __m512 w = _mm512_broadcast_f32x8(_mm256_load_ps(q[i] + d));
                    a[i] = _mm512_fmadd_ps(x, w, a[i]), b[i] = _mm512_fmadd_ps(y, w, b[i]);
                }
            }
            for (int i = 0; i < R; i++) _mm_store_ps(scores[i] + c, sums_of(a[i], b[i]));
        }
    }
    // Turns scores into weights, and scales what was found before to the new maximum.
    void weigh(const Shape& s, int i) {
        float* found = to[i];
        const float most = max_of(scores[i], block_cells), top = std::max(found[0], most);
        const __m256 shift = _mm256_set1_ps(top == -INFINITY ? 0.0f : top);
        __m256 sum = _mm256_setzero_ps();
        for (int c = 0; c < block_cells; c += 8) {
            const __m256 e = exponential(_mm256_sub_ps(_mm256_load_ps(scores[i] + c), shift));
            _mm256_store_ps(scores[i] + c, e);
            sum = _mm256_add_ps(sum, e);
        }
        if (top > found[0]) {
            const float factor = found[0] == -INFINITY ? 0.0f : std::exp(found[0] - top);
            for (int64_t d = 8; d < 8 + s.n_values; d++) found[d] *= factor;
            found[0] = top, found[1] *= factor;
        }
        found[1] += sum_of(sum);
    }
    void add_values(const Shape& s, const char* v, int n) {
        int64_t d = has_avx512 ? add_values_avx512(s, v, n) : 0;
        for (; d < s.n_values; d += 16) {
            __m256 a[R], b[R];
            for (int i = 0; i < R; i++) a[i] = _mm256_loadu_ps(to[i] + 8 + d), b[i] = _mm256_loadu_ps(to[i] + 16 + d);
            for (int c = 0; c < n; c++) {
                const char* cell = v + c * s.v->nb[1] + 2 * d;
                const __m256 x = halves(cell), y = halves(cell + 16);
                for (int i = 0; i < R; i++) {
                    const __m256 w = _mm256_broadcast_ss(&scores[i][c]);
                    a[i] = _mm256_fmadd_ps(x, w, a[i]), b[i] = _mm256_fmadd_ps(y, w, b[i]);
                }
            }
            for (int i = 0; i < R; i++) _mm256_storeu_ps(to[i] + 8 + d, a[i]), _mm256_storeu_ps(to[i] + 16 + d, b[i]);
        }
    }
    // Returns how many values were added: a multiple of 32.
    AVX512 int64_t add_values_avx512(const Shape& s, const char* v, int n) {
        int64_t d = 0;
        for (; d + 32 <= s.n_values; d += 32) {
            __m512 a[R], b[R];
            for (int i = 0; i < R; i++) a[i] = _mm512_loadu_ps(to[i] + 8 + d), b[i] = _mm512_loadu_ps(to[i] + 24 + d);
            for (int c = 0; c < n; c++) {
                const char* cell = v + c * s.v->nb[1] + 2 * d;
                const __m512 x = halves_of_two(cell, 16), y = halves_of_two(cell + 32, 16);
                for (int i = 0; i < R; i++) {
                    const __m512 w = _mm512_set1_ps(scores[i][c]);
                    a[i] = _mm512_fmadd_ps(x, w, a[i]), b[i] = _mm512_fmadd_ps(y, w, b[i]);
                }
            }
            for (int i = 0; i < R; i++) _mm512_storeu_ps(to[i] + 8 + d, a[i]), _mm512_storeu_ps(to[i] + 24 + d, b[i]);
        }
        return d;
    }
};

bool is_hidden(const Half* mask, int64_t first, int n) {
    return mask && std::all_of(mask + first, mask + first + n, [](Half one) { return one == minus_infinity; });
}

// The R rows of a tile over one part; what they find goes to `to`.
template <int R> void run(const Shape& s, int64_t part, const Tile& tile, float* to) {
    Rows<R> rows;
    for (int i = 0; i < R; i++) {
        const int64_t token = s.token(tile.first + i);
        const float* q = reinterpret_cast<const float*>(at(s.q, token, s.head(tile.kv_head, tile.first + i), tile.sequence));
        for (int64_t d = 0; d < s.n_values; d++) rows.q[i][d] = q[d] * s.scale;
        rows.masks[i] = s.mask ? reinterpret_cast<const Half*>(at(s.mask, token, 0, tile.sequence)) : nullptr;
        rows.to[i] = to + i * s.found_floats();
        std::fill_n(rows.to[i], s.found_floats(), 0.0f);
        rows.to[i][0] = -INFINITY;
    }
    for (int64_t cell = part * part_cells, end = std::min(s.n_cells, cell + part_cells); cell < end; cell += block_cells) {
        const int n = static_cast<int>(std::min<int64_t>(block_cells, end - cell));
        if (std::all_of(rows.masks, rows.masks + R, [&](const Half* mask) { return is_hidden(mask, cell, n); })) continue;
        rows.score(s, at(s.k, cell, tile.kv_head, tile.sequence), cell, n);
        for (int i = 0; i < R; i++) rows.weigh(s, i);
        rows.add_values(s, at(s.v, cell, tile.kv_head, tile.sequence), n);
    }
}

void run_tile(const Shape& s, int64_t part, const Tile& tile, float* to) {
    static constexpr decltype(&run<1>) by_rows[] = {run<1>, run<2>, run<3>, run<4>, run<5>, run<6>};
    by_rows[tile.n_rows - 1](s, part, tile, to);
}

// Adds what the rows of a tile have found in the next part to what they have found before.
void add_part(const Shape& s, int64_t n_rows, float* total, const float* found) {
    for (int64_t row = 0; row < n_rows; row++, total += s.found_floats(), found += s.found_floats()) {
        if (found[1] == 0) continue;
        const float top = std::max(total[0], found[0]);
        const float before = total[0] == -INFINITY ? 0.0f : std::exp(total[0] - top), now = std::exp(found[0] - top);
        total[0] = top, total[1] = before * total[1] + now * found[1];
        for (int64_t d = 8; d < s.found_floats(); d++) total[d] = before * total[d] + now * found[d];
    }
}

void write_results(const Shape& s, const Tile& tile, const float* total, float* results) {
    for (int64_t row = tile.first; row < tile.first + tile.n_rows; row++, total += s.found_floats()) {
        const int64_t token = tile.sequence * s.q->ne[1] + s.token(row);
        float* out = results + (token * s.n_heads + s.head(tile.kv_head, row)) * s.n_values;
        for (int64_t d = 0; d < s.n_values; d++) out[d] = total[1] == 0 ? 0.0f : total[8 + d] / total[1];
    }
}

// Tiles `first` to `end` with all their parts. `memory` is for one tile more.
void run_tiles(const Shape& s, int64_t first, int64_t end, float* memory, float* results) {
    float* found = memory + (end - first) * s.tile_floats();
    for (int64_t part = 0; part < s.n_parts; part++) {
        for (int64_t i = first; i < end; i++) {
            float* total = memory + (i - first) * s.tile_floats();
            run_tile(s, part, s.tile(i), part ? found : total);
            if (part) add_part(s, s.tile(i).n_rows, total, found);
        }
    }
    for (int64_t i = first; i < end; i++) write_results(s, s.tile(i), memory + (i - first) * s.tile_floats(), results);
}

}  // namespace

bool is_attention_covered(const ggml_tensor* op) {
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    float special[2];  // ALiBi's bias and the cap of the scores
    memcpy(special, op->op_params + 1, sizeof special);
    return q->type == GGML_TYPE_F32 && k->type == GGML_TYPE_F16 && v->type == GGML_TYPE_F16 && !op->src[4] &&
           special[0] == 0 && special[1] == 0 && k->ne[3] == q->ne[3] && v->ne[3] == q->ne[3] &&
           q->ne[0] == k->ne[0] && q->ne[0] == v->ne[0] && q->ne[0] % 16 == 0 && q->ne[0] <= most_values &&
           k->ne[2] == v->ne[2] && q->ne[2] % k->ne[2] == 0 && k->ne[1] % 8 == 0 && k->nb[0] == 2 && v->nb[0] == 2 &&
           (!mask || (mask->type == GGML_TYPE_F16 && mask->ne[2] == 1 && mask->ne[3] == q->ne[3]));
}

size_t attention_bytes(const ggml_tensor* op, int n_threads) {
    const Shape s(op);
    const int64_t in_parts = s.has_tiles_enough(n_threads) ? 0 : s.all_tiles * s.n_parts;
    return std::max(n_threads * (tiles_at_once + 1), in_parts) * s.tile_floats() * sizeof(float);
}

void attend(const ggml_compute_params* params, ggml_tensor* op) {
    const Shape s(op);
    float *memory = static_cast<float*>(params->wdata), *results = static_cast<float*>(op->data);
    const int64_t n_tiles = s.all_tiles, at_once = std::clamp<int64_t>(n_tiles / (2 * params->nth), 1, tiles_at_once);
    const bool whole = s.has_tiles_enough(params->nth);
    const int64_t n_units = whole ? (n_tiles + at_once - 1) / at_once : n_tiles * s.n_parts;
    if (params->ith == 0) ggml_threadpool_chunk_set(params->threadpool, params->nth);
    ggml_barrier(params->threadpool);
    for (int64_t unit = params->ith; unit < n_units; unit = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        if (whole) {
            float* own = memory + params->ith * (tiles_at_once + 1) * s.tile_floats();
            run_tiles(s, unit * at_once, std::min(n_tiles, (unit + 1) * at_once), own, results);
        } else {  // all tiles of a part, which is in a cache, before the next part
            const int64_t head = unit / s.n_tiles / s.n_parts, part = unit / s.n_tiles % s.n_parts;
            const int64_t i = head * s.n_tiles + unit % s.n_tiles;
            run_tile(s, part, s.tile(i), memory + (i * s.n_parts + part) * s.tile_floats());
        }
    }
    if (whole) return;
    ggml_barrier(params->threadpool);
    for (int64_t i = params->ith; i < n_tiles; i += params->nth) {
        float* total = memory + i * s.n_parts * s.tile_floats();
        for (int64_t part = 1; part < s.n_parts; part++) add_part(s, s.tile(i).n_rows, total, total + part * s.tile_floats());
        write_results(s, s.tile(i), total, results);
    }
}

bool is_float_product_covered(const ggml_tensor* op) {
    const ggml_tensor *weights = op->src[0], *x = op->src[1];
    const bool is_rotation = op->op_params[1] == GGML_HINT_SRC0_IS_HADAMARD;  // llama.cpp's takes fewer steps
    return op->op == GGML_OP_MUL_MAT && !is_rotation && weights->type == GGML_TYPE_F32 && weights->op == GGML_OP_NONE &&
           x->type == GGML_TYPE_F32 && weights->ne[2] == 1 && weights->ne[3] == 1 && weights->ne[0] % 8 == 0 &&
           ggml_is_contiguous(weights) && ggml_is_contiguous(x);
}

void multiply_floats(const ggml_compute_params* params, ggml_tensor* op) {
    const ggml_tensor *weights = op->src[0], *x = op->src[1];
    const int64_t n_values = weights->ne[0], n_rows = weights->ne[1], n_tokens = ggml_nrows(x);
    const int64_t n_tiles = (n_rows + 3) / 4, first = n_tiles * params->ith / params->nth, end = n_tiles * (params->ith + 1) / params->nth;
    constexpr int64_t at_once = 16;  // tokens, whose values stay in the L2 cache
    for (int64_t tokens = 0; tokens < n_tokens; tokens += at_once) {
        for (int64_t row = 4 * first; row < std::min(4 * end, n_rows); row += 4) {
            const int64_t n = std::min<int64_t>(4, n_rows - row);
            const float* rows[4];
            for (int64_t i = 0; i < 4; i++) rows[i] = static_cast<const float*>(weights->data) + (row + i % n) * n_values;
            for (int64_t token = tokens; token < std::min(n_tokens, tokens + at_once); token++) {
                const float* values = static_cast<const float*>(x->data) + token * n_values;
                __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
                for (int64_t d = 0; d < n_values; d += 8) {
                    const __m256 v = _mm256_loadu_ps(values + d);
                    for (int i = 0; i < 4; i++) sums[i] = _mm256_fmadd_ps(_mm256_loadu_ps(rows[i] + d), v, sums[i]);
                }
                for (int64_t i = 0; i < n; i++) static_cast<float*>(op->data)[token * n_rows + row + i] = sum_of(sums[i]);
            }
        }
    }
}

}  // namespace cpuchat
