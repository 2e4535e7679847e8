# qattn_host_kernels(OUT [MATCH regex] [EXCEPT regex] SIZE n [DIMENSIONS regex FOLDER folder]): the
# sources of GPU kernels that the host's compiler takes, by src/kernels/kernels.cmake; the
# expressions are about places below src/kernels. SIZE instances are a source. DIMENSIONS and FOLDER:
# as in qattn_list_of_dimensions().
include(${CMAKE_CURRENT_LIST_DIR}/cuda_instances.cmake)
function(qattn_host_kernels out)
  cmake_parse_arguments(PARSE_ARGV 1 host "" "MATCH;EXCEPT;SIZE;DIMENSIONS;FOLDER" "")
  set(root ${PROJECT_SOURCE_DIR}/src)
  set(found "")
  macro(qattn_kernel_wanted name)
    file(RELATIVE_PATH place ${root}/kernels ${CMAKE_CURRENT_LIST_DIR}/${name})
    set(wanted ON)
    if((host_MATCH AND NOT place MATCHES "${host_MATCH}") OR
       (host_EXCEPT AND place MATCHES "${host_EXCEPT}"))
      set(wanted OFF)
    endif()
  endmacro()
  macro(qattn_kernel_group)  # the emulator's GPU is any of them
  endmacro()
  macro(qattn_kernel_sources group)
    foreach(source IN ITEMS ${ARGN})
      qattn_kernel_wanted(${source})
      if(wanted)
        list(APPEND found ${root}/kernels/${place})
      endif()
    endforeach()
  endmacro()
  macro(qattn_kernel_list group list)
    qattn_kernel_wanted(${list}.inc)
    if(wanted)
      qattn_list_of_dimensions(file ${root}/kernels/${place} "${host_DIMENSIONS}"
                               FOLDER "${host_FOLDER}")
      qattn_cuda_instances(generated TEMPLATE ${CMAKE_CURRENT_LIST_DIR}/instance.cu.in
                           LIST ${file} GROUP ${host_SIZE})
      set_source_files_properties(${generated} PROPERTIES LANGUAGE CXX)
      list(APPEND found ${generated})
    endif()
  endmacro()
  set(qattn_kernel_vendors "nvidia|amd")
  include(${root}/kernels/kernels.cmake)
  set(${out} "${found}" PARENT_SCOPE)
endfunction()
