# Finds the libraries of Torch for the build of zeropage, and for the projects that use it.
#
# Torch's own TorchConfig.cmake asks for the CUDA toolkit if torch was built with CUDA. zeropage compiles nothing for
# CUDA, so this file only locates the folder of torch.

# zeropage_find_torch([HINTS folder...] [PYTHON_ONLY] [GLOBAL]) searches in this order:
#   1. the target `torch`, if the project found Torch before,
#   2. share/cmake/Torch in Torch_DIR, Torch_ROOT or CMAKE_PREFIX_PATH,
#   3. HINTS, folders of torch,
#   4. the torch of the Python interpreter: Python3_EXECUTABLE, Python_EXECUTABLE, or the first in PATH.
# PYTHON_ONLY skips 1 to 3. The result:
#   zeropage::torch         the headers of torch, with libtorch, libtorch_cpu, libc10 and the libgomp that torch ships
#   zeropage_torch_root     the folder with include/ and lib/
#   zeropage_torch_version  MAJOR.MINOR.PATCH
#   zeropage_torch_openmp   the path of that libgomp, or empty
#   zeropage_torch_error    the reason of a failure, or empty
function(zeropage_find_torch)
  cmake_parse_arguments(PARSE_ARGV 0 arg "PYTHON_ONLY;GLOBAL" "" "HINTS")
  set(root "")
  set(error "")
  set(of_target OFF)
  if(NOT arg_PYTHON_ONLY)
    _zeropage_torch_of_target(root)
    if(root)
      set(of_target ON)
    else()
      set(config NOTFOUND)
      find_path(config TorchConfig.cmake NO_CACHE NO_DEFAULT_PATH PATH_SUFFIXES Torch share/cmake/Torch
        PATHS ${Torch_DIR} $ENV{Torch_DIR} ${Torch_ROOT} $ENV{Torch_ROOT})
      find_path(config TorchConfig.cmake NO_CACHE PATH_SUFFIXES Torch share/cmake/Torch
        NO_CMAKE_SYSTEM_PATH NO_SYSTEM_ENVIRONMENT_PATH)
      if(config)
        cmake_path(SET root NORMALIZE "${config}/../../..")
      elseif(Torch_DIR)
        set(error "Torch_DIR is ${Torch_DIR}, which has no TorchConfig.cmake")
      endif()
    endif()
    foreach(hint IN LISTS arg_HINTS)
      if(NOT root AND NOT error AND EXISTS "${hint}/lib/libtorch_cpu.so")
        cmake_path(SET root NORMALIZE "${hint}")
      endif()
    endforeach()
  endif()
  if(NOT root AND NOT error)
    _zeropage_torch_of_python(root error)
  endif()

  set(version "")
  set(openmp "")
  if(root)
    string(REGEX REPLACE "/$" "" root "${root}")
    _zeropage_torch_version("${root}" version)
    foreach(library torch torch_cpu c10)
      if(NOT EXISTS "${root}/lib/lib${library}.so")
        set(error "${root} is no folder of torch: it has no lib/lib${library}.so")
      endif()
    endforeach()
    if(NOT error AND NOT version)
      set(error "${root} is no folder of torch: it has no include/torch/headeronly/version.h")
    endif()
    # A wheel keeps libraries that it repaired in torch.libs.
    file(GLOB openmp "${root}/lib/libgomp*.so*" "${root}/../torch.libs/libgomp*.so*")
    if(openmp)
      list(GET openmp 0 openmp)
      cmake_path(NORMAL_PATH openmp)
    endif()
  endif()

  if(NOT error AND NOT TARGET zeropage::torch)
    set(global "")
    if(arg_GLOBAL)
      set(global GLOBAL)
    endif()
    add_library(zeropage::torch INTERFACE IMPORTED ${global})
    target_include_directories(zeropage::torch SYSTEM INTERFACE
      "${root}/include" "${root}/include/torch/csrc/api/include")
    if(of_target)
      target_link_libraries(zeropage::torch INTERFACE torch)
    endif()
    target_link_libraries(zeropage::torch INTERFACE
      "${root}/lib/libtorch.so" "${root}/lib/libtorch_cpu.so" "${root}/lib/libc10.so" ${openmp})
  endif()
  foreach(name root version openmp error)
    set(zeropage_torch_${name} "${${name}}" PARENT_SCOPE)
  endforeach()
endfunction()

# zeropage_find_libstdcxx(RESULT) sets RESULT to the linker's option for the shared libstdc++.
function(zeropage_find_libstdcxx result)
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -print-file-name=libstdc++.so.6
    OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(IS_ABSOLUTE "${path}" AND EXISTS "${path}")
    set(${result} "-l:libstdc++.so.6" PARENT_SCOPE)
  else()
    set(${result} "-lstdc++" PARENT_SCOPE)
  endif()
endfunction()

# zeropage_link_first(TARGET LIBRARY) puts LIBRARY, then torch's libraries, before all other libraries of a program that
# links TARGET. The order of the project's own target_link_libraries() does not matter then. The dynamic linker must
# search libzeropage.so before libtorch_cpu.so, and libstdc++ before both libtorch.so and libtorch_cpu.so: torch 2.11
# exports parts of another libstdc++, and programs crash in its std::filesystem. -lstdc++ may find libstdc++.a alone;
# with two of them in a process, streams read no numbers. A linker that drops unused libraries must keep libtorch.so,
# which loads torch's CUDA libraries, and libgomp, which only torch's folder may have.
function(zeropage_link_first target library)
  zeropage_find_libstdcxx(libstdcxx)
  set(libraries "\"${library}\" ${libstdcxx}")
  foreach(path "${zeropage_torch_root}/lib/libtorch.so" "${zeropage_torch_root}/lib/libtorch_cpu.so"
      "${zeropage_torch_root}/lib/libc10.so" ${zeropage_torch_openmp})
    string(APPEND libraries " \"${path}\"")
  endforeach()
  set(options "SHELL:-Wl,--push-state,--no-as-needed ${libraries} -Wl,--pop-state")
  get_target_property(imported ${target} IMPORTED)
  if(NOT imported)
    set(options "$<BUILD_INTERFACE:${options}>")
  endif()
  set_property(TARGET ${target} APPEND PROPERTY INTERFACE_LINK_OPTIONS "${options}")
endfunction()

function(_zeropage_torch_of_target result)
  set(folders "")
  if(TARGET torch)
    get_target_property(folders torch INTERFACE_INCLUDE_DIRECTORIES)
  endif()
  foreach(folder IN LISTS folders)
    if(EXISTS "${folder}/torch/csrc/api/include/torch/version.h")
      cmake_path(GET folder PARENT_PATH root)
      set(${result} "${root}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

function(_zeropage_torch_of_python result error)
  set(python NOTFOUND)
  foreach(candidate "${Python3_EXECUTABLE}" "${Python_EXECUTABLE}")
    if(NOT python AND candidate)
      set(python "${candidate}")
    endif()
  endforeach()
  find_program(python NAMES python3 python NO_CACHE)
  set(advice "set Torch_DIR to share/cmake/Torch of a libtorch, or Python3_EXECUTABLE to a Python that has torch")
  if(NOT python)
    set(${error} "Torch was not found: ${advice}" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND "${python}" -c
    "import importlib.util as u, os; print(os.path.dirname(u.find_spec('torch').origin))"
    OUTPUT_VARIABLE root OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    set(${error} "Torch was not found, and ${python} has no torch: ${advice}" PARENT_SCOPE)
  else()
    set(${result} "${root}" PARENT_SCOPE)
  endif()
endfunction()

# Older releases of torch have these macros in torch/csrc/api/include/torch/version.h.
function(_zeropage_torch_version root result)
  foreach(header torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(EXISTS "${root}/include/${header}")
      set(parts "")
      foreach(part MAJOR MINOR PATCH)
        file(STRINGS "${root}/include/${header}" line REGEX "^#define TORCH_VERSION_${part} [0-9]+")
        if(line MATCHES "([0-9]+)$")
          list(APPEND parts ${CMAKE_MATCH_1})
        endif()
      endforeach()
      list(JOIN parts . version)
      if(version)
        set(${result} "${version}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
endfunction()
