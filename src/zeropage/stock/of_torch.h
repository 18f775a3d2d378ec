// torch's own definitions of the functions that stock/ defines anew ([Note: interposition] in libtorch.cpp).
#pragma once

#include <dlfcn.h>

#include <string>

#include "zeropage/base/errors.h"

namespace zeropage {

/// torch's function of that mangled name. Throws Error if no library after this one defines it.
template <class Function>
Function* of_torch(const char* name) {
  void* const found = ::dlsym(RTLD_NEXT, name);
  if (!found) throw Error(std::string("libtorch has no ") + name + ": link zeropage before torch");
  return reinterpret_cast<Function*>(found);
}

}  // namespace zeropage
