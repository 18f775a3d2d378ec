// While it lives, operators of this thread see the tensors that paging itself makes as ordinary ones: neither our
// fallback nor autograd takes part.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "zeropage/base/torch_compat.h"

namespace zeropage {

struct NoPagingGuard {
  c10::impl::ExcludeDispatchKeyGuard ordinary{kPagedKey};
  c10::NoGradGuard no_grad;
};

}  // namespace zeropage
