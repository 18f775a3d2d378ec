#include "zeropage/tensor/init_scope.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <exception>
#include <optional>
#include <unordered_set>
#include <vector>

#include "zeropage/base/errors.h"
#include "zeropage/base/process.h"
#include "zeropage/tensor/paged_tensor.h"
#include "zeropage/tensor/shared_draws.h"

namespace zeropage {

/// A scope that a thread has entered. Only that thread uses it, except for `has_ended`: the scope's object may die on
/// another thread. Each use of the thread's scopes first drops those that have ended.
struct OpenScope {
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  const std::shared_ptr<Domain> domain;
  const std::shared_ptr<OpenScope> outer;
  const bool outer_included = c10::impl::tls_is_dispatch_key_included(kPagedKey);
  const std::uint64_t thread = this_thread_number();
  std::atomic<bool> has_ended = false;
  std::optional<SharedDraws> draws;                                // of the domain's outermost scope over ranks.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> created;  // over ranks; not yet equal.
  std::vector<WeakTensor> results;                                 // of operators, without repetitions.
  std::unordered_set<const c10::TensorImpl*> is_result;
  std::size_t forget_at = 1024;  // results

  OpenScope(std::shared_ptr<Domain> domain_, std::shared_ptr<OpenScope> outer_)
      : domain(std::move(domain_)), outer(std::move(outer_)) {}

  void note(const at::Tensor& tensor) {
    if (!is_result.insert(tensor.unsafeGetTensorImpl()).second) return;
    results.emplace_back(tensor.getIntrusivePtr());
    if (results.size() < forget_at) return;
    std::erase_if(results, [&](const WeakTensor& result) {
      return result.expired() && is_result.erase(result._unsafe_get_target()) > 0;
    });
    forget_at = std::max<std::size_t>(1024, 2 * results.size());
  }
};

namespace {

thread_local std::shared_ptr<OpenScope> innermost;

/// The innermost scope of the domain from `scope` outwards, or null.
OpenScope* scope_of(const Domain& domain, OpenScope* scope) {
  while (scope && (scope->domain.get() != &domain || scope->has_ended)) scope = scope->outer.get();
  return scope;
}

/// Gives the tensors of a scope that has ended to the scope of the same domain around it, or to the domain.
void hand_on(OpenScope& scope) {
  if (OpenScope* const outer = scope_of(*scope.domain, scope.outer.get())) {
    outer->created.insert(outer->created.end(), scope.created.begin(), scope.created.end());
    for (const auto& result : scope.results) {
      if (const auto alive = result.lock()) outer->note(at::Tensor(alive));
    }
  } else {
    std::lock_guard lock(scope.domain->sharing_mutex);
    auto& created = scope.domain->created;
    created.insert(created.end(), scope.created.begin(), scope.created.end());
  }
  scope.created.clear();
}

/// Drops the thread's innermost scopes that have ended.
void drop_ended() {
  while (innermost && innermost->has_ended.load(std::memory_order_acquire)) {
    const auto scope = innermost;
    innermost = scope->outer;
    c10::impl::tls_set_dispatch_key_included(kPagedKey, scope->outer_included);
    scope->draws.reset();
    hand_on(*scope);
  }
}

/// Throws AccessError unless the scope is this thread's innermost one.
void check_place(const OpenScope& scope) {
  if (scope.thread != this_thread_number()) {
    throw AccessError(
        "an init scope is left on another thread than it was entered on: leave it on its own thread, and let each "
        "thread that makes paged tensors enter the space itself");
  }
  drop_ended();
  if (innermost.get() != &scope) {
    throw AccessError(
        "an init scope is left while one that was entered later is still open: leave scopes in the reverse order of "
        "entering them");
  }
}

/// Prepares the parameters among a scope's results: leaves that require gradients. Other tensors may be buffers.
void begin_parameters(const std::shared_ptr<Domain>& domain, const std::vector<OpenScope::WeakTensor>& results) {
  for (const auto& result : results) {
    auto alive = result.lock();
    if (!alive) continue;
    at::Tensor tensor(std::move(alive));
    const auto* segment = segment_of(tensor);
    const bool is_parameter = segment && segment->domain() == domain && tensor.is_leaf() && tensor.requires_grad();
    if (is_parameter && tensor.is_floating_point()) domain->begin_parameter(domain, tensor);
  }
}

}  // namespace

std::shared_ptr<Domain> scope_domain() {
  if (!innermost) return nullptr;
  drop_ended();
  return innermost ? innermost->domain : nullptr;
}

bool is_in_scope_of(const Domain& domain) { return scope_of(domain, innermost.get()) != nullptr; }

void note_created(Domain& domain, c10::weak_intrusive_ptr<c10::StorageImpl> storage) {
  if (!scope_domain()) return;
  if (OpenScope* const scope = scope_of(domain, innermost.get())) {
    scope->created.push_back(std::move(storage));
  } else {
    std::lock_guard lock(domain.sharing_mutex);
    domain.created.push_back(std::move(storage));
  }
}

bool scope_begins_parameters() {
  const auto domain = scope_domain();
  return domain && domain->begin_parameter;
}

void note_result(const at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  if (OpenScope* const scope = segment ? scope_of(*segment->domain(), innermost.get()) : nullptr) scope->note(tensor);
}

OutsideScopes::OutsideScopes() : outer_included_(c10::impl::tls_is_dispatch_key_included(kPagedKey)) {
  if (!innermost) return;
  outer_ = std::exchange(innermost, nullptr);
  c10::impl::tls_set_dispatch_key_included(kPagedKey, false);
}

OutsideScopes::~OutsideScopes() {
  if (!outer_) return;
  c10::impl::tls_set_dispatch_key_included(kPagedKey, outer_included_);
  innermost = std::move(outer_);
}

InitScope::InitScope(std::shared_ptr<Domain> domain) : exceptions_(std::uncaught_exceptions()) {
  drop_ended();
  const bool is_outermost = !is_in_scope_of(*domain);
  auto scope = std::make_shared<OpenScope>(std::move(domain), innermost);
  if (is_outermost && scope->domain->partition.world() > 1 && !scope->domain->planned_on) {
    scope->draws.emplace(*scope->domain);
  }
  scope_ = std::move(scope);
  innermost = scope_;
  c10::impl::tls_set_dispatch_key_included(kPagedKey, true);
}

InitScope::~InitScope() noexcept(false) {
  if (std::uncaught_exceptions() > exceptions_) {
    abandon();
    return;
  }
  try {
    leave();
  } catch (...) {
    abandon();
    throw;
  }
}

void InitScope::leave() {
  if (!scope_) return;
  check_place(*scope_);
  const auto scope = scope_;
  abandon();
  if (is_in_scope_of(*scope->domain)) return;
  start_equal(*scope->domain);
  if (scope->domain->begin_parameter) begin_parameters(scope->domain, scope->results);
}

void InitScope::abandon() noexcept {
  const auto scope = std::exchange(scope_, nullptr);
  if (!scope) return;
  scope->has_ended.store(true, std::memory_order_release);
  if (scope->thread == this_thread_number()) drop_ended();
}

}  // namespace zeropage
