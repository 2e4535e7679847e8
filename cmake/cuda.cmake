# Is the CUDA backend built, and for which GPUs? QATTN_CUDA: AUTO (where nvcc is), ON or OFF.
if(NOT QATTN_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "QATTN_CUDA: ${QATTN_CUDA} is none of AUTO, ON, OFF")
endif()
set(QATTN_HAS_CUDA OFF)
if(QATTN_CUDA STREQUAL "OFF")
  return()
endif()
if(QATTN_CUDA STREQUAL "AUTO")
  find_program(nvcc nvcc HINTS ${CMAKE_CUDA_COMPILER} ENV CUDACXX PATHS /usr/local/cuda/bin)
  mark_as_advanced(nvcc)
  if(NOT nvcc OR QATTN_SANITIZE OR CMAKE_CROSSCOMPILING)
    message(STATUS "The CUDA backend is left out: no nvcc, or sanitizers, or a cross-compilation")
    return()
  endif()
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${nvcc})
  endif()
endif()

# "80" means machine code for sm_80; the first also goes in as PTX, for GPUs that are not listed.
# "a" is one GPU with all its instructions, "f" a family with those that it shares. Machine code of
# 100 runs on sm_100 and sm_103 (B200, GB300), of 120 on sm_120 and sm_121.
foreach(architecture IN LISTS QATTN_CUDA_ARCHITECTURES)
  if(NOT architecture MATCHES "^[0-9]+[af]?$")
    message(FATAL_ERROR "QATTN_CUDA_ARCHITECTURES: ${architecture} is no number like 80 or 90a")
  endif()
endforeach()
list(GET QATTN_CUDA_ARCHITECTURES 0 first)

# qattn_cuda_architectures(TARGET [PTX] [BASES number...] ARCHITECTURES name...): the machine code
# that TARGET gets, for each architecture in its own instructions, or with BASES in those of the
# highest base that it has: the compiler proper runs once for each base, only the assembler for each
# architecture. With PTX also that of the first architecture of the build, if it has any.
function(qattn_cuda_architectures target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "PTX" "" "BASES;ARCHITECTURES")
  set(flags "")
  foreach(architecture IN LISTS arg_ARCHITECTURES)
    set(virtual ${architecture})
    if(arg_BASES)
      string(REGEX REPLACE "[af]$" "" architecture ${architecture})
      set(virtual ${architecture})
      foreach(base IN LISTS arg_BASES)  # from the lowest on
        if(NOT base GREATER architecture)
          set(virtual ${base})
        endif()
      endforeach()
    endif()
    list(APPEND flags "SHELL:-gencode arch=compute_${virtual},code=sm_${architecture}")
  endforeach()
  if(arg_PTX AND first MATCHES "^[0-9]+$")
    list(APPEND flags "SHELL:-gencode arch=compute_${first},code=compute_${first}")
  endif()
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES OFF)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${flags}>")
endfunction()

# CMake's own check of the compiler needs one that nvcc knows, and CMake 3.25 no families.
string(REGEX REPLACE "f$" "" CMAKE_CUDA_ARCHITECTURES ${first})
enable_language(CUDA)
foreach(kind IN ITEMS STANDARD EXTENSION)  # CMake 3.25 does not know that nvcc 12 and 13 know C++20
  if(NOT CMAKE_CUDA20_${kind}_COMPILE_OPTION)
    set(CMAKE_CUDA20_${kind}_COMPILE_OPTION -std=c++20)
  endif()
endforeach()
# Kernels load by libcu++'s ld.global.nc (isa/cuda/words_sm80.cuh), which CCCL has from 3.0 on. That
# one comes with CUDA 13.0.
set(least 13.0)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS least)
  set(reason "nvcc is of CUDA ${CMAKE_CUDA_COMPILER_VERSION}, libcu++ is needed as of ${least}")
  if(QATTN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "QATTN_CUDA: ${reason}")
  endif()
  message(STATUS "The CUDA backend is left out: ${reason}")
  return()
endif()
set(QATTN_HAS_CUDA ON)

# Beside the Python extension, where it is looked for; programs in bin/ do not find it by chance.
set(QATTN_CUDA_OUTPUT ${CMAKE_BINARY_DIR}/cuda)
if(QATTN_PYTHON)
  set(QATTN_CUDA_OUTPUT ${CMAKE_BINARY_DIR}/python/qattn)
endif()
