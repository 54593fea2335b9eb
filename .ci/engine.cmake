# llama-cpp-python sets LLAMA_BUILD_COMMON in the cache; a normal variable shadows the cache.
set(LLAMA_BUILD_COMMON OFF)
