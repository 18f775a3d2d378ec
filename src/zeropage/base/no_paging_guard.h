// While it lives, this thread's operators treat tensors that paging itself makes as ordinary ones. Neither the paging
// fallback nor autograd takes part. In a planned run, the mode that counts the program's operators does not either.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "zeropage/base/clock.h"
#include "zeropage/base/torch_compat.h"

namespace zeropage {

struct NoPagingGuard {
  c10::impl::ExcludeDispatchKeyGuard ordinary{excluded()};
  c10::NoGradGuard no_grad;

  static c10::DispatchKeySet excluded() {
    const c10::DispatchKeySet paged = kPagedKeys;
    const c10::DispatchKeySet modes({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
    return VirtualClock::current() ? paged | modes : paged;
  }
};

/// While it lives, operators on this thread fault again, although a NoPagingGuard is active.
class PagingAgain {
 public:
  PagingAgain() {
    for (int i = 0; i < 2; ++i) {
      was_excluded_[i] = c10::impl::tls_is_dispatch_key_excluded(kKeys[i]);
      c10::impl::tls_set_dispatch_key_excluded(kKeys[i], false);
    }
  }
  ~PagingAgain() {
    for (int i = 0; i < 2; ++i) c10::impl::tls_set_dispatch_key_excluded(kKeys[i], was_excluded_[i]);
  }
  PagingAgain(const PagingAgain&) = delete;
  PagingAgain& operator=(const PagingAgain&) = delete;

 private:
  static constexpr c10::DispatchKey kKeys[] = {kPagedKey, kInnerKey};
  bool was_excluded_[2];
};

}  // namespace zeropage
