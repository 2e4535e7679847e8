# `cmake --install`: library, headers, find_package(qattn) and pkg-config. Everything finds its
# parts from where it lies, so that the prefix may be chosen at installation and moved afterwards.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/qattn)
target_include_directories(qattn INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
install(TARGETS qattn EXPORT qattn COMPONENT library
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/qattn COMPONENT library
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp" PATTERN "*.def")
install(EXPORT qattn NAMESPACE qattn:: FILE qattn-targets.cmake COMPONENT library
        DESTINATION ${package_dir})

get_target_property(kind qattn TYPE)
set(QATTN_IS_STATIC OFF)
if(kind STREQUAL "STATIC_LIBRARY")
  set(QATTN_IS_STATIC ON)
endif()
configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/qattn-config.cmake.in ${PROJECT_BINARY_DIR}/qattn-config.cmake
  INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
# Before version 1 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/qattn-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/qattn-config.cmake
              ${PROJECT_BINARY_DIR}/qattn-config-version.cmake
        COMPONENT library DESTINATION ${package_dir})

# What a program must link besides: with a shared library nothing, with an archive the run-time
# libraries of OpenMP and C++ (for a program whose linker is the C compiler).
set(pc_libs "")
if(QATTN_IS_STATIC)
  foreach(name IN LISTS OpenMP_CXX_LIB_NAMES)
    string(APPEND pc_libs " -l${name}")
  endforeach()
  set(cxx_runtime stdc++)
  if("c++" IN_LIST CMAKE_CXX_IMPLICIT_LINK_LIBRARIES)
    set(cxx_runtime c++)
  endif()
  foreach(name IN LISTS CMAKE_DL_LIBS)
    string(APPEND pc_libs " -l${name}")
  endforeach()
  string(APPEND pc_libs " ${CMAKE_THREAD_LIBS_INIT} -l${cxx_runtime} -lm")
endif()
foreach(name IN ITEMS LIBDIR INCLUDEDIR)
  set(pc_${name} "\${prefix}/${CMAKE_INSTALL_${name}}")
  if(IS_ABSOLUTE "${CMAKE_INSTALL_${name}}")
    set(pc_${name} "${CMAKE_INSTALL_${name}}")
  endif()
endforeach()
set(pc_prefix "${CMAKE_INSTALL_PREFIX}")
if(NOT IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  file(RELATIVE_PATH up "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/prefix")
  string(REGEX REPLACE "/$" "" up "${up}")
  set(pc_prefix "\${pcfiledir}/${up}")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/qattn.pc.in ${PROJECT_BINARY_DIR}/qattn.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/qattn.pc COMPONENT library
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
