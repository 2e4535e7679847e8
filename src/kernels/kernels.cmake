# Where the GPU kernels are: a directory a line. Each says in its kernels.cmake which of its sources
# and lists of instances are compiled for which GPUs, in two words that its reader defines: nvcc's
# build (src/backends/cuda) and the emulator's (tests/emulated).
#
#   qattn_kernel_sources(GROUP source...)
#   qattn_kernel_list(GROUP list [OPTIONS option...])  # list.inc, for instance.cu.in
#
# GROUP names GPUs; src/backends/cuda/CMakeLists.txt has them all.
foreach(directory IN ITEMS
    attention attention/schedule attention/sm80 attention/sm90a
    decode/mixed_kv decode/uniform8 kv_append quantize/gpu quantize/overlap)
  include(${CMAKE_CURRENT_LIST_DIR}/${directory}/kernels.cmake)
endforeach()
