# Installs the library, its headers and its packages for CMake and pkg-config, in one of two layouts:
#   a prefix            lib/, include/, lib/cmake/zeropage/, lib/pkgconfig/
#   the Python package  zeropage/lib/, zeropage/include/, zeropage/share/cmake/zeropage/, zeropage/lib/pkgconfig/
# scikit-build installs the second one. In its build folder, `cmake --install FOLDER --component development` installs the
# first one without compiling again.

# libzeropage.so finds torch, and the libgomp that torch ships, by its own run path.
set(rpath $ORIGIN)
if(SKBUILD)
  list(APPEND rpath $ORIGIN/../../torch/lib $ORIGIN/../../torch.libs)
endif()
if(NOT SKBUILD OR SKBUILD_STATE STREQUAL "editable")  # a wheel leaves this machine
  list(APPEND rpath ${zeropage_torch_root}/lib)
  if(zeropage_torch_openmp)
    cmake_path(GET zeropage_torch_openmp PARENT_PATH openmp_folder)
    list(APPEND rpath ${openmp_folder})
  endif()
  list(REMOVE_DUPLICATES rpath)
endif()
set_target_properties(zeropage PROPERTIES INSTALL_RPATH "${rpath}")

if(NOT ZEROPAGE_INSTALL)
  return()
endif()

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

string(REGEX MATCH "^[0-9]+\\.[0-9]+" zeropage_torch_release "${zeropage_torch_version}")
write_basic_package_version_file(${PROJECT_BINARY_DIR}/zeropageConfigVersion.cmake COMPATIBILITY SameMinorVersion)

# The last two arguments are the folder of torch, as the CMake package and the file for pkg-config name it.
function(zeropage_install component lib include cmake torch_of_cmake torch_of_pc)
  set(folder ${PROJECT_BINARY_DIR}/${component})
  set(rule COMPONENT ${component} ${ARGN})

  install(TARGETS zeropage EXPORT zeropage_${component} LIBRARY DESTINATION ${lib} ${rule}
    INCLUDES DESTINATION ${include})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/src/zeropage DESTINATION ${include} ${rule} FILES_MATCHING PATTERN "*.h")

  set(zeropage_torch_hint "${torch_of_cmake}")
  configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/zeropageConfig.cmake.in ${folder}/zeropageConfig.cmake
    INSTALL_DESTINATION ${cmake} NO_SET_AND_CHECK_MACRO)
  install(EXPORT zeropage_${component} NAMESPACE zeropage:: FILE zeropageTargets.cmake DESTINATION ${cmake} ${rule})
  install(FILES ${folder}/zeropageConfig.cmake ${PROJECT_BINARY_DIR}/zeropageConfigVersion.cmake
    ${PROJECT_SOURCE_DIR}/cmake/zeropageTorch.cmake DESTINATION ${cmake} ${rule})

  # Relative to the file's own folder, so that the files may move together.
  set(prefix /prefix)
  cmake_path(ABSOLUTE_PATH lib BASE_DIRECTORY ${prefix} OUTPUT_VARIABLE zeropage_pc_libdir)
  cmake_path(ABSOLUTE_PATH include BASE_DIRECTORY ${prefix} OUTPUT_VARIABLE zeropage_pc_includedir)
  file(RELATIVE_PATH zeropage_pc_prefix ${zeropage_pc_libdir}/pkgconfig ${prefix})
  file(RELATIVE_PATH zeropage_pc_libdir ${prefix} ${zeropage_pc_libdir})
  file(RELATIVE_PATH zeropage_pc_includedir ${prefix} ${zeropage_pc_includedir})
  string(REGEX REPLACE "/$" "" zeropage_pc_prefix "${zeropage_pc_prefix}")
  set(zeropage_pc_torch "${torch_of_pc}")
  set(zeropage_pc_openmp "")
  set(zeropage_pc_openmp_flags "")
  if(zeropage_torch_openmp)
    cmake_path(GET zeropage_torch_openmp FILENAME name)
    cmake_path(GET zeropage_torch_openmp PARENT_PATH openmp_folder)
    set(zeropage_pc_openmp "-l:${name} ")
    if(NOT openmp_folder STREQUAL "${zeropage_torch_root}/lib")
      set(zeropage_pc_openmp_flags "-L\${torch}/../torch.libs -Wl,-rpath,\${torch}/../torch.libs ")
    endif()
  endif()
  configure_file(${PROJECT_SOURCE_DIR}/cmake/zeropage.pc.in ${folder}/zeropage.pc @ONLY)
  install(FILES ${folder}/zeropage.pc DESTINATION ${lib}/pkgconfig ${rule})
endfunction()

if(SKBUILD)
  zeropage_install(python zeropage/lib zeropage/include zeropage/share/cmake/zeropage
    [[${CMAKE_CURRENT_LIST_DIR}/../../../../torch]] [[${prefix}/torch]])
  zeropage_install(development ${CMAKE_INSTALL_LIBDIR} ${CMAKE_INSTALL_INCLUDEDIR} ${CMAKE_INSTALL_LIBDIR}/cmake/zeropage
    ${zeropage_torch_root} ${zeropage_torch_root} EXCLUDE_FROM_ALL)
else()
  zeropage_install(development ${CMAKE_INSTALL_LIBDIR} ${CMAKE_INSTALL_INCLUDEDIR} ${CMAKE_INSTALL_LIBDIR}/cmake/zeropage
    ${zeropage_torch_root} ${zeropage_torch_root})
endif()

if(NOT SKBUILD)
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT development)
endif()

# cpack -G "DEB;TGZ"
if(PROJECT_IS_TOP_LEVEL)
  set(CPACK_PACKAGE_NAME zeropage)
  set(CPACK_PACKAGE_VENDOR zeropage)
  set(CPACK_PACKAGE_CONTACT "the zeropage maintainers")
  set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Virtual memory for training state, for C++ programs on libtorch")
  set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
  set(CPACK_STRIP_FILES ON)
  set(CPACK_INSTALL_CMAKE_PROJECTS "${PROJECT_BINARY_DIR};zeropage;development;/")
  set(CPACK_DEBIAN_PACKAGE_NAME libzeropage-dev)
  set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
  set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
  set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6, libgcc-s1, libstdc++6")
  if(LIBURING_INCLUDE AND LIBURING_LIBRARY)
    file(REAL_PATH ${LIBURING_LIBRARY} library)
    if(library MATCHES "liburing\\.so\\.([0-9]+)")
      string(APPEND CPACK_DEBIAN_PACKAGE_DEPENDS ", liburing${CMAKE_MATCH_1}")
    endif()
  endif()
  include(CPack)
endif()
