// Quantizes activations to signed bytes, with AVX2 on every CPU: one way, so one result.
#include "formats.h"
#include "simd.h"

namespace cpuchat {
namespace {

constexpr float least = 1e-30f;  // below, 127 / x is infinite or nearly; such a block is zero

// The greatest absolute value of 32 floats, in each lane of one column.
__m256 greatest(const float* x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    auto load = [&](int i) { return _mm256_andnot_ps(sign, _mm256_loadu_ps(x + 8 * i)); };
    return _mm256_max_ps(_mm256_max_ps(load(0), load(1)), _mm256_max_ps(load(2), load(3)));
}

float greatest_lane(__m256 v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
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
    __m256 most = greatest(x);
    for (int i = 1; i < 8; i++) most = _mm256_max_ps(most, greatest(x + 32 * i));
    const float top = greatest_lane(most);
    const float inverse = top > least ? 127.0f / top : 0.0f;
    block->d = top > least ? top / 127.0f : 0.0f;
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

void quantize(Format format, int64_t n_values, const float* x, int8_t* quants, void* blocks) {
    if (has_large_blocks(format)) {
        Block256* block = static_cast<Block256*>(blocks);
        for (int64_t at = 0; at < n_values; at += 256) quantize_256(x + at, quants + at, block++);
        return;
    }
    Block32* block = static_cast<Block32*>(blocks);
    for (int64_t at = 0; at < n_values; at += 32, block++) {
        const float top = greatest_lane(greatest(x + at));
        int32_t low, high;
        halves(quantize_32(x + at, top > least ? 127.0f / top : 0.0f, quants + at), &low, &high);
        *block = {top > least ? top / 127.0f : 0.0f, low + high};
    }
}

}  // namespace cpuchat
