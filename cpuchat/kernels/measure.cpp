// Times products of a tensor type in ggml's own threads, in the layout of cpuchat and in the one that llama.cpp would use
// by itself, in turn; and compares their results.
#include <strings.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <future>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "traits.h"

namespace cpuchat {
namespace {

// With AMX llama.cpp computes half as fast where rows of results lie a multiple of 2 KB apart: so these do not.
constexpr int64_t n_values = 2560;
constexpr int64_t n_different = 16;  // rows, which repeat: quantizing takes long
constexpr int most_matrices = 32;
constexpr int many = 16;  // tokens from which on arithmetic takes longer than reading: one matrix is enough

using Buffer = std::unique_ptr<ggml_backend_buffer, decltype(&ggml_backend_buffer_free)>;
using Floats = std::vector<float>;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

Floats random_values(int64_t n) {
    Floats values(n);
    uint32_t state = 1;
    for (float& value : values) value = static_cast<int32_t>(state = state * 1664525u + 1013904223u) * 0x1p-31f;
    return values;
}

// The distance of two results as a share of their norm, at most 1: also where one holds a NaN.
double difference(const Floats& a, const Floats& b, size_t n) {
    double apart = 0, norm = 0;
    for (size_t i = 0; i < n; i++) apart += (a[i] - b[i]) * (a[i] - b[i]), norm += b[i] * b[i];
    return apart < norm ? std::sqrt(apart / norm) : 1.0;
}

// Several copies of a matrix in one kind of buffer, and a graph of products for each number of tokens.
struct Side {
    int64_t n_rows;
    std::unique_ptr<ggml_context, decltype(&ggml_free)> context{ggml_init({size_t{1} << 20, nullptr, true}), ggml_free};
    Buffer buffer{nullptr, ggml_backend_buffer_free};
    Floats out;
    std::vector<ggml_tensor*> matrices;
    std::vector<ggml_cgraph*> graphs;
    std::vector<ggml_cplan> plans;

    ggml_tensor* new_matrix(ggml_type kind) { return ggml_new_tensor_2d(context.get(), kind, n_values, n_rows); }
    ggml_tensor* new_product(ggml_tensor* weights, int64_t n) {
        return ggml_mul_mat(context.get(), weights, ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, n_values, n));
    }
    // Returns whether a load would place such a matrix there, which it asks with an empty buffer.
    bool is_supported(ggml_backend_buffer_type_t type, ggml_type kind) {
        const Buffer empty(ggml_backend_buft_alloc_buffer(type, 0), ggml_backend_buffer_free);
        ggml_tensor* weights = new_matrix(kind);
        weights->buffer = empty.get();
        return static_cast<ggml::cpu::extra_buffer_type*>(type->context)->supports_op(type->device, new_product(weights, 512));
    }
    // Whether as many threads may start as llama.cpp lays weights out for AMX with: without, it would end this process.
    static bool may_start_threads() {
        std::vector<std::thread> threads;
        std::promise<void> done;
        const std::shared_future<void> all = done.get_future().share();
        bool may = true;
        try {
            for (unsigned i = 0; i < std::thread::hardware_concurrency(); i++) threads.emplace_back([all] { all.wait(); });
        } catch (const std::system_error&) {
            may = false;
        }
        done.set_value();
        for (std::thread& thread : threads) thread.join();
        return may;
    }
    // Fills `n` matrices; returns false where no buffer type takes them, or memory is short.
    bool fill(bool is_cpuchat, ggml_type kind, int n, const uint8_t* blocks) {
        if (!is_cpuchat && !may_start_threads()) return false;
        ggml_backend_buffer_type_t type = is_cpuchat ? nullptr : ggml_backend_cpu_buffer_type();
        for (ggml_backend_buffer_type_t one : ggml_backend_cpu_get_extra_buffer_types()) {
            if (!one || !strcmp(ggml_backend_buft_name(one), "CPU_CPUCHAT") != is_cpuchat || !is_supported(one, kind)) continue;
            type = one;
            break;
        }
        const size_t size = type ? (ggml_backend_buft_get_alloc_size(type, new_matrix(kind)) + 63) / 64 * 64 : 0;
        buffer.reset(type ? ggml_backend_buft_alloc_buffer(type, size * n) : nullptr);
        for (int i = 0; buffer && i < n; i++) {
            matrices.push_back(new_matrix(kind));
            char* at = static_cast<char*>(ggml_backend_buffer_get_base(buffer.get())) + i * size;
            if (ggml_backend_tensor_alloc(buffer.get(), matrices[i], at) != GGML_STATUS_SUCCESS) return false;
            ggml_backend_tensor_set(matrices[i], blocks, 0, ggml_nbytes(matrices[i]));
        }
        return buffer != nullptr;
    }
    void add_graph(Floats& x, int n_tokens, ggml_threadpool* pool, int n_threads) {
        graphs.push_back(ggml_new_graph_custom(context.get(), 2 * most_matrices, false));
        for (size_t i = 0; i < (n_tokens < many ? matrices.size() : 1); i++) {
            ggml_tensor* product = new_product(matrices[i], n_tokens);
            product->src[1]->data = x.data();
            product->data = out.data();
            ggml_build_forward_expand(graphs.back(), product);
        }
        plans.push_back(ggml_graph_plan(graphs.back(), n_threads, pool));
    }
    // Returns the bytes of weights per second.
    double run(size_t i, std::vector<uint8_t>& work) {
        work.resize(std::max(work.size(), plans[i].work_size));
        plans[i].work_data = work.data();
        const double begin = now();
        ggml_graph_compute(graphs[i], &plans[i]);
        return ggml_graph_n_nodes(graphs[i]) * ggml_nbytes(matrices[0]) / (now() - begin);
    }
};

int measure(const char* type, ggml_threadpool* pool, int n_threads, size_t bytes, double seconds, const int* tokens, int n, double* found) {
    int kind = 0;
    while (kind < GGML_TYPE_COUNT && (!ggml_type_name(ggml_type(kind)) || strcasecmp(type, ggml_type_name(ggml_type(kind))))) kind++;
    if (kind == GGML_TYPE_COUNT || ggml_quantize_requires_imatrix(ggml_type(kind))) return -1;
    const int64_t n_rows = seconds > 0 ? 4480 : 256;  // about those of a layer, or enough to compare
    std::vector<uint8_t> work, blocks(ggml_row_size(ggml_type(kind), n_values) * n_rows);
    const size_t repeated = blocks.size() / n_rows * n_different;
    ggml_quantize_chunk(ggml_type(kind), random_values(n_different * n_values).data(), blocks.data(), 0, n_different, n_values, nullptr);
    for (size_t at = repeated; at < blocks.size(); at += repeated) std::copy_n(blocks.data(), repeated, &blocks[at]);
    const int count = static_cast<int>(std::min<size_t>(most_matrices, bytes / blocks.size() + 1));
    const int longest = *std::max_element(tokens, tokens + n);
    Floats x = random_values(longest * n_values);
    Side sides[] = {{n_rows}, {n_rows}};
    for (Side& side : sides) {
        if (!side.fill(&side == sides, ggml_type(kind), count, blocks.data())) return -1;
        side.out.resize(longest * n_rows);
    }
    for (int i = 0; i < 2 * n; i++) sides[i % 2].add_graph(x, tokens[i / 2], pool, n_threads);
    std::fill_n(found, 2 * n + 1, 0.0);
    const double end = now() + seconds;
    for (int round = 0; round == 0 || now() < end; round++) {
        for (int i = 0; i < n; i++) {
            for (int side : {round % 2, 1 - round % 2}) found[side * n + i] = std::max(found[side * n + i], sides[side].run(i, work));
            if (round == 0) found[2 * n] = std::max(found[2 * n], difference(sides[0].out, sides[1].out, tokens[i] * n_rows));
        }
    }
    return 0;
}

}  // namespace
}  // namespace cpuchat

// Measures `type` ("Q4_K") with `bytes` of weights in passes of `n` numbers of `tokens`, for about `seconds` (0: compares).
// `found`: for each pass the bytes of weights per second of cpuchat's products, then those of llama.cpp's, then by what
// share the results differ. Returns 0, or -1 where cpuchat has no products for it or memory is short.
extern "C" __attribute__((visibility("default"))) int cpuchat_kernels_measure(
    const char* type, ggml_threadpool* pool, int n_threads, size_t bytes, double seconds, const int* tokens, int n, double* found) {
    try {
        return cpuchat::measure(type, pool, n_threads, bytes, seconds, tokens, n, found);
    } catch (const std::bad_alloc&) {
        return -1;
    }
}
