// The page fault: a boxed fallback on kPagedKey, which runs before autograd and autocast for every operator that
// touches a paged tensor, in forward, backward, recomputation, optimizers and anywhere else.
#pragma once

#include "zeropage/base/errors.h"

namespace zeropage {

/// Called with an Error on its way out of an operator; may throw it in another form (Python's). One a process.
using ErrorTranslator = void (*)(const Error& error);
void set_error_translator(ErrorTranslator translator);

}  // namespace zeropage
