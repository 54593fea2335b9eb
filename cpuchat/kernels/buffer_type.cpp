// An extra buffer type of ggml's CPU backend: weights whose format has products here are laid out for them when they are
// read, and ggml's own threads compute. What it declines goes to the next buffer type, tensor by tensor.
#include <cpuid.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "floats.h"
#include "formats.h"
#include "ggml-backend-impl.h"
#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ops.h"
#include "traits.h"

namespace cpuchat {
namespace {

const Products* products = nullptr;  // of the instruction set in use
bool uses_tiles = false;             // of AMX, as llama.cpp does
uint32_t selected = 0;               // formats that a load takes

// Of the load to come: the CPUs that will compute, the threads that lay out, and whether weights come from a mapped file.
std::vector<int> cpus;
int n_layout_threads = 1;
bool is_mapped = false;

constexpr size_t huge_page = size_t{2} << 20;
constexpr size_t chunk_bytes = 512 << 10;  // of weights that a thread takes at a time where each is read once
constexpr size_t overrun = 16 << 10;      // that is prefetched behind the last group

size_t rounded_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

constexpr ggml_type types[] = {  // by format
    GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q5_0, GGML_TYPE_MXFP4,
    GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_XS, GGML_TYPE_Q3_K, GGML_TYPE_Q2_K, GGML_TYPE_Q4_1, GGML_TYPE_Q5_1,
};
static_assert(std::size(types) == static_cast<size_t>(Format::count));

Format format_of(const ggml_tensor* weights) {
    const ggml_type* found = std::find(std::begin(types), std::end(types), weights->type);
    return found == std::end(types) ? Format::none : static_cast<Format>(found - types);
}

bool is_covered(const ggml_tensor* weights) {
    const Format format = format_of(weights);
    return format != Format::none && weights->ne[0] % block_values(format) == 0 && weights->ne[3] == 1;
}

// Groups of one matrix; of experts there are as many matrices as experts.
int64_t n_groups(const ggml_tensor* weights) { return (weights->ne[1] + products->rows - 1) / products->rows; }
size_t bytes_of_group(const ggml_tensor* weights) { return group_bytes(format_of(weights), weights->ne[0], products->rows); }

// How many chunks of a share were taken. Each share has a cache line of its own.
struct alignas(64) Taken {
    std::atomic<int64_t> chunks;
};

// The groups of one or several equal matrices, in a share for each thread that is the same at the layout and in every
// product: so a thread reads what it wrote first, which lies on its node. A share is taken in chunks, and a thread that
// has done its own goes on with what others have left: one that is delayed does not hold them.
struct Shares {
    Taken* taken;
    int64_t n_threads;
    int64_t n_matrices;
    int64_t n_groups;  // of a matrix
    int64_t per_chunk;

    int64_t begin(int64_t share) const { return n_groups * share / n_threads; }

    // `run(matrix, first, end)` for chunks of groups, until all are taken.
    template <class Run> void work(int64_t own, Run run) const {
        for (int64_t i = 0; i < n_threads; i++) {
            const int64_t share = (own + i) % n_threads, first = begin(share), end = begin(share + 1);
            const int64_t per_matrix = (end - first + per_chunk - 1) / per_chunk;
            std::atomic<int64_t>& next = taken[share].chunks;
            if (next.load(std::memory_order_relaxed) >= per_matrix * n_matrices) continue;
            for (int64_t c = next++; c < per_matrix * n_matrices; c = next++) {
                const int64_t from = first + c % per_matrix * per_chunk;
                run(c / per_matrix, from, std::min(end, from + per_chunk));
            }
        }
    }
};

// Thread 0 of a pool is the caller, which computes on the last of its CPUs.
int64_t share_of(int ith, int nth) { return (ith + nth - 1) % nth; }

// Whether so many tokens of one matrix are a wide pass, whose activations lie in tiles.
bool is_wide(Format format, int64_t n_tokens) {
    return products->wide.of[static_cast<int>(format)] != nullptr && n_tokens >= products->wide.from;
}

// Products of one matrix with activations, of which the first `n_in_tiles` lie in tiles; a row of results each.
struct Work {
    Format format;
    int64_t n_rows;
    Activations x;
    int64_t n_in_tiles;

    // Groups `first` to `end` with tokens `token` to `token_end`; `row(token)` is where the results of a token go.
    template <class Row>
    void run(const uint8_t* weights, size_t bytes, int64_t first, int64_t end, int64_t token, int64_t token_end, Row row) const {
        const int kind = static_cast<int>(format);
        const WideProduct wide = token < n_in_tiles ? products->wide.of[kind] : nullptr;
        const int64_t rows = products->rows, whole = std::max(first, std::min(end, n_rows / rows));
        if (const Product several = products->several[kind]; several && token_end - token == 1) {
            const int64_t apart = (whole - first) / most_groups;
            for (int64_t g = first; g < first + apart; g++) {
                float* out = row(token) + g * rows;
                several({weights + g * bytes, apart * bytes, apart * rows}, x, token, &out);
            }
            first += most_groups * apart;
        }
        while (token < token_end) {
            const int64_t left = token_end - token, most = wide ? wide_tile : products->tile;
            const int64_t half = rounded_up((left + 1) / 2, wide ? tile_tokens : 1);
            const int n = static_cast<int>(left <= most ? left : std::min(half, most));
            const Product product = wide ? nullptr : products->of[kind][n];
            float *out[wide_tile], *to[wide_tile], last[wide_tile][16];
            for (int i = 0; i < n; i++) to[i] = row(token + i);
            for (int64_t g = first; g < end; g++) {
                for (int i = 0; i < n; i++) out[i] = g < whole ? to[i] + g * rows : last[i];
                if (wide) wide(weights + g * bytes, x, token, n, out);
                else product({weights + g * bytes, 0, 0}, x, token, out);
                for (int i = 0; g >= whole && i < n; i++) std::copy_n(last[i], n_rows - g * rows, to[i] + g * rows);
            }
            token += n;
        }
    }
};

// Where the rows of activations of experts are: those of wide passes first, each expert's in tiles of its own.
struct Order {
    int64_t n_used, n_in_tiles, n_rows;
};

// Where the scratch memory of a pass holds what: what threads have taken, rows of quantized activations, their blocks;
// of experts, the order too.
struct Scratch {
    Format format;
    int64_t n_values, n, n_experts, most_rows;  // n: tokens, or of experts pairs of token and slot
    Taken* taken;
    int8_t* quants;
    uint8_t* blocks;
    Order* experts;
    int32_t* order;           // of rows: numbers of the pairs, or -1 at the end of a tile
    int32_t *begins, *counts;  // of each expert's rows
    int32_t* used;            // experts that have tokens
    size_t size;

    Scratch(const ggml_tensor* op, void* memory, int n_threads) {
        const ggml_tensor *weights = op->src[0], *ids = op->op == GGML_OP_MUL_MAT_ID ? op->src[2] : nullptr;
        format = format_of(weights), n_values = weights->ne[0];
        n = ids ? ids->ne[0] * ids->ne[1] : ggml_nrows(op->src[1]), n_experts = ids ? weights->ne[2] : 0;
        const int64_t n_wide = !is_wide(format, n) ? 0 : std::min(weights->ne[2], n / products->wide.from);
        most_rows = n + n_wide * (tile_tokens - 1);
        uint8_t* at = reinterpret_cast<uint8_t*>(rounded_up(reinterpret_cast<size_t>(memory), 64));
        auto take = [&](auto& part, int64_t count) {
            part = reinterpret_cast<std::decay_t<decltype(part)>>(at);
            at += rounded_up(count * sizeof *part, 64);
        };
        take(taken, n_threads);
        take(quants, most_rows * n_values);
        take(blocks, most_rows * (n_values / block_values(format)) * activation_block(format));
        take(experts, n_experts ? 1 : 0), take(order, n_experts ? most_rows : 0);
        take(begins, n_experts), take(counts, n_experts), take(used, n_experts);
        size = at - static_cast<uint8_t*>(memory);
    }
};

// The scratch memory of a pass; of what was taken each thread forgets its own.
Scratch begin(const ggml_compute_params* params, const ggml_tensor* op) {
    const Scratch scratch(op, params->wdata, params->nth);
    GGML_ASSERT(scratch.size <= params->wsize);
    scratch.taken[share_of(params->ith, params->nth)].chunks = 0;
    return scratch;
}

const float* row_of(const ggml_tensor* t, int64_t i) {
    const int64_t i1 = i % t->ne[1], i2 = i / t->ne[1] % t->ne[2], i3 = i / t->ne[1] / t->ne[2];
    return reinterpret_cast<const float*>(static_cast<const char*>(t->data) + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3]);
}

Shares shares_of(const ggml_tensor* weights, Taken* taken, int64_t n_threads, int64_t n_matrices, size_t bytes) {
    int64_t groups = std::max<int64_t>(1, bytes / bytes_of_group(weights));
    while (groups > 1 && n_groups(weights) / groups < 4 * n_threads) groups /= 2;
    return {taken, n_threads, n_matrices, n_groups(weights), groups};
}

// With more tokens than a tile, a chunk stays in the L2 cache for the next ones, beside what is read of their activations.
// The smaller it is, the more often these are: measured, 8,960 values and 512 tokens, 64 KB of 2 MB against half: AMX
// takes 2.1 times as long, AVX-512 VNNI 1.1 times.
size_t bytes_of_chunk(int64_t n_tokens) {
    static const size_t l2 = std::max(sysconf(_SC_LEVEL2_CACHE_SIZE), 256l << 10);
    return n_tokens <= products->tile ? chunk_bytes : l2 / 2;
}

// Each thread quantizes its share of `n_rows`, in units of blocks, so that one token is shared too; those that have a
// `source`, and zeros for others.
template <class Source>
void quantize_share(const ggml_compute_params* params, const Scratch& to, int64_t n_rows, int64_t n_in_tiles, Source source) {
    const int64_t per = block_values(to.format), n_blocks = to.n_values / per, total = n_rows * n_blocks;
    const size_t bytes = activation_block(to.format);
    int64_t at = total * params->ith / params->nth;
    const int64_t end = total * (params->ith + 1) / params->nth;
    while (at < end) {
        const int64_t row = at / n_blocks, block = at % n_blocks, count = std::min(n_blocks - block, end - at);
        const int width = row < n_in_tiles ? tile_tokens : 1, lane = row % width;
        const int64_t place = (row - lane) * n_blocks + block * width;
        const float* x = source(row);
        quantize(to.format, count * per, x ? x + block * per : x, to.quants + place * per, to.blocks + place * bytes, width, lane);
        at += count;
    }
}

// Each of the matrices with its share of the tokens, which follow one another.
void multiply(ggml_compute_params* params, ggml_tensor* op) {
    const ggml_tensor* weights = op->src[0];
    const Scratch scratch = begin(params, op);
    const int64_t n_matrices = weights->ne[2], n = scratch.n / n_matrices;
    const bool in_tiles = is_wide(scratch.format, n);
    const int64_t apart = in_tiles ? rounded_up(n, tile_tokens) : n, n_rows = n_matrices * apart;
    quantize_share(params, scratch, n_rows, in_tiles ? n_rows : 0, [&](int64_t row) {
        return row % apart < n ? row_of(op->src[1], row / apart * n + row % apart) : nullptr;
    });
    ggml_barrier(params->threadpool);
    const Work work{scratch.format, weights->ne[1], {scratch.quants, scratch.blocks, scratch.n_values}, in_tiles ? n_rows : 0};
    const size_t bytes = bytes_of_group(weights);
    const Shares shares = shares_of(weights, scratch.taken, params->nth, n_matrices, bytes_of_chunk(n));
    shares.work(share_of(params->ith, params->nth), [&](int64_t matrix, int64_t first, int64_t end) {
        work.run(static_cast<const uint8_t*>(weights->data) + matrix * shares.n_groups * bytes, bytes, first, end,
                 matrix * apart, matrix * apart + n,
                 [&](int64_t row) { return const_cast<float*>(row_of(op, row - matrix * (apart - n))); });
    });
}

// Pairs of token and slot, ordered by expert, so that the rows of one expert lie together.
void order_by_expert(const ggml_tensor* ids, const Scratch& to) {
    const int64_t n_slots = ids->ne[0];
    auto expert = [&](int64_t pair) {
        return *reinterpret_cast<const int32_t*>(static_cast<const char*>(ids->data) + pair % n_slots * ids->nb[0] + pair / n_slots * ids->nb[1]);
    };
    std::fill_n(to.counts, to.n_experts, 0);
    for (int64_t pair = 0; pair < to.n; pair++) to.counts[expert(pair)]++;
    Order& order = *to.experts = {};
    for (bool wide : {true, false}) {
        for (int64_t e = 0; e < to.n_experts; e++) {
            const int64_t n = to.counts[e];
            if (n == 0 || is_wide(to.format, n) != wide) continue;
            to.used[order.n_used++] = static_cast<int32_t>(e);
            to.begins[e] = static_cast<int32_t>(order.n_rows);
            order.n_rows += wide ? rounded_up(n, tile_tokens) : n;
        }
        if (wide) order.n_in_tiles = order.n_rows;
    }
    std::fill_n(to.order, order.n_rows, -1);
    // Each beginning moves behind the rows of its expert, and back.
    for (int64_t pair = 0; pair < to.n; pair++) to.order[to.begins[expert(pair)]++] = static_cast<int32_t>(pair);
    for (int64_t e = 0; e < to.n_experts; e++) to.begins[e] -= to.counts[e];
}

void multiply_experts(ggml_compute_params* params, ggml_tensor* op) {
    const ggml_tensor *weights = op->src[0], *x = op->src[1], *ids = op->src[2];
    const Scratch scratch = begin(params, op);
    if (params->ith == 0) order_by_expert(ids, scratch);
    ggml_barrier(params->threadpool);
    const Order order = *scratch.experts;
    quantize_share(params, scratch, order.n_rows, order.n_in_tiles, [&](int64_t row) -> const float* {
        const int64_t pair = scratch.order[row], slot = pair % ids->ne[0], token = pair / ids->ne[0];
        return pair < 0 ? nullptr : row_of(x, slot % x->ne[1] + token * x->ne[1]);
    });
    ggml_barrier(params->threadpool);
    const Work work{scratch.format, weights->ne[1], {scratch.quants, scratch.blocks, scratch.n_values}, order.n_in_tiles};
    const size_t bytes = bytes_of_group(weights);
    const size_t of_chunk = bytes_of_chunk((scratch.n + order.n_used - 1) / order.n_used);
    const Shares shares = shares_of(weights, scratch.taken, params->nth, order.n_used, of_chunk);
    shares.work(share_of(params->ith, params->nth), [&](int64_t number, int64_t first, int64_t end) {
        const int64_t expert = scratch.used[number];
        work.run(static_cast<const uint8_t*>(weights->data) + expert * shares.n_groups * bytes, bytes, first, end,
                 scratch.begins[expert], scratch.begins[expert] + scratch.counts[expert],
                 [&](int64_t at) { return const_cast<float*>(row_of(op, scratch.order[at])); });
    });
}

class Traits : public ggml::cpu::tensor_traits {
    bool work_size(int n_threads, const ggml_tensor* op, size_t& size) override {
        return is_covered(op->src[0]) && (size = Scratch(op, nullptr, n_threads).size + 64, true);
    }
    bool compute_forward(ggml_compute_params* params, ggml_tensor* op) override {
        if (!is_covered(op->src[0])) return false;
        op->op == GGML_OP_MUL_MAT ? multiply(params, op) : multiply_experts(params, op);
        return true;
    }
};

// What is not covered stays llama.cpp's, which adds up a single token's in as many parts of the cache as there are
// threads. Passes that verify drafts do not, so a draft could change the text: here one takes their order too.
class Attention : public ggml::cpu::tensor_traits {
    bool work_size(int n_threads, const ggml_tensor* op, size_t& size) override {
        size = attention_bytes(op, n_threads);
        return is_attention_covered(op);
    }
    bool compute_forward(ggml_compute_params* params, ggml_tensor* op) override {
        if (is_attention_covered(op)) return attend(params, op), true;
        if (op->src[0]->ne[1] > 1 || op->src[0]->ne[2] < params->nth) return false;  // threads without a head would wait
        ggml_compute_params in_order = *params;
        in_order.use_ref = true;
        ggml_compute_forward_flash_attn_ext(&in_order, op);
        return true;
    }
};

class FloatProduct : public ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor*, size_t& size) override { return size = 0, true; }
    bool compute_forward(ggml_compute_params* params, ggml_tensor* op) override { return multiply_floats(params, op), true; }
};

ggml_backend_buffer_type buffer_type;

bool is_product(const ggml_tensor* op) { return op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID; }
bool is_here(const ggml_tensor* weights) { return weights->buffer && weights->buffer->buft == &buffer_type; }

// Whether the last matrix before these activations has a product here: another model of this process may have none.
bool follows_product(const ggml_tensor* x) {
    for (int i = 0; x && i < 16; x = x->src[0], i++) {
        if (is_product(x)) return is_here(x->src[0]);
    }
    return false;
}

class ExtraBufferType : public ggml::cpu::extra_buffer_type {
    bool supports_op(ggml_backend_dev_t, const ggml_tensor* op) override {
        const ggml_tensor *weights = op->src[0], *x = op->src[1];
        if (!is_product(op) || !is_here(weights)) return false;
        if (!ggml_is_contiguous(weights)) return false;
        if (op->op == GGML_OP_MUL_MAT && weights->ne[2] > 1 && (x->ne[3] > 1 || x->ne[2] % weights->ne[2])) return false;
        if (x->buffer && !ggml_backend_buft_is_host(x->buffer->buft)) return false;
        // A load asks with an empty buffer. Tensors that are here stay, whatever is selected later.
        const bool is_load = weights->buffer->size == 0;
        const bool is_selected = is_covered(weights) && selected >> static_cast<int>(format_of(weights)) & 1;
        // A matrix for each head (DeepSeek's attn_k_b) llama.cpp would place in its AMX buffer, and then end the process: it
        // multiplies none there whose activations are permuted. What is not covered lies here as it is, for its plain products.
        const bool is_unsafe = uses_tiles && op->op == GGML_OP_MUL_MAT && weights->ne[2] > 1;
        if (is_load && !is_selected && !is_unsafe) return false;
        return x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && op->type == GGML_TYPE_F32;
    }
    ggml::cpu::tensor_traits* get_tensor_traits(const ggml_tensor* op) override {
        static Attention attention;
        static FloatProduct float_product;
        if (op->op == GGML_OP_FLASH_ATTN_EXT && follows_product(op->src[0])) return &attention;
        if (is_float_product_covered(op) && follows_product(op->src[1])) return &float_product;
        return is_product(op) && is_here(op->src[0]) ? static_cast<ggml::cpu::tensor_traits*>(op->src[0]->extra) : nullptr;
    }
};

enum ggml_status init_tensor(ggml_backend_buffer_t, ggml_tensor* tensor) {
    static Traits traits;
    tensor->extra = static_cast<ggml::cpu::tensor_traits*>(&traits);
    return GGML_STATUS_SUCCESS;
}

// Pins the calling thread to CPU `i`; to all of them where threads may move among more CPUs than there are threads.
void pin(size_t i) {
    std::vector<cpu_set_t> set(*std::max_element(cpus.begin(), cpus.end()) / CPU_SETSIZE + 1);
    const size_t size = set.size() * sizeof(cpu_set_t);
    for (size_t k = 0; k < cpus.size(); k++) {
        if (k == i || cpus.size() > static_cast<size_t>(n_layout_threads)) CPU_SET_S(cpus[k], size, set.data());
    }
    sched_setaffinity(0, size, set.data());  // if these CPUs are gone, anywhere
}

// Gives back the pages of the file that lie in this range: it is not read again.
void give_back(const void* data, size_t size) {
    const size_t page = sysconf(_SC_PAGESIZE), at = reinterpret_cast<size_t>(data);
    const size_t begin = rounded_up(at, page), end = (at + size) / page * page;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

// Lays the groups out on the CPUs that will compute, each its share. Unless the memory policy of this process says
// otherwise, a page belongs to the node of the thread that first writes to it.
void set_tensor(ggml_backend_buffer_t, ggml_tensor* tensor, const void* data, size_t offset, size_t size) {
    GGML_ASSERT(offset == 0 && size == ggml_nbytes(tensor));
    if (!is_covered(tensor)) return void(memcpy(tensor->data, data, size));
    const int n_threads = size > (1 << 20) ? n_layout_threads : 1;
    std::vector<Taken> taken(n_threads);
    const Shares shares = shares_of(tensor, taken.data(), n_threads, tensor->ne[2], chunk_bytes);
    auto lay_out_share = [&](int64_t own) {
        shares.work(own, [&](int64_t matrix, int64_t first, int64_t end) {
            lay_out(format_of(tensor), tensor->ne[0], tensor->ne[1], products->rows, first, end,
                    static_cast<const uint8_t*>(data) + matrix * tensor->nb[2],
                    static_cast<uint8_t*>(tensor->data) + matrix * shares.n_groups * bytes_of_group(tensor));
        });
    };
    std::vector<std::thread> threads;
    try {
        for (int i = 0; n_threads > 1 && i < n_threads; i++) threads.emplace_back([&, i] { pin(i), lay_out_share(i); });
    } catch (const std::system_error&) {}  // the limit of threads: those that run take the shares of the others
    if (threads.empty()) lay_out_share(0);
    for (std::thread& thread : threads) thread.join();
    if (is_mapped) give_back(data, size);
}

void free_buffer(ggml_backend_buffer_t buffer) {
    if (buffer->size) munmap(buffer->context, buffer->size);
}
void* base_of(ggml_backend_buffer_t buffer) { return buffer->context; }
void clear(ggml_backend_buffer_t buffer, uint8_t value) { memset(buffer->context, value, buffer->size); }
void set_bytes(ggml_backend_buffer_t, ggml_tensor* tensor, uint8_t value, size_t offset, size_t size) {
    memset(static_cast<char*>(tensor->data) + offset, value, size);
}

ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, size_t size) {
    static const ggml_backend_buffer_i interface = {
        free_buffer, base_of, init_tensor, set_bytes, set_tensor, nullptr, nullptr, nullptr, nullptr, clear, nullptr,
    };
    if (size == 0) return ggml_backend_buffer_init(type, interface, &buffer_type, 0);  // llama.cpp asks what is supported
    const size_t rounded = rounded_up(size + overrun, huge_page);
    void* mapped = mmap(nullptr, rounded + huge_page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    char* begin = static_cast<char*>(mapped);
    char* aligned = reinterpret_cast<char*>(rounded_up(reinterpret_cast<size_t>(begin), huge_page));
    if (aligned > begin) munmap(begin, aligned - begin);
    if (const size_t tail = begin + huge_page - aligned) munmap(aligned + rounded, tail);
    // Measured, Zen 3: first touch takes 0.09 s a GB in huge pages, 0.65 s in others. (2 to 4 s where the host of a virtual
    // machine took the free memory away, which it does in huge pages.)
    madvise(aligned, rounded, MADV_HUGEPAGE);
    return ggml_backend_buffer_init(type, interface, aligned, rounded);
}

const char* name_of(ggml_backend_buffer_type_t) { return "CPU_CPUCHAT"; }
size_t alignment_of(ggml_backend_buffer_type_t) { return 64; }
size_t size_of(ggml_backend_buffer_type_t, const ggml_tensor* tensor) {
    if (!is_covered(tensor)) return ggml_nbytes(tensor);
    return bytes_of_group(tensor) * n_groups(tensor) * tensor->ne[2];
}

// Asks the kernel for the tiles of all threads, which it grants where CPU and kernel have them.
bool may_use_tiles() {
    constexpr int request_permission = 0x1023, tile_data = 18;
    constexpr unsigned tiles_and_int8 = 3u << 24;
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & tiles_and_int8) == tiles_and_int8 &&
           syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

// Returns whether ggml's structs are those that this was compiled for: what it writes is read here, and the other way.
// (ggml_compute_params cannot be asked for: the version stands for it.)
bool structs_agree() {
    ggml_context* context = ggml_init({16 * ggml_tensor_overhead(), nullptr, true});
    ggml_tensor* weights = ggml_new_tensor_3d(context, GGML_TYPE_Q4_K, 512, 24, 3);
    ggml_tensor* op = ggml_mul_mat(context, weights, ggml_new_tensor_3d(context, GGML_TYPE_F32, 512, 2, 3));
    ggml_backend_buffer_t buffer = allocate(&buffer_type, 0);
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    weights->buffer = buffer, weights->data = weights;
    ggml_set_name(op, "op");
    const bool agree =
        weights->type == GGML_TYPE_Q4_K && weights->ne[1] == 24 && weights->ne[2] == 3 && weights->nb[1] == 288 &&
        op->op == GGML_OP_MUL_MAT && op->src[0] == weights && op->ne[1] == 2 && strcmp(op->name, "op") == 0 &&
        ggml_get_data(weights) == weights && buffer->buft == &buffer_type && buffer->size == 0 &&
        buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS && ggml_backend_buffer_get_type(buffer) == &buffer_type &&
        ggml_backend_buft_name(&buffer_type) == name_of(nullptr) && ggml_backend_buft_get_device(&buffer_type) == buffer_type.device &&
        ggml_backend_buft_get_alloc_size(&buffer_type, weights) == size_of(nullptr, weights);
    ggml_backend_buffer_free(buffer);
    ggml_free(context);
    return agree;
}

const Products* best_products(const char* wanted) {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    const bool amd = __builtin_cpu_is("amd");
    if (avx512 && !amd) ahead_alone = 4096;
    static const Products amx_products = with_amx();
    static Products plain_products = avx512_products;
    if (amd) plain_products.several = {};
    auto may_be = [&](const Products& one) { return !wanted || strcmp(wanted, one.name) == 0; };
    if (avx512 && may_be(amx_products)) return (uses_tiles = may_use_tiles()) ? &amx_products : &plain_products;
    if (avx512 && may_be(plain_products)) return &plain_products;
    // AVX-VNNI of 256 bits has no name in GCC 12's __builtin_cpu_supports.
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool avx_vnni = avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
    if (avx_vnni && may_be(avx_vnni_products)) return &avx_vnni_products;
    if (avx2 && may_be(avx2_products)) return &avx2_products;
    return nullptr;
}

}  // namespace
}  // namespace cpuchat

using namespace cpuchat;

#define EXPORTED extern "C" __attribute__((visibility("default")))

// The version of ggml that this was compiled for, whose structs it relies on.
EXPORTED const char* cpuchat_kernels_version() { return CPUCHAT_GGML_VERSION; }

// How many formats there are, which the caller must know all.
EXPORTED int cpuchat_kernels_formats() { return static_cast<int>(Format::count); }

// Put the buffer type before llama.cpp's own, once, before the first load. `wanted` is an instruction set, or null for the
// best. Returns the name of the one in use, or null where none is covered.
EXPORTED const char* cpuchat_kernels_register(const char* wanted) {
    if (products == nullptr && (products = best_products(wanted)) != nullptr) {
        buffer_type.iface = {name_of, allocate, alignment_of, nullptr, size_of, nullptr};
        buffer_type.device = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
        buffer_type.context = static_cast<ggml::cpu::extra_buffer_type*>(new ExtraBufferType());
        if (!structs_agree()) return products = nullptr, nullptr;
        auto& types = ggml_backend_cpu_get_extra_buffer_types();
        types.insert(types.begin(), &buffer_type);
    }
    return products ? products->name : nullptr;
}

// The formats that later loads take, as bits 1 << Format: none at first.
EXPORTED void cpuchat_kernels_select(uint32_t formats) { selected = formats; }

// Of the loads to come: the CPUs that will compute, one for each of the threads, or more among which they may move; and
// whether weights come from a mapped file, whose pages are given back.
EXPORTED void cpuchat_kernels_prepare(const int* first, int n_cpus, int n_threads, int from_mapping) {
    cpus.assign(first, first + n_cpus);
    n_layout_threads = std::max(1, std::min(n_threads, n_cpus));
    is_mapped = from_mapping;
}
