# Where the GPU kernels are: the directories of attention/architectures.inc, and those of this file.
# Each says in its kernels.cmake which of its sources and lists of instances are compiled for which
# GPUs, in words that its reader defines: nvcc's build (src/backends/cuda) and the emulator's
# (tests/emulated), which compiles all of them.
#
#   qattn_kernel_group(GROUP [FOR regex] [BASES number...] [EXCEPT number...] [PTX]
#                      [OPTIONS option...])
#   qattn_kernel_sources(GROUP source...)
#   qattn_kernel_list(GROUP list [OPTIONS option...])  # list.inc, for instance.cu.in
#
# It has said before whose GPUs in qattn_kernel_vendors, a regular expression: "nvidia|amd".
#
# A group says for which GPUs of the build there is machine code: FOR those that match, or where
# none does an empty kernel for each; else for all, but not for those of EXCEPT where code of sm_80
# is there for them. BASES and PTX are those of qattn_cuda_architectures(). A directory makes the
# groups that are its own. These are everybody's:
#
#   host        no kernels: compiled once
#   everywhere  every GPU has it
#   codes       likewise, what makes codes
#
# Of the portable prefill kernels ptxas spills two thirds more on sm_100 and sm_120 from code of
# sm_90. Codes are bit-exact on every backend (docs/NUMERICS.md), so nothing is contracted to FMA
# where they are made, and conversions from FP8 begin with sm_89. Attention kernels may be: what
# they add up is rounded once more anyway.
qattn_kernel_group(host)
qattn_kernel_group(everywhere BASES 80 90 100 EXCEPT 89 PTX)
qattn_kernel_group(codes BASES 80 89 90 PTX OPTIONS --fmad=false)
set(architectures ${CMAKE_CURRENT_LIST_DIR}/attention/architectures.inc)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${architectures})
file(STRINGS ${architectures} directories REGEX "^QATTN_ARCHITECTURE\\((${qattn_kernel_vendors}), ")
list(TRANSFORM directories REPLACE "^[A-Z_]+\\([a-z]+, (.*)\\)$" "attention/\\1")
foreach(directory IN ITEMS
    attention attention/common attention/mma attention/schedule ${directories}
    decode/mixed_kv decode/uniform8 kv_append quantize/gpu quantize/overlap)
  include(${CMAKE_CURRENT_LIST_DIR}/${directory}/kernels.cmake)
endforeach()
