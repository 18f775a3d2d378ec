// zeropage.io: the I/O module for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace zeropage {

void bind_io(pybind11::module_& module);

}  // namespace zeropage
