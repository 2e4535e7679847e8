# qattn_list_of_dimensions(OUT LIST dimensions FOLDER folder): where only some head dimensions are
# built, OUT is a copy of the list with their lines alone, at its place below src in FOLDER, for who
# includes that in front of src: tables of kernels are made of the same lists. dimensions is a
# regular expression; empty, OUT is the list itself.
function(qattn_list_of_dimensions out list dimensions)
  cmake_parse_arguments(PARSE_ARGV 3 arg "" "FOLDER" "")
  set(${out} ${list} PARENT_SCOPE)
  if(dimensions STREQUAL "")
    return()
  endif()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${list})
  file(STRINGS ${list} lines)
  set(text "")
  foreach(line IN LISTS lines)
    if(NOT line MATCHES "^QATTN_INSTANCE\\(" OR line MATCHES "^QATTN_INSTANCE\\((${dimensions}),")
      string(APPEND text "${line}\n")
    endif()
  endforeach()
  file(RELATIVE_PATH place ${PROJECT_SOURCE_DIR}/src ${list})
  file(CONFIGURE OUTPUT ${arg_FOLDER}/${place} CONTENT "${text}" @ONLY)
  set(${out} ${arg_FOLDER}/${place} PARENT_SCOPE)
endfunction()

# qattn_cuda_instances(OUT TEMPLATE file LIST file GROUP n): one source in the build tree for every
# n lines `QATTN_INSTANCE(...)` of LIST; @INSTANCE@ in TEMPLATE stands for the lines. OUT gets the
# names, which begin with those of LIST's directory and LIST. Every kernel is a few seconds to
# minutes of nvcc, and sources compile in parallel.
function(qattn_cuda_instances out)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TEMPLATE;LIST;GROUP" "")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${arg_LIST})
  # Not file(STRINGS) alone: brackets and semicolons in a line would confuse CMake's lists.
  file(STRINGS ${arg_LIST} lines REGEX "^QATTN_INSTANCE\\(")
  get_filename_component(stem ${arg_LIST} NAME_WE)
  get_filename_component(directory ${arg_LIST} DIRECTORY)
  get_filename_component(directory ${directory} NAME)
  string(PREPEND stem ${directory}_)
  set(sources "")
  set(INSTANCE "")
  set(count 0)
  list(LENGTH lines total)
  foreach(line IN LISTS lines)
    string(APPEND INSTANCE "${line}\n")
    math(EXPR count "${count} + 1")
    math(EXPR rest "${count} % ${arg_GROUP}")
    if(rest EQUAL 0 OR count EQUAL total)
      set(source ${CMAKE_CURRENT_BINARY_DIR}/${stem}_${count}.cu)
      configure_file(${arg_TEMPLATE} ${source} @ONLY)
      list(APPEND sources ${source})
      set(INSTANCE "")
    endif()
  endforeach()
  set(${out} "${sources}" PARENT_SCOPE)
endfunction()
