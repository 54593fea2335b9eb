# Builds libcpuchat-read and, for Linux on x86, libcpuchat-kernels.so beside the engine's libraries. They link to none of
# them: the CPU backend may be one of many modules, and the one that runs here provides the symbols.
if(NOT TARGET ggml-base OR NOT UNIX)
  return()
endif()
set(here "${CMAKE_CURRENT_LIST_DIR}")

function(library name)
  add_library(${name} SHARED ${ARGN})
  target_compile_features(${name} PRIVATE cxx_std_17)
  set_target_properties(${name} PROPERTIES CXX_VISIBILITY_PRESET hidden)
  find_package(Threads REQUIRED)
  target_link_libraries(${name} PRIVATE Threads::Threads)
  if(SKBUILD_PLATLIB_DIR)
    install(TARGETS ${name} LIBRARY DESTINATION "${SKBUILD_PLATLIB_DIR}/llama_cpp/lib")
  else()
    install(TARGETS ${name} LIBRARY DESTINATION llama_cpp/lib)
  endif()
endfunction()

library(cpuchat-read "${here}/read.cpp")
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  return()
endif()

get_target_property(ggml ggml-base SOURCE_DIR)
get_target_property(version ggml-base VERSION)
library(cpuchat-kernels
  "${here}/buffer_type.cpp" "${here}/measure.cpp" "${here}/layout.cpp" "${here}/activations.cpp" "${here}/floats.cpp"
  "${here}/products_avx2.cpp" "${here}/products_avx_vnni.cpp" "${here}/products_avx512.cpp" "${here}/products_amx.cpp")
target_include_directories(cpuchat-kernels PRIVATE "${ggml}/../include" "${ggml}" "${ggml}/ggml-cpu")
target_compile_definitions(cpuchat-kernels PRIVATE "CPUCHAT_GGML_VERSION=\"${version}\"")

# Each set of instructions is for its own file: the others run on every CPU. The products keep the order in which they are
# written, without which GCC spills most of its registers (half of the speed).
function(instructions file)
  string(JOIN " " flags -O2 -fno-tree-reassoc -fno-tree-ter -fno-schedule-insns2 ${ARGN})
  set_source_files_properties("${here}/${file}" PROPERTIES COMPILE_FLAGS "${flags}")
endfunction()
instructions(activations.cpp -mavx2)
set_source_files_properties("${here}/floats.cpp" PROPERTIES COMPILE_FLAGS "-O3 -ffp-contract=off -mavx2 -mfma -mf16c")
instructions(products_avx2.cpp -mavx2 -mfma -mf16c)
instructions(products_avx_vnni.cpp -mavx2 -mfma -mf16c -mavxvnni)
instructions(products_avx512.cpp -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c)
instructions(products_amx.cpp -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c -mamx-tile -mamx-int8)
