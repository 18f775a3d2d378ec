// The init scopes that this thread has entered, for the rest of zeropage. Programs use init_scope.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "zeropage/tensor/init_scope.h"

namespace zeropage {

/// The domain whose scope this thread has entered last, or null.
std::shared_ptr<Domain> scope_domain();
/// Whether this thread is in a scope of the domain, also in an outer one.
bool is_in_scope_of(const Domain& domain);
/// Notes a storage made in a scope, which ranks must make equal. Does nothing outside of scopes.
void note_created(Domain& domain, c10::weak_intrusive_ptr<c10::StorageImpl> storage);
/// Whether the end of this thread's scope prepares parameters (Domain::begin_parameter).
bool scope_begins_parameters();
/// Notes a paged tensor that may become such a parameter.
void note_result(const at::Tensor& tensor);

/// Lets factories on this thread make ordinary tensors while it lives.
class OutsideScopes {
 public:
  OutsideScopes();
  ~OutsideScopes();
  OutsideScopes(const OutsideScopes&) = delete;
  OutsideScopes& operator=(const OutsideScopes&) = delete;

 private:
  std::shared_ptr<OpenScope> outer_;
  bool outer_included_;
};

}  // namespace zeropage
