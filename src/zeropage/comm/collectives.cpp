#include "zeropage/comm/collectives.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <map>
#include <optional>
#include <thread>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/current_activity.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/no_paging_guard.h"
#include "zeropage/base/units.h"
#include "zeropage/base/waits.h"
#include "zeropage/comm/block_codes.h"
#include "zeropage/comm/formats.h"
#include "zeropage/kernels/mean.h"

namespace zeropage {
namespace {

constexpr std::size_t kAlwaysChecked = 256;  // number of first gathers, and of first others, all checked
constexpr std::size_t kCheckedEvery = 64;    // of the later ones
constexpr std::size_t kShort = kMiB;         // bytes that hold up words little
constexpr std::size_t kTextBytes = 512;      // of a rank's report of its position

/// The first scale, a NaN, of codes that a rank could not make.
constexpr std::int32_t kLost = 0x7fa1057d;

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {  // splitmix64's finalizer
  std::uint64_t z = hash + 0x9e3779b97f4a7c15 + value;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

/// A group in a planned run works on meta tensors, whose c10d kernels do nothing.
template <class Start>
c10::intrusive_ptr<c10d::Work> start_on(c10d::ProcessGroup& group, const at::Tensor& tensor, Start&& start) {
  return tensor.is_meta() ? start(*group.getBackend(c10::kMeta)) : start(group);
}

// torch 2.13 names these all_gather_single and so on, and warns of the names in 2.11.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
auto gather_flat(c10d::ProcessGroup& group, at::Tensor whole, at::Tensor part) {
  return start_on(group, whole, [&](auto& on) { return on._allgather_base(whole, part); });
}
auto scatter_flat(c10d::ProcessGroup& group, at::Tensor part, at::Tensor whole) {
  return start_on(group, whole, [&](auto& on) { return on._reduce_scatter_base(part, whole); });
}
auto all_to_all_flat(c10d::ProcessGroup& group, at::Tensor out, at::Tensor in) {
  std::vector<std::int64_t> even_out, even_in;
  return group.alltoall_base(out, in, even_out, even_in);
}
#pragma GCC diagnostic pop

bool has_backend(c10d::ProcessGroup& group, c10::DeviceType device) {
  try {
    return group.getBackend(device) != nullptr;
  } catch (const std::exception&) {
    return false;
  }
}

bool is_gloo(c10d::ProcessGroup& group) {
  try {
    return group.getBackend(c10::kCPU)->getBackendName() == "gloo";
  } catch (const std::exception&) {  // no backend, or one without a name
    return false;
  }
}

}  // namespace

/// The tensors of a collective: the caller's or, if the group has no backend for their device (Gloo alone), copies on
/// the host.
class Collectives::Staging {
 public:
  explicit Staging(bool is_needed) : is_needed_(is_needed) {}

  at::Tensor in(const at::Tensor& tensor) const { return is_needed_ ? tensor.cpu() : tensor; }
  at::Tensor out(const at::Tensor& tensor) {
    return is_needed_ ? returned(tensor, at::empty(tensor.sizes(), tensor.options().device(c10::kCPU))) : tensor;
  }
  at::Tensor in_out(const at::Tensor& tensor) { return is_needed_ ? returned(tensor, tensor.cpu()) : tensor; }
  void copy_back() {
    for (const auto& [tensor, copy] : results_) tensor.copy_(copy);
    results_.clear();
  }

 private:
  at::Tensor returned(const at::Tensor& tensor, const at::Tensor& copy) {
    results_.emplace_back(tensor, copy);
    return copy;
  }

  bool is_needed_;
  std::vector<std::pair<at::Tensor, at::Tensor>> results_;
};

/// A collective of c10d, or the messages of one, and its tensors.
class Collectives::Pending : public Mean {
 public:
  Pending(Collectives& owner, Place place, Works works, std::vector<at::Tensor> kept, Staging staging,
          std::string during)
      : owner_(owner),
        place_(place),
        is_broken_(owner.is_broken_),
        works_(std::move(works)),
        kept_(std::move(kept)),
        staging_(std::move(staging)),
        during_(std::move(during)) {}

  /// Blocks until no transfer uses the tensors. Discards any error.
  ~Pending() override {
    for (const auto& work : works_) {
      try {
        // Gloo counts the group's timeout from here. A shorter one closes the connection just as well.
        if (work) *is_broken_ ? work->wait(std::chrono::milliseconds(100)) : work->wait();
      } catch (...) {
      }
    }
  }

  /// It brings so many bytes of parameters or gradients from other ranks.
  void meter(std::size_t bytes) { metered_ = owner_.meter_.begin(bytes); }

  void wait() override {
    if (failure_) std::rethrow_exception(failure_);
    if (std::exchange(is_over_, true)) return;
    if (*is_broken_) {  // Gloo would wait for its timeout again.
      failure_ = owner_.broken();
      std::rethrow_exception(failure_);
    }
    try {
      const Booking booking(Spent::ranks);
      const ListedWait listed("ranks", during_);
      const Watchdog::Waiting waiting(owner_.watchdog_.get(), place_.channel, place_.number);
      const auto begin = LinkMeter::Time::now();
      for (; !works_.empty(); works_.pop_back()) {
        if (const auto& work = works_.back()) work->wait();
      }
      if (metered_) owner_.meter_.end(*metered_, LinkMeter::Time::now() - begin);
    } catch (const std::exception& error) {
      failure_ = owner_.failure(during_, error);
      std::rethrow_exception(failure_);
    }
    NoPagingGuard no_paging;
    at::AutoDispatchBelowADInplaceOrView below;  // the tensors may come from an inference mode that has ended
    try {
      take_result();
      staging_.copy_back();
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
  }

  void take(const at::Tensor&, std::size_t, bool) override { TORCH_INTERNAL_ASSERT(false, "it has no mean"); }

 protected:
  virtual void take_result() {}

  Collectives& owner_;
  const Place place_;
  std::shared_ptr<std::atomic<bool>> is_broken_;
  Works works_;  // those that were not waited for
  std::vector<at::Tensor> kept_;
  Staging staging_;
  std::string during_;
  std::optional<LinkMeter::Transfer> metered_;
  bool is_over_ = false;
  std::exception_ptr failure_;  // every later wait() throws it again
};

namespace {

/// Elements [begin, begin + into.numel()) of the parts' mean, by PyTorch's operators.
void take_mean_by_torch(const at::Tensor& into, c10::ArrayRef<at::Tensor> parts, std::int64_t begin,
                        c10::ScalarType rounds_to, bool keeps_equal, bool adds) {
  const auto of = [&](const at::Tensor& part) { return part.narrow(0, begin, into.numel()); };
  const bool is_narrow = c10::isReducedFloatingType(parts[0].scalar_type());
  at::Tensor sum = of(parts[0]).to(is_narrow ? at::kFloat : parts[0].scalar_type(), false, /*copy=*/true);
  for (const at::Tensor& part : parts.slice(1)) sum.add_(of(part));
  sum = sum.div_(static_cast<std::int64_t>(parts.size())).to(rounds_to);
  if (keeps_equal) {
    at::Tensor equal = at::ones({into.numel()}, at::kBool);
    for (const at::Tensor& part : parts) equal.logical_and_(of(part).eq(of(parts[0])));
    sum = at::where(equal, of(parts[0]), sum);
  }
  adds ? into.add_(sum) : into.copy_(sum);
}

}  // namespace

/// This rank's part of a tensor as each rank has it, in rank order.
class Collectives::Parts {
 public:
  Parts() = default;
  Parts(std::vector<at::Tensor> parts, Rounding rounding)
      : parts_(std::move(parts)), rounding_(std::move(rounding)) {}

  std::int64_t elements() const { return parts_[0].numel(); }

  /// Does Mean::take(): `into` may be on another device.
  void take(const at::Tensor& into, std::size_t begin, bool adds) const {
    if (into.is_cpu()) return take_mean(into, begin, 0, adds);
    const at::Tensor here = at::empty(into.sizes(), into.options().device(c10::kCPU));
    take_mean(here, begin, 0, false);
    adds ? into.add_(here.to(into.device())) : into.copy_(here);
  }

  /// Elements [begin, begin + into.numel()) of their mean, which begins at element `first` of the rounding's ranges.
  void take_mean(const at::Tensor& into, std::size_t begin, std::size_t first, bool adds) const {
    const std::size_t end = begin + static_cast<std::size_t>(into.numel());
    auto settled = rounding_.settled.begin();
    for (std::size_t at = begin, next = 0; at < end; at = next) {
      while (settled != rounding_.settled.end() && settled->end <= first + at) ++settled;
      const bool has_more = settled != rounding_.settled.end();
      const bool keeps_equal = has_more && settled->begin <= first + at;
      next = !has_more ? end : std::min(end, (keeps_equal ? settled->end : settled->begin) - first);
      const at::Tensor range =
          into.narrow(0, static_cast<std::int64_t>(at - begin), static_cast<std::int64_t>(next - at));
      take_range(range, static_cast<std::int64_t>(at), keeps_equal, adds);
    }
  }

 private:
  void take_range(const at::Tensor& into, std::int64_t begin, bool keeps_equal, bool adds) const {
    const kernels::Format rounds_to = format_of(rounding_.dtype);
    const bool has_kernel = rounds_to != kernels::Format::none &&
                            format_of(into.scalar_type()) != kernels::Format::none &&
                            format_of(parts_[0].scalar_type()) != kernels::Format::none;
    if (!has_kernel) {
      return take_mean_by_torch(into, parts_, begin, rounding_.dtype, keeps_equal, adds);
    }
    constexpr std::int64_t kGrain = 1 << 15;  // elements, for one thread
    at::parallel_for(0, into.numel(), kGrain, [&](std::int64_t at, std::int64_t end) {
      std::vector<kernels::Array> arrays;
      for (const at::Tensor& part : parts_) arrays.push_back(array_of(part, begin + at));
      kernels::take_mean({arrays, rounds_to, keeps_equal, adds}, array_of(into, at),
                         static_cast<std::size_t>(end - at));
    });
  }

  std::vector<at::Tensor> parts_;
  Rounding rounding_;
};

/// The exchange of parts; take() then sums them. Gloo's own reduce-scatter takes 2.7 times as long on two ranks, and
/// its order of summation depends on the size.
class Collectives::Summing final : public Pending {
 public:
  using Pending::Pending;
  Parts parts;

  void take(const at::Tensor& into, std::size_t begin, bool adds) override { parts.take(into, begin, adds); }
};

/// Each rank sums its part in rank order; wait() then gathers all parts. Sends as many bytes as a ring, whose order
/// of summation would depend on the place in the tensor.
class Collectives::SummingParts final : public Pending {
 public:
  using Pending::Pending;
  Parts parts;
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // of the mean
  std::uint64_t history = 0;

  void take(const at::Tensor& into, std::size_t begin, bool adds) override {
    const at::Tensor mean = all_.narrow(0, static_cast<std::int64_t>(begin), into.numel());
    adds ? into.add_(mean.to(into.device())) : into.copy_(mean);
  }

 private:
  void take_result() override {
    const std::int64_t part = parts.elements();
    all_ = at::empty({part * owner_.size()}, at::TensorOptions().dtype(dtype));
    const at::Tensor mine = all_.narrow(0, part * owner_.rank(), part);
    parts.take_mean(mine, 0, static_cast<std::size_t>(mine.storage_offset()), false);
    // A short message would wait for the sums that were started meanwhile.
    const Connection& on = all_.nbytes() > kShort ? owner_.sums() : owner_.small_;
    const auto gather = owner_.start<Pending>(
        owner_.begin(Channel::sums),
        [&] { return owner_.gather(on, owner_.everyone(), all_, mine, mix(history, 0)); }, {all_}, Staging(false));
    gather->meter(all_.nbytes() - mine.nbytes());
    gather->wait();
    kept_.clear(), parts = {};  // frees memory
  }

  at::Tensor all_;
};

/// A gather of codes. The result is decoded where it belongs.
class Collectives::GatheringCodes final : public Pending {
 public:
  using Pending::Pending;
  at::Tensor codes;  // of all ranks, one after another. On the CPU, they are at the end of the result's memory
  at::Tensor whole;  // the result
  kernels::CodeBits bits = kernels::CodeBits::eight;

 private:
  void take_result() override {
    const std::int64_t ranks = owner_.size(), part = whole.numel() / ranks;
    const at::Tensor rows = codes.view({ranks, -1});
    // Elsewhere the host would have to wait for them: ranks learn of it when they next compare their calls.
    if (codes.is_cpu()) check(rows.narrow(1, 0, kernels::kScaleBytes).contiguous().view(at::kInt));
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      const at::Tensor into = whole.narrow(0, rank * part, part);
      const at::Tensor result = owner_.is_staged_ ? at::empty({part}, into.options().device(c10::kCPU)) : into;
      uncode_into(result, rows[rank], bits);
      if (owner_.is_staged_) into.copy_(result);
    }
    codes.reset(), kept_.clear();
  }

  void check(const at::Tensor& first_scales) const {
    for (std::int64_t rank = 0; rank < first_scales.size(0); ++rank) {
      if (first_scales.const_data_ptr<std::int32_t>()[rank] != kLost) continue;
      throw RankError(fmt::format("{}: rank {} could not read its part; its own error says why", during_, rank));
    }
  }
};

/// Each rank sums its part. Other nodes send codes of theirs. Inside a node, ranks first sum their values as they are
/// (qgZ, ZeRO++), so that a value enters or leaves a node once.
class Collectives::SummingCodes final : public Mean {
 public:
  SummingCodes(Collectives& owner, Rounding rounding) : owner_(owner), rounding_(std::move(rounding)) {}

  /// `in`: the parts of each rank, one after another.
  void begin(Place place, const at::Tensor& in, std::uint64_t history) {
    history_ = history;
    if (!owner_.sums_inside_nodes()) return send(place, in.view({owner_.size(), -1}));
    // A rank's parts: of those ranks of all nodes that have its place in theirs.
    const at::Tensor by_place = in.view({owner_.size() / owner_.node_size_, owner_.node_size_, -1}).transpose(0, 1);
    const at::Tensor packed = by_place.contiguous().view({-1});
    std::vector<at::Tensor> parts;
    inside_ = owner_.start<Summing>(
        place, [&] { return owner_.scatter(owner_.sums(), owner_.node(), packed, parts, history); }, {packed},
        Staging(false));
    inside_->parts = Parts(std::move(parts), {at::kFloat});
  }

  void advance() override {
    if (failure_) std::rethrow_exception(failure_);
    if (!inside_) return;
    NoPagingGuard no_paging;
    try {
      inside_->wait();
      const at::Tensor means = at::empty({inside_->parts.elements()}, at::TensorOptions().dtype(at::kFloat));
      inside_->parts.take_mean(means, 0, 0, false);
      inside_ = nullptr;
      send(owner_.begin(Channel::sums), means.view({owner_.size() / owner_.node_size_, -1}));
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
  }

  void wait() override {
    advance();
    if (!across_) return;
    NoPagingGuard no_paging;
    across_->wait();
    at::AutoDispatchBelowADInplaceOrView below;
    std::vector<at::Tensor> parts;
    for (std::size_t i = 0; i < received_.size(); ++i) {
      parts.push_back(own_);
      if (i == static_cast<std::size_t>(circle_.place)) continue;
      uncode_into(parts.back() = at::empty_like(own_), received_[i], *rounding_.bits);
    }
    across_ = nullptr, received_.clear();
    if (own_.is_cpu()) return void(parts_ = Parts(std::move(parts), {rounding_.dtype}));
    mean_ = parts[0].clone();
    for (std::size_t i = 1; i < parts.size(); ++i) mean_.add_(parts[i]);
    mean_ = mean_.div_(static_cast<std::int64_t>(parts.size())).to(rounding_.dtype);
  }

  void take(const at::Tensor& into, std::size_t begin, bool adds) override {
    if (mean_.defined()) {
      const at::Tensor mean = mean_.narrow(0, static_cast<std::int64_t>(begin), into.numel());
      return void(adds ? into.add_(mean) : into.copy_(mean));
    }
    parts_.take(into, begin, adds);
  }

 private:
  void send(Place place, const at::Tensor& rows) {
    circle_ = owner_.sums_inside_nodes() ? owner_.across() : owner_.everyone();
    own_ = rows[circle_.place].to(at::kFloat, false, /*copy=*/true);
    const auto bytes = static_cast<std::int64_t>(kernels::coded_bytes(own_.numel(), *rounding_.bits));
    const at::Tensor by_rank = at::empty({circle_.count, bytes}, rows.options().dtype(at::kByte));
    for (int i = 0; i < circle_.count; ++i) {
      if (i != circle_.place) code_into(by_rank[i], rows[i], *rounding_.bits);  // nobody reads this rank's own
    }
    const at::Tensor codes = by_rank.view({-1});
    across_ = owner_.start<Pending>(
        place, [&] { return owner_.scatter(owner_.sums(), circle_, codes, received_, mix(history_, 1)); }, {codes},
        Staging(false));
    across_->meter(codes.nbytes() / circle_.count * (circle_.count - 1));
  }

  Collectives& owner_;
  Rounding rounding_;
  std::uint64_t history_ = 0;
  Circle circle_{};                   // the ranks that exchange codes
  std::unique_ptr<Summing> inside_;   // until its sums are here
  std::unique_ptr<Pending> across_;   // until the codes are here
  at::Tensor own_;                    // this rank's values for its part
  std::vector<at::Tensor> received_;  // codes for its part
  Parts parts_;                       // on the CPU: every rank's values, or every node's means
  at::Tensor mean_;                   // on another device
  std::exception_ptr failure_;
};

/// The backend sums into kept_[0], here turned into the mean.
class Collectives::SummedByBackend final : public Pending {
 public:
  using Pending::Pending;
  bool is_scaled = false;  // it is the mean already

  void take(const at::Tensor& into, std::size_t begin, bool adds) override {
    const at::Tensor mean = kept_[0].narrow(0, static_cast<std::int64_t>(begin), into.numel());
    adds ? into.add_(mean) : into.copy_(mean);
  }

 private:
  void take_result() override {
    if (!is_scaled) kept_[0].div_(owner_.size());
    kept_.resize(1);
  }
};

Collectives::Collectives(const Group& group, c10::Device device, CheckRanks check, bool keep)
    : small_(connect(group, keep)),
      size_(group->getSize()),
      rank_(group->getRank()),
      device_(device),
      control_device_(device),
      check_(check) {
  if (has_backend(*group, c10::kCPU)) control_device_ = c10::kCPU;  // NCCL alone: small tensors go there too
  is_staged_ = !device.is_cpu() && control_device_.is_cpu() && !has_backend(*group, device.type());
}

Collectives::Connection Collectives::connect(const Group& group, bool keep) {
  return {c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), keep ? group : nullptr, is_gloo(*group)};
}

namespace {

/// Parts that ranks of this host read from each other's memory.
class ReadWork final : public c10d::Work {
 public:
  ReadWork(std::shared_ptr<Neighbours::Exchange> exchange, std::vector<at::Tensor> parts)
      : exchange_(std::move(exchange)), parts_(std::move(parts)) {}
  bool wait(std::chrono::milliseconds timeout) override {
    exchange_->wait(timeout);
    return true;
  }

 private:
  std::shared_ptr<Neighbours::Exchange> exchange_;
  std::vector<at::Tensor> parts_;
};

}  // namespace

/// The messages of one exchange: incoming(i) and outgoing(i) for each rank circle[i] except this one.
template <class Incoming, class OutgoingPart>
Collectives::Works Collectives::send_parts(const Connection& on, const Circle& circle, std::uint64_t history,
                                           const Incoming& incoming, const OutgoingPart& outgoing) const {
  const Group group = alive(on);
  const int tag = static_cast<int>(history & 0x7fffffff);
  const auto is_read = [&](int other, const at::Tensor& part) {
    return on.neighbours && on.neighbours->takes(other, part.nbytes());
  };
  Works works;
  std::vector<Neighbours::Incoming> to_read;
  std::vector<Neighbours::Outgoing> to_offer;
  std::vector<at::Tensor> kept;
  for (int i = 1; i < circle.count; ++i) {
    const int at = (circle.place + circle.count - i) % circle.count, from = circle[at];
    std::vector<at::Tensor> part{incoming(at)};
    if (!is_read(from, part[0])) {
      works.push_back(group->recv(part, from, tag));
      continue;
    }
    to_read.push_back({from, static_cast<std::byte*>(part[0].mutable_data_ptr()), part[0].nbytes()});
    kept.push_back(part[0]);
  }
  for (int i = 1; i < circle.count; ++i) {
    const int at = (circle.place + i) % circle.count, to = circle[at];
    std::vector<at::Tensor> part{outgoing(at)};
    if (!is_read(to, part[0])) {
      works.push_back(group->send(part, to, tag));
      continue;
    }
    to_offer.push_back({to, static_cast<const std::byte*>(part[0].const_data_ptr()), part[0].nbytes()});
    kept.push_back(part[0]);
    in_memory_ += part[0].nbytes();
  }
  if (!to_read.empty()) {
    auto exchange = on.neighbours->exchange(on.channel, history, std::move(to_read), std::move(to_offer));
    works.push_back(c10::make_intrusive<ReadWork>(std::move(exchange), std::move(kept)));
  }
  return works;
}

/// Starts to gather `mine` of each rank of the circle into `whole`, which may contain `mine` at its place.
Collectives::Works Collectives::gather(const Connection& on, const Circle& circle, const at::Tensor& whole,
                                       const at::Tensor& mine, std::uint64_t history) const {
  if (!on.sends_parts || !whole.is_cpu()) return {gather_flat(*alive(on), whole, mine)};
  const at::Tensor rows = whole.view({circle.count, -1}), own = rows[circle.place];
  if (own.const_data_ptr() != mine.const_data_ptr()) own.copy_(mine.view({-1}));
  return send_parts(on, circle, history, [&](int from) { return rows[from]; }, [&](int) { return own; });
}

/// Starts to send each rank of the circle its part of `in`. `parts` become the parts for this rank, one a rank; they
/// may share memory with `in`.
Collectives::Works Collectives::scatter(const Connection& on, const Circle& circle, const at::Tensor& in,
                                        std::vector<at::Tensor>& parts, std::uint64_t history) const {
  const auto [count, place] = std::pair(circle.count, circle.place);
  const at::Tensor rows = in.view({count, -1});
  if (!on.sends_parts) {
    const at::Tensor received = at::empty_like(rows);
    parts = received.unbind();
    return {all_to_all_flat(*alive(on), received.view({-1}), in.view({-1}))};
  }
  const at::Tensor received = at::empty({count - 1, rows.size(1)}, rows.options());
  for (int i = 0; i < count; ++i) parts.push_back(i == place ? rows[i] : received[i < place ? i : i - 1]);
  return send_parts(on, circle, history, [&](int from) { return parts[from]; }, [&](int to) { return rows[to]; });
}

namespace {

/// A key of a group's store. The store is cloned, so that a request that gets no answer holds up nobody else.
class StoreBoard final : public Watchdog::Board {
 public:
  StoreBoard(c10::intrusive_ptr<c10d::Store> store, std::string key)
      : store_(std::move(store)), key_(std::move(key)) {}
  void post(const std::string& text) override { clone().set(key_, text); }
  std::optional<std::string> read() override {
    if (!clone().check({key_})) return std::nullopt;
    return clone().get_to_str(key_);
  }

 private:
  c10d::Store& clone() {
    if (!clone_) clone_ = store_->clone();
    return *clone_;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string key_;
  c10::intrusive_ptr<c10d::Store> clone_;
};

}  // namespace

/// A number that no other object of these ranks has.
std::int64_t Collectives::agreed_number() {
  static std::atomic<std::int64_t> made{0};
  std::int64_t number = 0;  // ranks may have made other numbers of objects
  for (const Words& words : agree({++made}, {"groups", 0, 0})) number = std::max(number, words[0]);
  for (std::int64_t seen = made; seen < number && !made.compare_exchange_weak(seen, number);) {
  }
  return number;
}

void Collectives::set_groups(const Group& gathers, const Group& sums, const Group& checks,
                             std::optional<std::size_t> peer_bytes) {
  const std::int64_t number = agreed_number();
  gathers_ = connect(gathers, small_.kept != nullptr);
  sums_ = connect(sums, small_.kept != nullptr);
  checks_ = connect(checks, small_.kept != nullptr);
  if (const auto store = group()->getStore(); store && checks_->sends_parts) {
    watchdog_ = std::make_unique<Watchdog>(
        rank(),
        std::make_unique<StoreBoard>(store, fmt::format("zeropage/waits/{}/{}", group()->getGroupName(), number)),
        [this](const std::string& why) { give_up(why); });
    watchdog_->answer_with(answer_);
  }
  if (!peer_bytes || !gathers_->sends_parts || !sums_->sends_parts) return;
  meet_neighbours(*peer_bytes);
  if (neighbours() == 0) return;
  gathers_->neighbours = sums_->neighbours = neighbours_.get();
  sums_->channel = Neighbours::Channel::sums;
}

void Collectives::share_group(std::optional<std::size_t> peer_bytes) {
  // Its messages must not look like those of another space's tensors either.
  of_gathers_ = mix(std::hash<std::string_view>{}("shares its group"), static_cast<std::uint64_t>(agreed_number()));
  if (!peer_bytes || !small_.sends_parts) return;
  meet_neighbours(*peer_bytes);
  if (neighbours() > 0) small_.neighbours = neighbours_.get();
}

void Collectives::set_nodes(int ranks, const Group& gathers) {
  TORCH_INTERNAL_ASSERT(ranks > 0 && size_ % ranks == 0);
  node_size_ = ranks;
  if (gathers && !gathers_by_parts()) of_node_ = connect(gathers, small_.kept != nullptr);
}

void Collectives::answer_with(Watchdog::Answer answer) {
  answer_ = std::move(answer);
  if (watchdog_) watchdog_->answer_with(answer_);
}

void Collectives::give_up(const std::string& why) {
  if (why.empty()) {
    in_circle_ = true;
  } else {
    std::lock_guard lock(mutex_);
    if (broken_.empty()) broken_ = why;
    *is_broken_ = true;
  }
  if (watchdog_) close_connections();
}

/// Ranks that wait for this one get an error, and pass it on.
void Collectives::close_connections() {
  if (neighbours_) neighbours_->fail();
  for (const Connection* on : {&std::as_const(small_), &gathers(), &sums(), &checks()}) {
    const Group group = on->group.lock();
    if (!group) continue;
    try {  // Gloo closes the connections of a group in which a wait takes too long
      std::vector<at::Tensor> nothing{at::empty({1}, at::kByte)};
      constexpr int kNobodys = 0x7ffffffe;  // a tag
      group->recv(nothing, (rank() + 1) % size(), kNobodys)->wait(std::chrono::milliseconds(1));
    } catch (const std::exception&) {
    }
  }
}

namespace {

/// The longest time for which a group waits.
std::chrono::milliseconds timeout_of(c10d::ProcessGroup& group) {
  try {
    return group.getBackend(c10::kCPU)->getBackendOptions()->timeout;
  } catch (const std::exception&) {  // a backend that does not tell
    return kBackendDefaultTimeout;
  }
}

}  // namespace

/// Finds the ranks that read this rank's memory, as this rank reads theirs.
void Collectives::meet_neighbours(std::size_t least_bytes) {
  const Subject subject{"processes", 0, 0};
  try {
    neighbours_ = std::make_unique<Neighbours>(rank(), size(), least_bytes, timeout_of(*group()));
  } catch (const std::system_error&) {  // this rank uses sockets; it takes part all the same
  }
  const auto introductions = all_gather_text(neighbours_ ? neighbours_->introduction() : "", subject);
  std::string unread = " ";
  for (int i = 0; i < size(); ++i) {
    if (i == rank() || !neighbours_) continue;
    if (neighbours_->meet(i, introductions[i]) == Neighbours::Met::unreadable) unread += fmt::format("{} ", i);
  }
  const auto unread_by = all_gather_text(unread, subject);
  const std::string me = fmt::format(" {} ", rank());
  for (int i = 0; i < size(); ++i) {
    if (neighbours_ && unread_by[i].find(me) != std::string::npos) neighbours_->part_from(i);
  }
}

Collectives::Group Collectives::alive(const Connection& connection) {
  if (auto group = connection.group.lock()) return group;
  throw RankError(
      "the process group of this space was destroyed; use partitioned tensors before "
      "torch.distributed.destroy_process_group()");
}

namespace {

std::string_view name_of_sum(const Collectives::Rounding& rounding) {
  return !rounding.bits                               ? "reduce-scatter"
         : *rounding.bits == kernels::CodeBits::eight ? "reduce-scatter in 8 bits"
                                                      : "reduce-scatter in 4 bits";
}

}  // namespace

template <class Kind, class Start>
std::unique_ptr<Kind> Collectives::start(Place place, Start&& start, std::vector<at::Tensor> kept, Staging staging) {
  std::string during;
  {
    std::lock_guard lock(mutex_);
    during = last_;
  }
  try {
    const Watchdog::Waiting waiting(watchdog_.get(), place.channel, place.number);  // for a place on a board
    return std::make_unique<Kind>(*this, place, Works{start()}, std::move(kept), std::move(staging), during);
  } catch (const std::exception& error) {
    std::rethrow_exception(failure(during, error));
  }
}

Collectives::Place Collectives::begin(Channel channel) {
  return {channel, watchdog_ ? watchdog_->begin(channel) : 0};
}

std::uint64_t Collectives::record(Channel channel, std::string_view kind, const Subject& subject, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  if (!broken_.empty()) throw RankError(broken_);
  std::uint64_t& history = channel == Channel::gathers ? of_gathers_ : of_others_;
  for (const std::uint64_t part : {std::hash<std::string_view>{}(kind), subject.number,
                                   static_cast<std::uint64_t>(subject.page), static_cast<std::uint64_t>(bytes)}) {
    history = mix(history, part);
  }
  if (channel == Channel::gathers) writes_ = mix(writes_, subject.writes);
  last_ = fmt::format("{} of {} {}{}{} ({} bytes)", kind, subject.role, subject.number,
                      subject.page ? fmt::format(", page {}", subject.page) : "",
                      subject.writes ? fmt::format(", which the program had written {} times", subject.writes) : "",
                      bytes);
  // Over Gloo, messages of ranks that differ in what they gather never meet.
  return channel == Channel::gathers ? mix(history, writes_) : history;
}

void Collectives::fail(std::string_view why) {
  std::lock_guard lock(mutex_);
  failures_ = mix(failures_, 0xfa11 + static_cast<std::uint64_t>(rank_));
  failed_ = why;
}

/// The word that ranks compare.
std::int64_t Collectives::compared(Channel channel) const {
  std::lock_guard lock(mutex_);
  const std::uint64_t history = channel == Channel::gathers ? of_gathers_ : of_others_;
  return static_cast<std::int64_t>(failures_ == 0 ? history : mix(history, failures_));
}

std::int64_t Collectives::writes_so_far() const {
  std::lock_guard lock(mutex_);
  return static_cast<std::int64_t>(writes_);
}

Collectives::Entered Collectives::enter(Channel channel, std::string_view kind, const Subject& subject,
                                        std::size_t bytes, bool always) {
  const bool is_gather = channel == Channel::gathers;
  const Entered entered{record(channel, kind, subject, bytes), begin(channel)};
  const std::size_t n = [&] {
    std::lock_guard lock(mutex_);
    ++traffic_.collectives;
    return is_gather ? checked_gathers_++ : checked_others_++;
  }();
  const bool is_sampled = check_ == CheckRanks::automatic && n >= kAlwaysChecked && n % kCheckedEvery != 0;
  if (!always && (is_sampled || check_ == CheckRanks::never)) return entered;
  const Connection& on = is_gather ? checks() : small_;
  const Place place = is_gather ? entered.place : begin(Channel::words);
  const at::Tensor words = gather_words(on, place, {compared(channel), is_gather ? writes_so_far() : 0});
  const auto differs = [&](std::int64_t word) {
    return !(words.select(1, word) == words[0][word]).all().item<bool>();
  };
  if (differs(0)) differ_on(on, "");
  if (differs(1))
    differ_on(on, "ranks wrote different values into one tensor, because one has written it more often:");
  return entered;
}

/// This rank's words, and memory for those of all ranks. Every call sends the same size, so that ranks at different
/// calls still meet.
std::pair<at::Tensor, at::Tensor> Collectives::tensors_for(c10::ArrayRef<std::int64_t> words) {
  constexpr std::int64_t kWords = 1 + std::tuple_size_v<Words>;
  at::Tensor mine = at::zeros({kWords}, at::kLong);
  std::copy(words.begin(), words.end(), mine.mutable_data_ptr<std::int64_t>());
  mine = mine.to(control_device_);
  count_control(mine.nbytes());
  return {mine, at::empty({size() * kWords}, mine.options())};
}

/// Words of all ranks, [ranks, words], on the CPU.
at::Tensor Collectives::gather_words(const Connection& on, Place place, c10::ArrayRef<std::int64_t> words) {
  NoPagingGuard no_paging;
  const auto talking = talk(on);
  const auto [mine, all] = tensors_for(words);
  start<Pending>(
      place, [&, &mine = mine, &all = all] { return gather_flat(*alive(on), all, mine); }, {all, mine},
      Staging(false))
      ->wait();
  return all.view({size(), -1}).cpu();
}

/// Lets no other thread use small_ meanwhile, and first ends an agreement on its way there.
std::unique_lock<std::recursive_mutex> Collectives::talk(const Connection& on) {
  if (&on != &small_) return {};
  std::unique_lock talking(talking_);
  await_agreement();
  return talking;
}

void Collectives::count_control(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  traffic_.control += bytes * (size() - 1);
}

void Collectives::count_reduced(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  traffic_.reduced += bytes * (size() - 1);
}

/// Texts of all ranks, cut to `bytes`. The exchange always has the same size.
std::vector<std::string> Collectives::gather_padded(const Connection& on, std::string mine, std::size_t bytes) {
  NoPagingGuard no_paging;
  const auto talking = talk(on);
  mine.resize(bytes, '\0');
  at::Tensor text = at::from_blob(mine.data(), {static_cast<std::int64_t>(bytes)}, at::kByte).clone();
  text = text.to(control_device_);
  at::Tensor all = at::empty({size() * text.numel()}, text.options());
  count_control(bytes);
  start<Pending>(
      begin(Channel::words), [&] { return gather_flat(*alive(on), all, text); }, {all, text}, Staging(false))
      ->wait();
  all = all.cpu();
  std::vector<std::string> texts;
  for (int i = 0; i < size(); ++i) {
    std::string said(static_cast<const char*>(all.const_data_ptr()) + i * bytes, bytes);
    said.erase(std::min(said.find('\0'), said.size()));
    texts.push_back(std::move(said));
  }
  return texts;
}

/// [Note: exchanges of any size] Gloo ends the process if ranks meet with different sizes. An exchange whose size
/// depends on the call therefore begins with words, by which ranks at other calls notice each other. `common`: the
/// bytes that all ranks must have. Returns the largest size.
std::size_t Collectives::compare_sizes(const Subject& subject, std::size_t common, std::size_t bytes) {
  record(Channel::words, "exchange", subject, common);
  const std::int64_t history = compared(Channel::words);
  const at::Tensor words = gather_words(small_, begin(Channel::words), {history, static_cast<std::int64_t>(bytes)});
  if (!(words.select(1, 0) == history).all().item<bool>()) differ("");
  return static_cast<std::size_t>(words.select(1, 1).max().item<std::int64_t>());
}

std::vector<std::string> Collectives::all_gather_text(const std::string& mine, const Subject& subject) {
  NoPagingGuard no_paging;
  const std::lock_guard talking(talking_);
  return gather_padded(small_, mine, compare_sizes(subject, 0, mine.size()) + 1);
}

std::vector<std::uint64_t> Collectives::common(const std::vector<std::uint64_t>& mine, const Subject& subject) {
  std::uint64_t hash = 0;
  for (const std::uint64_t number : mine) hash = mix(hash, number);
  const Words words{static_cast<std::int64_t>(mine.size()), static_cast<std::int64_t>(hash)};
  const std::vector<Words> all_words = agree(words, subject);
  if (std::all_of(all_words.begin(), all_words.end(), [&](const Words& w) { return w == words; })) return mine;
  std::int64_t most = 0;
  for (const Words& w : all_words) most = std::max(most, w[0]);
  at::Tensor numbers = at::zeros({most}, at::kLong);  // zeros are padding: no number is zero
  std::copy(mine.begin(), mine.end(), numbers.mutable_data_ptr<std::int64_t>());
  const at::Tensor all = all_gather_small(numbers, subject).contiguous();
  std::map<std::uint64_t, int> holders;
  for (std::int64_t i = 0; i < all.numel(); ++i) ++holders[all.const_data_ptr<std::int64_t>()[i]];
  std::vector<std::uint64_t> everyones;
  for (const std::uint64_t number : mine) {
    if (holders[number] == size()) everyones.push_back(number);
  }
  return everyones;
}

void Collectives::differ(const std::string& what) { differ_on(small_, what); }

void Collectives::differ_on(const Connection& on, const std::string& what) {
  const auto texts =
      gather_padded(on, fmt::format("{}, in {}", last(), CurrentActivity::now("no operator")), kTextBytes);
  std::string message = what.empty() ? "ranks are no longer at the same operator:" : what;
  for (int i = 0; i < size(); ++i) message += fmt::format("\n  rank {}: {}", i, texts[i]);
  message +=
      "\nEvery rank must use paged tensors in the same order. If only some ranks use a module, as experts are used, "
      "call zeropage.gather_together(module); code for one rank alone must not touch paged tensors.";
  std::lock_guard lock(mutex_);
  broken_ = message;
  *is_broken_ = true;
  throw RankError(message);
}

std::vector<Collectives::Words> Collectives::agree(const Words& mine, const Subject& subject) {
  return finish(start_agreement(mine, subject));
}

struct Collectives::Agreement {
  Place place;
  Works works;  // none: the words are here
  at::Tensor mine, all;
  std::int64_t history;
  std::string during;
};

std::shared_ptr<Collectives::Agreement> Collectives::start_agreement(const Words& mine, const Subject& subject) {
  NoPagingGuard no_paging;
  const auto talking = talk(small_);
  record(Channel::words, "agreement", subject, 0);
  auto agreement = std::make_shared<Agreement>(Agreement{.place = begin(Channel::words)});
  agreement->history = compared(Channel::words);
  {
    std::lock_guard lock(mutex_);
    agreement->during = last_;
  }
  std::vector<std::int64_t> said{agreement->history};
  said.insert(said.end(), mine.begin(), mine.end());
  std::tie(agreement->mine, agreement->all) = tensors_for(said);
  try {
    agreement->works.push_back(gather_flat(*group(), agreement->all, agreement->mine));
  } catch (const std::exception& error) {
    std::rethrow_exception(failure(agreement->during, error));
  }
  std::lock_guard lock(mutex_);
  return agreement_ = agreement;
}

/// [Note: words on their way]
void Collectives::await_agreement() {
  const auto agreement = [&] {
    std::lock_guard lock(mutex_);
    return agreement_;
  }();
  const Watchdog::GoesOn goes_on;  // an answer of other ranks is all that it needs
  if (agreement) (void)finish(agreement);
}

std::vector<Collectives::Words> Collectives::finish(const std::shared_ptr<Agreement>& agreement) {
  NoPagingGuard no_paging;
  const std::lock_guard talking(talking_);
  {
    std::lock_guard lock(mutex_);
    if (agreement_ == agreement) agreement_ = nullptr;
    if (!broken_.empty()) throw RankError(broken_);
  }
  if (!agreement->works.empty()) {
    const at::Tensor& all = agreement->all;
    Pending(*this, agreement->place, std::exchange(agreement->works, {}), {agreement->mine, all}, Staging(false),
            agreement->during)
        .wait();
    agreement->all = all.view({size(), -1}).cpu();
  }
  std::vector<Words> words;
  bool together = true;
  for (int i = 0; i < size(); ++i) {
    const auto* row = agreement->all.const_data_ptr<std::int64_t>() + i * agreement->all.size(1);
    together = together && row[0] == agreement->history;
    Words& of_rank = words.emplace_back();
    std::copy(row + 1, row + 1 + of_rank.size(), of_rank.begin());
  }
  if (!together) differ("");
  return words;
}

at::Tensor Collectives::as_tensor(std::byte* at, std::size_t bytes) const {
  return at::from_blob(
      at, {static_cast<std::int64_t>(bytes)}, [](void*) {}, at::TensorOptions().dtype(at::kByte).device(device_),
      device_);
}

std::unique_ptr<Ranks::Work> Collectives::all_gather(std::byte* into, const std::byte* part, std::size_t part_bytes,
                                                     const Subject& subject, Sending sending) {
  NoPagingGuard no_paging;
  const bool in_node = sending.among == Among::node;
  const std::string_view kind = in_node                          ? "all-gather inside nodes"
                                : sending.coding == Coding::none ? "all-gather"
                                                                 : "all-gather in 8 bits";
  if (part == nullptr && !device_.is_cpu()) fail("could not read its part of a gathered tensor");
  const auto [history, place] = enter(Channel::gathers, kind, subject, part_bytes);
  if (sending.coding != Coding::none) return gather_codes(into, part, part_bytes, sending.coding, history, place);
  const Circle circle = in_node ? node() : everyone();
  const std::size_t received = part_bytes * (circle.count - 1);
  {
    std::lock_guard lock(mutex_);
    traffic_.gathered += received;
    if (in_node) traffic_.inside_nodes += received;
  }
  at::Tensor whole = as_tensor(into, part_bytes * circle.count),
             mine = as_tensor(const_cast<std::byte*>(part), part_bytes);
  Staging staging(is_staged_);
  const at::Tensor out = staging.out(whole), in = staging.in(mine);
  auto work = start<Pending>(
      place, [&, history = history] { return gather(gathers_among(sending.among), circle, out, in, history); },
      {out, in}, std::move(staging));
  if (out.is_cpu()) work->meter(received);
  return work;
}

std::unique_ptr<Ranks::Work> Collectives::gather_codes(std::byte* into, const std::byte* part, std::size_t part_bytes,
                                                       Coding coding, std::uint64_t history, Place place) {
  constexpr auto kBits = kernels::CodeBits::eight;
  const c10::ScalarType dtype = coding == Coding::bfloat16_in_8_bits  ? at::kBFloat16
                                : coding == Coding::float16_in_8_bits ? at::kHalf
                                                                      : at::kFloat;
  const at::Tensor whole = as_tensor(into, part_bytes * size()).view(dtype);
  const std::int64_t elements = whole.numel() / size();
  const auto bytes = static_cast<std::int64_t>(kernels::coded_bytes(static_cast<std::size_t>(elements), kBits));
  {
    std::lock_guard lock(mutex_);
    traffic_.gathered += static_cast<std::size_t>(bytes) * (size() - 1);
  }
  const auto of_bytes = at::TensorOptions().dtype(at::kByte).device(device_);
  at::Tensor codes;
  if (whole.is_cpu()) {
    codes =
        whole.view(at::kByte).narrow(0, static_cast<std::int64_t>(whole.nbytes()) - bytes * size(), bytes * size());
  } else if (is_staged_) {
    codes = at::empty({bytes * size()}, at::kByte);
  } else {
    const auto memory = scratch(static_cast<std::size_t>(bytes) * size());
    codes = at::from_blob(memory.get(), {bytes * size()}, [memory](void*) {}, of_bytes, device_);
  }
  const at::Tensor mine = codes.narrow(0, bytes * rank(), bytes);
  if (part == nullptr) {
    const at::Tensor lost = at::scalar_tensor(kLost, at::kInt).view({1}).view(at::kByte);
    mine.fill_(0).narrow(0, 0, kernels::kScaleBytes).copy_(lost);
  } else {
    const at::Tensor values = as_tensor(const_cast<std::byte*>(part), part_bytes).view(dtype);
    code_into(mine, is_staged_ ? values.cpu() : values, kBits);
  }
  auto work = start<GatheringCodes>(
      place, [&] { return gather(gathers(), everyone(), codes, mine, history); }, {codes}, Staging(false));
  work->codes = codes, work->whole = whole;
  if (codes.is_cpu()) work->meter(bytes * (size() - 1));
  return work;
}

bool Collectives::sums_inside_nodes() const {
  return node_size_ > 1 && node_size_ < size_ && sums().sends_parts && (device_.is_cpu() || is_staged_);
}

/// Counts the bytes of a reduce-scatter.
void Collectives::count_scattered(const at::Tensor& in, const Rounding& rounding) {
  const std::size_t part = in.nbytes() / size();
  if (!rounding.bits) return count_reduced(part);
  const bool inside = sums_inside_nodes();
  const std::size_t nodes = size() / node_size_, codes = kernels::coded_bytes(in.numel() / size(), *rounding.bits);
  std::lock_guard lock(mutex_);
  const std::size_t exact = inside ? (node_size_ - 1) * nodes * part : 0;
  traffic_.reduced += exact + codes * ((inside ? nodes : size()) - 1);
  traffic_.inside_nodes += exact;
}

std::unique_ptr<Collectives::Mean> Collectives::reduce_scatter(at::Tensor in, Rounding rounding,
                                                               const Subject& subject) {
  NoPagingGuard no_paging;
  const auto [history, place] = enter(Channel::sums, name_of_sum(rounding), subject, in.nbytes());
  count_scattered(in, rounding);
  if (rounding.bits) {
    auto work = std::make_unique<SummingCodes>(*this, std::move(rounding));
    work->begin(place, Staging(is_staged_).in(in), history);
    return work;
  }
  if (sums_in_parts(in.scalar_type())) {
    in = Staging(is_staged_).in(in);
    std::vector<at::Tensor> parts;
    auto work = start<Summing>(
        place, [&, history = history] { return scatter(sums(), everyone(), in, parts, history); }, {in},
        Staging(false));
    work->meter(in.nbytes() / size() * (size() - 1));
    work->parts = Parts(std::move(parts), std::move(rounding));
    return work;
  }
  // The backend adds in the tensor's own dtype: half values must not overflow.
  const bool is_scaled = in.scalar_type() == at::kHalf;
  if (is_scaled) in = in.mul(1.0 / size());
  const at::Tensor out = at::empty({in.numel() / size()}, in.options());
  auto work =
      start<SummedByBackend>(place, [&] { return scatter_flat(*alive(sums()), out, in); }, {out, in}, Staging(false));
  work->is_scaled = is_scaled;
  return work;
}

std::unique_ptr<Collectives::Mean> Collectives::all_reduce(at::Tensor in, Rounding rounding, const Subject& subject) {
  NoPagingGuard no_paging;
  const auto [history, place] = enter(Channel::sums, "all-reduce", subject, in.nbytes());
  const std::size_t part = (in.numel() + size() - 1) / size();
  count_reduced(part * (in.itemsize() + c10::elementSize(rounding.dtype)));
  if (sums_in_parts(in.scalar_type())) {
    in = Staging(is_staged_).in(in);
    if (const std::int64_t rest = in.numel() % size(); rest > 0) in = at::constant_pad_nd(in, {0, size() - rest});
    std::vector<at::Tensor> parts;
    auto work = start<SummingParts>(
        place, [&, history = history] { return scatter(sums(), everyone(), in, parts, history); }, {in},
        Staging(false));
    work->meter(in.nbytes() / size() * (size() - 1));
    work->dtype = rounding.dtype;
    work->parts = Parts(std::move(parts), std::move(rounding));
    work->history = history;
    return work;
  }
  // The sum in its own dtype must not overflow.
  const bool is_scaled = in.scalar_type() == at::kHalf;
  std::vector<at::Tensor> sum{is_scaled ? in.mul_(1.0 / size()) : in};
  auto work = start<SummedByBackend>(
      place, [&] { return start_on(*alive(sums()), in, [&](auto& on) { return on.allreduce(sum); }); }, sum,
      Staging(false));
  work->is_scaled = is_scaled;
  return work;
}

bool Collectives::sums_in_parts(c10::ScalarType dtype) const {
  const bool is_summed = c10::isFloatingType(dtype) || c10::isComplexType(dtype);
  return is_summed && (device_.is_cpu() || is_staged_);
}

void Collectives::broadcast(at::Tensor tensor, const Subject& subject) {
  NoPagingGuard no_paging;
  const std::lock_guard talking(talking_);
  const Place place = enter(Channel::words, "broadcast", subject, tensor.nbytes(), /*always=*/true)
                          .place;  // [Note: exchanges of any size]
  if (rank() == 0) {
    std::lock_guard lock(mutex_);
    traffic_.broadcast += tensor.nbytes() * (size() - 1);
  }
  Staging staging(is_staged_);
  std::vector<at::Tensor> tensors{staging.in_out(tensor)};
  start<Pending>(
      place, [&] { return start_on(*group(), tensors[0], [&](auto& on) { return on.broadcast(tensors); }); }, tensors,
      std::move(staging))
      ->wait();
}

at::Tensor Collectives::all_gather_small(const at::Tensor& mine, const Subject& subject) {
  NoPagingGuard no_paging;
  const std::lock_guard talking(talking_);
  compare_sizes(subject, mine.nbytes(), mine.nbytes());
  count_control(mine.nbytes());
  at::Tensor part = mine.contiguous().view({-1}).to(control_device_);
  at::Tensor all = at::empty({size() * part.numel()}, part.options());
  start<Pending>(
      begin(Channel::words), [&] { return gather_flat(*group(), all, part); }, {all, part}, Staging(false))
      ->wait();
  return all.view({size(), part.numel()}).to(mine.device());
}

std::shared_ptr<std::byte> Collectives::scratch(std::size_t bytes) {
  NoPagingGuard no_paging;
  at::Tensor memory =
      at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device_));
  auto* const data = static_cast<std::byte*>(device_ == c10::kMeta ? nullptr : memory.mutable_data_ptr());
  // Made in a stream for gathers, it may be used last in the operators' stream.
  return {data, [memory, device = device_](std::byte*) {
            if (device.is_cpu() || device == c10::kMeta) return;
            try {
              const c10::impl::VirtualGuardImpl driver(device.type());
              driver.recordDataPtrOnStream(memory.storage().data_ptr(), driver.getStream(device));
            } catch (...) {  // a device that has failed has lost its results too
            }
          }};
}

namespace {

/// Writes this rank's position into the group's store, and reads the others' positions.
std::string exchange_notes(c10d::Store& store, const std::string& prefix, int rank, int ranks,
                           const std::string& mine) {
  using namespace std::chrono_literals;
  std::string text;
  store.set(prefix + std::to_string(rank), mine);
  const auto deadline = std::chrono::steady_clock::now() + 3s;
  for (int i = 0; i < ranks; ++i) {
    const std::string key = prefix + std::to_string(i);
    while (!store.check({key}) && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(50ms);
    text += fmt::format("\n  rank {}: {}", i,
                        store.check({key}) ? store.get_to_str(key) : "no answer: it died or stalled");
  }
  return text;
}

}  // namespace

/// The reported position of every rank; within a few seconds, even if the store is gone.
std::string Collectives::where_all_are() {
  struct Answer {
    std::mutex mutex;
    std::condition_variable came;
    std::optional<std::string> text;
  };
  const std::string mine = fmt::format("{}, in {}", last_, CurrentActivity::now("no operator"));
  const auto alone = fmt::format("\n  rank {}: {}\n  the others cannot be asked", rank(), mine);
  const auto group = small_.group.lock();
  const auto store = group ? group->getStore() : nullptr;
  if (!store) return alone;
  // A thread that asks an unreachable store may wait forever, so a new thread asks it.
  const auto answer = std::make_shared<Answer>();
  std::thread([answer, store, mine, alone, rank = rank(), ranks = size(),
               prefix = fmt::format("zeropage/where/{}/", group->getGroupName())] {
    std::string text = alone;
    try {
      text = exchange_notes(*store, prefix, rank, ranks, mine);
    } catch (const std::exception&) {  // the rank that keeps the store may have died
    }
    std::lock_guard lock(answer->mutex);
    answer->text = std::move(text);
    answer->came.notify_all();
  }).detach();
  std::unique_lock lock(answer->mutex);
  answer->came.wait_for(lock, std::chrono::seconds(5), [&] { return answer->text.has_value(); });
  return answer->text.value_or(alone);
}

std::exception_ptr Collectives::failure(const std::string& during, const std::exception& error) {
  if (const auto* ours = dynamic_cast<const RankError*>(&error)) return std::make_exception_ptr(*ours);
  std::lock_guard lock(mutex_);
  if (broken_.empty()) {
    std::string reason = error.what();
    reason.erase(std::min(reason.find('\n'), reason.size()));
    if (in_circle_) reason = "ranks wait for each other";
    broken_ = fmt::format("{} failed: a rank died, stalled, or is at another operator ({}).{}", during, reason,
                          where_all_are());
  }
  const bool is_first = !is_broken_->exchange(true);
  if (is_first && watchdog_) close_connections();
  return std::make_exception_ptr(RankError(broken_));
}

std::exception_ptr Collectives::broken() const {
  std::lock_guard lock(mutex_);
  return std::make_exception_ptr(RankError(broken_));
}

std::string Collectives::last() const {
  std::lock_guard lock(mutex_);
  return failed_.empty() ? last_ : fmt::format("{}, and it {}", last_, failed_);
}

Traffic Collectives::traffic() const {
  std::lock_guard lock(mutex_);
  Traffic traffic = traffic_;
  traffic.in_memory = in_memory_;
  traffic.received = meter_.totals();
  return traffic;
}

}  // namespace zeropage
