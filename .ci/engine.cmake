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

# Threads of ggml spin at barriers. Beside another busy program the one whose CPU it shares is away for a time slice, and
# the others burn theirs: 0.28 of the speed beside two programs on two cores, where 0.5 is fair. With barrier.c they
# sleep.
set(CPUCHAT_ENGINE "" CACHE STRING "The version of this file, in pyproject.toml")
function(sleep_at_barriers file)
  if(NOT EXISTS "${file}.orig")  # uv keeps the unpacked source for the next build
    file(COPY_FILE "${file}" "${file}.orig")
  endif()
  file(READ "${file}.orig" source)
  file(READ "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/barrier.c" barrier)
  set(start "void ggml_barrier(struct ggml_threadpool * tp) {")
  set(spin "    while (atomic_load_explicit(&tp->n_barrier_passed, memory_order_relaxed) == n_passed) {
        ggml_thread_cpu_relax();
    }")
  set(last "        atomic_fetch_add_explicit(&tp->n_barrier_passed, 1, memory_order_seq_cst);
        return;")
  string(REPLACE "        return;" "        cpuchat_barrier_wake(&tp->n_barrier_passed);
        return;" wake "${last}")
  foreach(name IN ITEMS start spin last)
    string(FIND "${source}" "${${name}}" at)
    if(at EQUAL -1)
      message(FATAL_ERROR "ggml_barrier is not that of the pinned llama.cpp: renew .ci/engine.cmake.")
    endif()
  endforeach()
  string(REPLACE "${start}" "${barrier}${start}" source "${source}")
  string(REPLACE "${spin}" "    cpuchat_barrier_wait(&tp->n_barrier_passed, n_passed);" source "${source}")
  string(REPLACE "${last}" "${wake}" source "${source}")
  file(READ "${file}" before)
  if(NOT source STREQUAL before)
    file(WRITE "${file}" "${source}")
  endif()
endfunction()

file(GLOB ggml_cpu "${CMAKE_SOURCE_DIR}/ggml/src/ggml-cpu/ggml-cpu.c"
  "${CMAKE_SOURCE_DIR}/vendor/llama.cpp/ggml/src/ggml-cpu/ggml-cpu.c")
foreach(file IN LISTS ggml_cpu)
  sleep_at_barriers("${file}")
endforeach()

# cpuchat's kernels are built in the same build, as soon as all targets of the engine are known.
if(NOT DEFINED CPUCHAT_KERNELS)
  get_filename_component(CPUCHAT_KERNELS "${CMAKE_CURRENT_LIST_DIR}/../cpuchat/kernels" ABSOLUTE)
  cmake_language(EVAL CODE "
    cmake_language(DEFER DIRECTORY [[${CMAKE_SOURCE_DIR}]] CALL include [[${CPUCHAT_KERNELS}/kernels.cmake]])
  ")
endif()
