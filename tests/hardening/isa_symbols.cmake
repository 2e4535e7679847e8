# Every unit of an instruction set defines one symbol that the linker can see: the getter of its
# table. Anything else (an inline function of a header, a template, an inline variable) is a weak
# symbol, and of weak symbols with one name the linker keeps any one for the whole program: the copy
# that was compiled for AVX-512, say, on a CPU without it.
#
#   cmake -DNM=... -DOBJECTS=a.o,b.o -DSOURCES=words_a.cpp,words_b.cpp -P isa_symbols.cmake
if(NOT NM)
  message("SKIPPED: there is no nm")
  return()
endif()
string(REPLACE "," ";" objects "${OBJECTS}")
string(REPLACE "," ";" sources "${SOURCES}")
list(LENGTH objects object_count)
list(LENGTH sources source_count)
if(object_count EQUAL 0 OR NOT object_count EQUAL source_count)
  message(FATAL_ERROR "${object_count} objects of ${source_count} units: ${OBJECTS}")
endif()
foreach(object IN LISTS objects)
  if(NOT object MATCHES "/(words_[a-z0-9_]+)\\.cpp\\.(o|obj)$")
    message(FATAL_ERROR "which unit is ${object}?")
  endif()
  set(getter "qattn::cpu::${CMAKE_MATCH_1}()")
  execute_process(COMMAND ${NM} -C --defined-only --extern-only ${object}
                  OUTPUT_VARIABLE output ERROR_VARIABLE error RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${NM} ${object}: ${error}")
  endif()
  # "<address> <letter> <name>", a line each; T is code with external linkage that is not weak.
  string(STRIP "${output}" output)
  string(REPLACE "\n" ";" lines "${output}")
  set(found FALSE)
  foreach(line IN LISTS lines)
    if(line MATCHES "^[0-9a-f]+ T (.*)$" AND CMAKE_MATCH_1 STREQUAL getter)
      set(found TRUE)
    elseif(NOT line MATCHES " V DW[.]ref[.]")  # sanitizer builds: a pointer for unwinding, no code
      message(SEND_ERROR "${object} defines more than ${getter}: ${line}")
    endif()
  endforeach()
  if(NOT found)
    message(SEND_ERROR "${object} does not define ${getter}")
  endif()
endforeach()
message("${object_count} units, each with one symbol")
