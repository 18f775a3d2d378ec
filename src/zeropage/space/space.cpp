#include "zeropage/space/space.h"

#include <ATen/Context.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <fstream>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"
#include "zeropage/space/torch_device.h"

namespace zeropage {
namespace {

std::size_t free_memory() {
  std::ifstream meminfo("/proc/meminfo");
  for (std::string word; meminfo >> word;) {
    std::size_t kib = 0;
    if (word == "MemAvailable:" && meminfo >> kib) return kib * kKiB;
  }
  return kGiB;
}

c10::Device device_of(const Config& config) {
  c10::Device device(at::hasCUDA() ? c10::kCUDA : c10::kCPU);
  if (config.device != "auto") {
    try {
      device = c10::Device(config.device);
    } catch (const c10::Error&) {
      throw SettingError(
          fmt::format("device = \"{}\" is not a device; write \"cpu\", \"cuda\" or \"cuda:1\"", config.device));
    }
  }
  if (device.is_cpu()) return c10::kCPU;
  if (!device.is_cuda()) {
    throw SettingError(
        fmt::format("device = \"{}\" is not served; set device to \"cpu\" or \"cuda\"", config.device));
  }
  const auto count = at::hasCUDA() ? c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount() : 0;
  if (count <= std::max<int>(device.index(), 0)) {
    throw SettingError(fmt::format("device = \"{}\" is not there: torch sees {} CUDA devices; set device=\"cpu\"",
                                   config.device, static_cast<int>(count)));
  }
  at::globalContext().lazyInitDevice(c10::kCUDA);
  return device.has_index() ? device : c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
}

bool has_separate_memory(const Config& config, c10::Device device) {
  if (config.memory == "auto") return !device.is_cpu();
  if (config.memory == "separate") return true;
  if (config.memory == "unified" && device.is_cpu()) return false;
  throw SettingError(fmt::format("memory = \"{}\" with device = \"{}\"; write \"separate\" or \"auto\"{}",
                                 config.memory, device.str(), device.is_cpu() ? ", or \"unified\"" : ""));
}

Placement placement_of(std::string_view setting, const std::string& tier) {
  if (tier == "auto") return Placement::automatic;
  if (tier == "device") return Placement::device;
  if (tier == "host") return Placement::host;
  if (tier == "disk") return Placement::disk;
  throw SettingError(
      fmt::format("{} = \"{}\" is not a tier; write \"device\", \"host\", \"disk\" or \"auto\"", setting, tier));
}

IoEngine engine_of(const std::string& io) {
  if (io == "auto") return IoEngine::automatic;
  if (io == "uring") return IoEngine::uring;
  if (io == "threads") return IoEngine::threads;
  throw SettingError(fmt::format("io = \"{}\" is not an I/O engine; write \"uring\", \"threads\" or \"auto\"", io));
}

std::size_t size_of(std::string_view setting, const std::string& text, std::size_t automatic) {
  return text == "auto" ? automatic : parse_bytes(text, setting);
}

/// Small enough that rules can stream five tensors, read ahead, through a budget; 4 MiB where there is room.
std::size_t automatic_page_size(std::size_t device_bytes, std::size_t host_bytes, bool separate) {
  // With one memory pages pass through the larger budget; with two, through both.
  const std::size_t share = (separate ? std::min(host_bytes, device_bytes) : std::max(host_bytes, device_bytes)) / 64;
  return std::clamp(std::bit_floor(std::max<std::size_t>(share, 1)), 4 * kBlockBytes, 4 * kMiB);
}

}  // namespace

std::shared_ptr<Space> Space::make(const Config& requested) {
  Config config = requested;
  auto domain = std::make_shared<Domain>();
  domain->device = device_of(config);
  const bool separate = has_separate_memory(config, domain->device);
  const std::pair<Role, std::string> roles[] = {
      {Role::parameter, config.parameters}, {Role::gradient, config.gradients}, {Role::optimizer, config.optimizer}};
  const char* const names[] = {"parameters", "gradients", "optimizer"};
  bool to_disk = false, may_go_to_disk = false;
  for (int i = 0; i < 3; ++i) {
    const Placement placement = placement_of(names[i], roles[i].second);
    domain->placement[static_cast<int>(roles[i].first)] = placement;
    to_disk |= placement == Placement::disk;
    may_go_to_disk |= placement == Placement::disk || placement == Placement::automatic;
  }
  domain->placement[static_cast<int>(Role::activation)] = Placement::automatic;
  if (!config.disk_path.empty() && !may_go_to_disk) {
    throw SettingError(
        fmt::format("disk_path = \"{}\" is set but no role is on disk; set a role to \"disk\" or \"auto\", or "
                    "leave disk_path out",
                    config.disk_path));
  }

  const std::size_t free = free_memory();
  PagerOptions options;
  const std::size_t device_free = domain->device.is_cpu() ? free : free_device_memory(domain->device);
  const std::size_t device_share = domain->device.is_cpu() ? free / 4 : device_free / 5 * 4;
  options.device_bytes = size_of("device_memory", config.device_memory, device_share);
  options.host_bytes = size_of("host_memory", config.host_memory, free / 2);
  if (options.device_bytes < 16 * kBlockBytes) {
    throw SettingError(
        fmt::format("device_memory = {} cannot hold a frame; raise it, at least to the largest operator's "
                    "tensors",
                    format_bytes(options.device_bytes)));
  }
  if (!domain->device.is_cpu() && options.device_bytes > device_free) {
    throw SettingError(fmt::format("device_memory = {} is more than the {} that are free on {}; lower it",
                                   format_bytes(options.device_bytes), format_bytes(device_free),
                                   domain->device.str()));
  }
  if ((domain->device.is_cpu() ? options.device_bytes : 0) + options.host_bytes > free) {
    throw SettingError(
        fmt::format("device_memory = {} and host_memory = {} are more than the {} that are free on this "
                    "machine; lower them",
                    format_bytes(options.device_bytes), format_bytes(options.host_bytes), format_bytes(free)));
  }
  options.page_bytes =
      size_of("page_size", config.page_size, automatic_page_size(options.device_bytes, options.host_bytes, separate));
  if (options.page_bytes < kBlockBytes || options.page_bytes % kBlockBytes != 0 || options.page_bytes > 64 * kMiB) {
    throw SettingError(
        fmt::format("page_size = {} bytes must be a multiple of 4KiB, up to 64MiB", options.page_bytes));
  }
  if (separate && options.host_bytes < 4 * options.page_bytes) {
    throw SettingError(
        fmt::format("host_memory = {} cannot stage what moves between disk and device: at least four pages of {}; "
                    "raise host_memory",
                    format_bytes(options.host_bytes), format_bytes(options.page_bytes)));
  }
  options.disk_path = may_go_to_disk && config.disk_path.empty() ? "/var/tmp" : config.disk_path;
  options.io = engine_of(config.io);
  domain->resident_below = parse_bytes(config.resident_below, "resident_below");
  if (separate) {
    options.device = domain->device.is_cpu() ? make_cpu_apart(options.device_bytes)
                                             : make_torch_device(domain->device, options.device_bytes);
  }
  domain->pager = Pager::make(options);

  config.device = domain->device.str();
  config.disk_path = options.disk_path;
  config.device_memory = std::to_string(options.device_bytes);
  config.host_memory = std::to_string(options.host_bytes);
  config.page_size = std::to_string(options.page_bytes);
  config.resident_below = std::to_string(domain->resident_below);
  config.io = std::string(domain->pager->io_name());
  config.memory = separate ? "separate" : "unified";
  return std::shared_ptr<Space>(new Space(std::move(config), std::move(domain)));
}

bool Space::page(at::Tensor& tensor, Role role) {
  c10::NoGradGuard no_grad;
  bool paged = adopt(domain_, tensor, role);
  if (!paged && tensor.defined() && tensor.layout() == c10::kStrided && tensor.is_leaf() &&
      !tensor.key_set().has(c10::DispatchKey::Python) && !tensor.is_meta()) {
    if (domain_->pages(tensor.nbytes())) {
      const at::Tensor like = at::empty_like(tensor, tensor.options().device(c10::kMeta));
      at::Tensor own = make_paged(domain_, like.sizes(), like.strides(), tensor.dtype(), role);
      tensor.set_data(own.copy_(tensor));
      paged = true;
    } else if (tensor.device() != domain_->device) {
      tensor.set_data(tensor.to(domain_->device));
    }
  }
  if (paged && tensor.grad().defined()) page(tensor.mutable_grad(), Role::gradient);
  return paged;
}

Report Space::report() const {
  const Pager& pager = *domain_->pager;
  const PagerStats stats = pager.stats();
  Report report{.homes = {},
                .budgets = {},
                .faults = stats.faults,
                .evictions = stats.evictions,
                .read_bytes = stats.read_bytes,
                .written_bytes = stats.written_bytes,
                .uploaded_bytes = stats.uploaded_bytes,
                .downloaded_bytes = stats.downloaded_bytes,
                .swap_bytes = pager.swap_bytes(),
                .waited_seconds = stats.waited_seconds,
                .io = std::string(pager.io_name()),
                .general_path = domain_->general_path.counts()};
  for (int role = 0; role < kRoles; ++role) {
    for (int tier = 0; tier < kTiers; ++tier) {
      if (stats.home_peak[role][tier] == 0) continue;
      report.homes.push_back({std::string(name_of(static_cast<Role>(role))),
                              std::string(name_of(static_cast<Tier>(tier))), stats.home_bytes[role][tier],
                              stats.home_peak[role][tier]});
    }
  }
  for (const Pool pool : {Pool::device, Pool::host}) {
    const Budget& budget = pager.budget(pool);
    report.budgets.push_back({budget.name(), budget.used(), budget.peak(), budget.limit()});
  }
  return report;
}

bool is_paged(const at::Tensor& tensor) { return segment_of(tensor) != nullptr; }

void evict(const at::Tensor& tensor) {
  if (auto* segment = segment_of(tensor)) segment->pager()->evict(*segment);
}

std::uint64_t virtual_address(const at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  return segment ? segment->virtual_address() + tensor.storage_offset() * tensor.itemsize() : 0;
}

at::Tensor plain_copy(const at::Tensor& tensor) {
  c10::NoGradGuard no_grad;
  at::Tensor copy;
  {
    c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKey);
    copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().requires_grad(false));
  }
  return copy.copy_(tensor);
}

TensorPin pin(const at::Tensor& tensor) {
  auto* segment = segment_of(tensor);
  if (!segment) return {};
  const PinRequest request{segment, Access::write};
  return TensorPin(request);
}

}  // namespace zeropage
