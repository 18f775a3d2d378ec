# find_package(zeropage) -> zeropage::zeropage. Needs Torch, the same release that zeropage was built with.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
find_dependency(Torch)
include("${CMAKE_CURRENT_LIST_DIR}/zeropageTargets.cmake")
