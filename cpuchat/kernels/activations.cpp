// Quantizes activations to signed bytes, with AVX2 on every CPU: one way, so one result.
#include "formats.h"
#include "simd.h"

namespace cpuchat {
namespace {

constexpr float least = 1e-30f;  // up to here 127 / x is infinite or nearly; such a block is zero

// The greatest absolute value of 32 floats, in each lane of one column. The bits of floats have their order as integers,
// and a NaN is above all numbers: so a block that has one becomes NaN, and the results do.
__m256i greatest(const float* x) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    auto load = [&](int i) { return _mm256_and_si256(magnitude, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 8 * i))); };
    return _mm256_max_epi32(_mm256_max_epi32(load(0), load(1)), _mm256_max_epi32(load(2), load(3)));
}

float greatest_lane(__m256i v) {
    v = _mm256_max_epi32(v, _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(4, 5, 6, 7, 0, 1, 2, 3)));
    v = _mm256_max_epi32(v, _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(2, 3, 0, 1, 6, 7, 4, 5)));
    v = _mm256_max_epi32(v, _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(1, 0, 3, 2, 5, 4, 7, 6)));
    const int32_t bits = _mm256_extract_epi32(v, 0);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Quantizes 32 floats; returns their sums in fours: lane i of those from 4 i on.
__m256i quantize_32(const float* x, float inverse, int8_t* to) {
    const __m256 scale = _mm256_set1_ps(inverse);
    auto load = [&](int i) { return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), scale)); };
    const __m256i words = _mm256_packs_epi16(_mm256_packs_epi32(load(0), load(1)), _mm256_packs_epi32(load(2), load(3)));
    const __m256i bytes = _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
}

// The sums of 16 and 16 of sums in fours.
void halves(__m256i fours, int32_t* low, int32_t* high) {
    const __m256i twos = _mm256_hadd_epi32(fours, fours);
    const __m256i ones = _mm256_hadd_epi32(twos, twos);
    *low = _mm256_extract_epi32(ones, 0), *high = _mm256_extract_epi32(ones, 4);
}

int32_t pair(int32_t low, int32_t high) { return (low & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(high) << 16); }

void quantize_256(const float* x, int8_t* to, Block256* block) {
    if (!x) return void(block->d = 0.0f);
    __m256i most = greatest(x);
    for (int i = 1; i < 8; i++) most = _mm256_max_epi32(most, greatest(x + 32 * i));
    const float top = greatest_lane(most);
    const float inverse = top <= least ? 0.0f : 127.0f / top;
    block->d = top <= least ? 0.0f : top / 127.0f;
    int32_t sums[16];
    for (int i = 0; i < 8; i++) halves(quantize_32(x + 32 * i, inverse, to + 32 * i), &sums[2 * i], &sums[2 * i + 1]);
    for (int k = 0; k < 4; k++) {
        const int b = 8 * (k / 2) + 2 * (k % 2);
        block->mins[k] = pair(sums[b] + sums[b + 1], sums[b + 4] + sums[b + 5]);
    }
    for (int p = 0; p < 4; p++) {
        const int b = 8 * (p / 2) + p % 2;
        block->offsets[2 * p] = pair(sums[b], sums[b + 4]);
        block->offsets[2 * p + 1] = pair(sums[b + 2], sums[b + 6]);
    }
}

}  // namespace

void quantize(Format format, int64_t n_values, const float* x, int8_t* quants, void* blocks, int width, int lane) {
    if (has_large_blocks(format)) {
        Block256* block = static_cast<Block256*>(blocks) + lane;
        quants += 256 * lane;
        for (int64_t at = 0; at < n_values; at += 256, block += width) quantize_256(x ? x + at : x, quants + at * width, block);
        return;
    }
    float* d = static_cast<float*>(blocks) + lane;
    quants += 32 * lane;
    for (int64_t at = 0; at < n_values; at += 32, d += 2 * width) {
        *d = 0.0f;
        if (!x) continue;
        const float top = greatest_lane(greatest(x + at));
        int32_t low, high;
        halves(quantize_32(x + at, top <= least ? 0.0f : 127.0f / top, quants + at * width), &low, &high);
        if (!(top <= least)) *d = top / 127.0f;
        const int32_t sum = low + high;
        std::memcpy(d + width, &sum, sizeof sum);
    }
}

}  // namespace cpuchat
