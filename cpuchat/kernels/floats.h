// What is computed in floats: attention over a cache of F16, and products of F32 weights; for CPUs with AVX2.
#pragma once

#include <cstddef>

struct ggml_compute_params;
struct ggml_tensor;

namespace cpuchat {

// Whether a GGML_OP_FLASH_ATTN_EXT is computed here: by its types and shape alone.
bool is_attention_covered(const ggml_tensor* op);
// Bytes of scratch memory that `attend` needs.
size_t attention_bytes(const ggml_tensor* op, int n_threads);
// Compute in one of the threads of ggml's pool.
void attend(const ggml_compute_params* params, ggml_tensor* op);

// Products of F32 weights, a router's of experts: llama.cpp computes those of one token in another order than of several.
bool is_float_product_covered(const ggml_tensor* op);
void multiply_floats(const ggml_compute_params* params, ggml_tensor* op);

}  // namespace cpuchat
