# What `cmake --install` puts where: headers, library, command, CMake package (treemla::treemla), pkg-config file, licence.
# Off by default inside another project, where treemla::treemla comes from add_subdirectory or FetchContent.
option(TREEMLA_INSTALL "Install the library, its headers and the command" ${PROJECT_IS_TOP_LEVEL})

# Only the API leaves the shared library: template code of its private dependencies would otherwise interpose with other
# versions of them in the same process. Sanitizers want to see everything.
get_target_property(treemla_type treemla TYPE)
if(treemla_type STREQUAL "SHARED_LIBRARY" AND CMAKE_SYSTEM_NAME STREQUAL "Linux" AND NOT TREEMLA_SANITIZE)
  target_link_options(treemla PRIVATE "LINKER:--version-script=${CMAKE_CURRENT_LIST_DIR}/treemla.map")
  set_property(TARGET treemla APPEND PROPERTY LINK_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/treemla.map)
endif()

if(NOT TREEMLA_INSTALL)
  return()
endif()

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(TARGETS treemla EXPORT treemla-targets
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/treemla DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(TARGET treemla_command)
  install(TARGETS treemla_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(treemla_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/treemla)
if(treemla_type STREQUAL "STATIC_LIBRARY")
  set(treemla_is_static ON)
  set(treemla_pc_requires_private "fmt libhwy")
  set(treemla_pc_libs_private "-lstdc++ -lm -pthread")
  if(TREEMLA_HAS_CUDA)
    string(PREPEND treemla_pc_libs_private "${CUDA_cudart_static_LIBRARY} -ldl -lrt ")
  endif()
else()
  set(treemla_is_static OFF)
endif()
set(treemla_needs_cudart ${TREEMLA_HAS_CUDA})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/treemla-config.cmake.in
  ${PROJECT_BINARY_DIR}/package/treemla-config.cmake INSTALL_DESTINATION ${treemla_cmake_dir})
# While the major version is 0, minor versions may break.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/treemla-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/package/treemla-config.cmake
  ${PROJECT_BINARY_DIR}/package/treemla-config-version.cmake DESTINATION ${treemla_cmake_dir})
install(EXPORT treemla-targets NAMESPACE treemla:: DESTINATION ${treemla_cmake_dir})

# ${pcfiledir} keeps the file right wherever the prefix is moved to.
if(IS_ABSOLUTE ${CMAKE_INSTALL_LIBDIR} OR IS_ABSOLUTE ${CMAKE_INSTALL_INCLUDEDIR})
  set(treemla_pc_prefix ${CMAKE_INSTALL_PREFIX})
  set(treemla_pc_libdir ${CMAKE_INSTALL_FULL_LIBDIR})
  set(treemla_pc_includedir ${CMAKE_INSTALL_FULL_INCLUDEDIR})
else()
  file(RELATIVE_PATH treemla_pc_prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
  string(PREPEND treemla_pc_prefix "\${pcfiledir}/")
  string(REGEX REPLACE "/$" "" treemla_pc_prefix ${treemla_pc_prefix})
  set(treemla_pc_libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
  set(treemla_pc_includedir "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
configure_file(${CMAKE_CURRENT_LIST_DIR}/treemla.pc.in ${PROJECT_BINARY_DIR}/package/treemla.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/package/treemla.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
