# Read before the project of llama-cpp-python, which sets these in CMake's cache whatever CMAKE_ARGS says: a normal
# variable shadows the cache. Nothing here loads the common library; on macOS the CPU computes, and not Metal.
set(LLAMA_BUILD_COMMON OFF)
set(GGML_METAL OFF)
set(GGML_BLAS OFF)

# Clang has neither this flag nor the bug that it is for (pyproject.toml).
if(DEFINED ENV{CXX})
  separate_arguments(compiler UNIX_COMMAND "$ENV{CXX}")
else()
  set(compiler c++)
endif()
execute_process(
  COMMAND ${compiler} -fno-dse -x c++ -fsyntax-only /dev/null
  RESULT_VARIABLE refused OUTPUT_QUIET ERROR_QUIET
)
if(refused)
  string(REPLACE "-fno-dse" "" CMAKE_CXX_FLAGS "${CMAKE_CXX_FLAGS}")
endif()
