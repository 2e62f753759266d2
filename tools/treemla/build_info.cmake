# treemla_build_info.hpp: the git revision and flags of this build, for `treemla info` and records of benchmarks.
#
# Included by tools/CMakeLists.txt after the target treemla_command. The same file then runs as a script at every
# build, since the revision changes without configuring again; the header is written only when its text changes.
if(NOT CMAKE_SCRIPT_MODE_FILE)
  set(build_info_dir ${CMAKE_CURRENT_BINARY_DIR}/build_info)
  string(TOUPPER "${CMAKE_BUILD_TYPE}" build_type_upper)
  string(REGEX REPLACE " +" " " build_flags
    "${CMAKE_BUILD_TYPE} ${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${build_type_upper}}")
  string(STRIP "${build_flags}" build_flags)
  add_custom_target(treemla_build_info
    COMMAND ${CMAKE_COMMAND} -DSOURCE_DIR=${PROJECT_SOURCE_DIR} "-DFLAGS=${build_flags}"
      -DHEADER=${build_info_dir}/treemla_build_info.hpp -P ${CMAKE_CURRENT_LIST_FILE}
    BYPRODUCTS ${build_info_dir}/treemla_build_info.hpp
    COMMENT "Git revision" VERBATIM)
  add_dependencies(treemla_command treemla_build_info)
  target_include_directories(treemla_command PRIVATE ${build_info_dir})
  return()
endif()

set(revision unknown)
find_program(GIT git)
if(GIT)
  execute_process(COMMAND ${GIT} -C ${SOURCE_DIR} describe --always --dirty --abbrev=12 --exclude=*
    OUTPUT_VARIABLE described RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT failed)
    set(revision ${described})
  endif()
endif()
set(text "#define TREEMLA_BUILD_REVISION \"${revision}\"\n#define TREEMLA_BUILD_FLAGS \"${FLAGS}\"\n")
if(EXISTS ${HEADER})
  file(READ ${HEADER} before)
endif()
if(NOT text STREQUAL before)
  file(WRITE ${HEADER} "${text}")
endif()
