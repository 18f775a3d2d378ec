#include "zeropage/tensor/shared_draws.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <string_view>

#include "zeropage/base/no_paging_guard.h"
#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {
namespace {

/// The bytes of a generator's state, on the CPU.
at::Tensor state_of(at::Generator generator) {
  std::lock_guard lock(generator.mutex());
  return generator.get_state().contiguous();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

/// The state of the group's first rank.
at::Tensor first_of(Collectives& group, const at::Tensor& state) {
  const Subject subject{"random numbers of a scope", 0, 0};
  const std::string_view bytes(static_cast<const char*>(state.const_data_ptr()), state.nbytes());
  const Collectives::Words hash{static_cast<std::int64_t>(std::hash<std::string_view>{}(bytes))};
  const auto all = group.agree(hash, subject);
  if (std::ranges::count(all, hash) == std::ssize(all)) return state;
  return group.all_gather_small(state, subject)[0].contiguous();
}

}  // namespace

SharedDraws::SharedDraws(Domain& domain) {
  const NoPagingGuard no_paging;
  std::vector<at::Generator> generators{at::detail::getDefaultCPUGenerator()};
  if (!domain.device.is_cpu()) generators.push_back(at::globalContext().defaultGenerator(domain.device));
  for (const at::Generator& generator : generators) {
    const at::Tensor own = state_of(generator);
    at::Tensor shared = first_of(*domain.partition.ranks, own);
    if (domain.partition.replicas) shared = first_of(*domain.partition.replicas, shared);
    if (at::equal(shared, own)) continue;
    set_state(generator, shared);
    own_.push_back({generator, own, generator.current_seed()});
  }
}

SharedDraws::~SharedDraws() {
  const NoPagingGuard no_paging;
  for (const auto& [generator, state, shared_seed] : own_) {
    if (generator.current_seed() == shared_seed) set_state(generator, state);
  }
}

}  // namespace zeropage
