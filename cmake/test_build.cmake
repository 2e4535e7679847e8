# How tests and emulated kernels are compiled: quickly, since they run for seconds; and so that two
# trees share the sanitizers. UndefinedBehaviorSanitizer looks at emulated kernels of every head
# dimension in the release build, where its findings end the program; AddressSanitizer alone looks at
# them in the sanitized one, since both together take twice as long to compile. Of the rest of the
# sanitized build it is both. A build with everything has both everywhere (preset sanitize-all).

# What the compiler must be told for GPU kernels: loops are unrolled by the words that mean it; g++
# does not know nvcc's pragmas, and takes arrays filled by run-time indices for uninitialised.
# Of pointers UndefinedBehaviorSanitizer says nothing there, which would double the time to compile:
# words of the emulator check addresses.
function(qattn_emulated_options target)
  target_compile_options(${target} PRIVATE -Wno-unknown-pragmas -Wno-maybe-uninitialized -x c++)
  if(NOT QATTN_SANITIZE)
    target_compile_options(${target} PRIVATE
      -O1 -fsanitize=undefined -fsanitize-undefined-trap-on-error
      -fno-sanitize=null,alignment,object-size,vptr,pointer-overflow)
  elseif(QATTN_SAMPLE)
    target_compile_options(${target} PRIVATE -fno-sanitize=undefined)
  endif()
endfunction()

# For a folder of tests. In the sanitized sample the library's own code is what is looked at.
macro(qattn_test_options)
  if(QATTN_SAMPLE)
    add_compile_options(-O0 -fno-sanitize=undefined)
  elseif(CMAKE_BUILD_TYPE STREQUAL "Release")
    add_compile_options(-O1)
  endif()
endmacro()

# qattn_precompiled_tests(program...): GoogleTest's headers and the usual ones are compiled once for
# all of these programs.
function(qattn_precompiled_tests)
  if(NOT TARGET qattn_test_headers)
    file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/test_headers.cpp CONTENT "" @ONLY)
    add_executable(qattn_test_headers EXCLUDE_FROM_ALL ${CMAKE_BINARY_DIR}/test_headers.cpp)
    target_link_libraries(qattn_test_headers PRIVATE GTest::gtest_main)
    target_precompile_headers(qattn_test_headers PRIVATE
      <gtest/gtest.h> <algorithm> <cmath> <cstdint> <cstring> <functional> <limits> <memory> <random>
      <span> <string> <vector>)
  endif()
  foreach(program IN ITEMS ${ARGN})
    target_precompile_headers(${program} REUSE_FROM qattn_test_headers)
  endforeach()
endfunction()
