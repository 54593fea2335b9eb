# llama-cpp-python sets these in CMake's cache, whatever CMAKE_ARGS says; a normal variable shadows the cache.
# Nothing here loads the common library, which takes a third of the time to compile, and on macOS the CPU computes.
set(LLAMA_BUILD_COMMON OFF)
set(GGML_METAL OFF)
set(GGML_BLAS OFF)
