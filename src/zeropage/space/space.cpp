#include "zeropage/space/space.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cstdlib>
#include <map>
#include <optional>
#include <sstream>
#include <tuple>

#include "zeropage/base/errors.h"
#include "zeropage/base/memory_limits.h"
#include "zeropage/base/process.h"
#include "zeropage/base/units.h"
#include "zeropage/fault/fallback.h"
#include "zeropage/plan/machine.h"
#include "zeropage/rules/mixed.h"
#include "zeropage/rules/placement.h"
#include "zeropage/rules/speculation.h"
#include "zeropage/space/agreement.h"
#include "zeropage/space/bandwidth.h"
#include "zeropage/space/cpu_allocator.h"
#include "zeropage/space/frontend.h"
#include "zeropage/space/planned_group.h"
#include "zeropage/space/torch_device.h"
#include "zeropage/tensor/refresh.h"
#include "zeropage/train/activations.h"
#include "zeropage/train/gradients.h"

namespace zeropage {
namespace {

/// The number of ranks that share this machine's memory, from the launcher's environment.
std::size_t ranks_here() {
  const char* said = std::getenv("LOCAL_WORLD_SIZE");
  return said ? std::max(std::atoi(said), 1) : 1;
}

/// Bytes of the machine's memory that this process may use.
std::size_t free_memory(bool over_ranks, const Machine* planned) {
  if (planned) return planned->speeds.host_bytes;
  trim_tensor_heap();  // another space's
  return available_memory() / (over_ranks ? ranks_here() : 1);
}

/// Bytes of the device's own memory that are free.
std::size_t free_memory_of(c10::Device device, const Machine* planned) {
  return planned ? planned->speeds.device_bytes : free_device_memory(device);
}

/// The accelerator that torch can use, if the machine has one and it has memory of its own. at::getAccelerator() only
/// names the one that torch was built for.
std::optional<c10::DeviceType> accelerator() {
  const auto type = at::getAccelerator();
  const bool is_there = type && type != c10::kMPS && c10::impl::hasDeviceGuardImpl(*type) &&
                        c10::impl::VirtualGuardImpl(*type).deviceCount() > 0;
  return is_there ? type : std::nullopt;
}

c10::Device device_of(const Config& config, const Machine* planned = nullptr) {
  if (planned) return c10::kMeta;
  c10::Device device(accelerator().value_or(c10::kCPU));
  if (config.device != "auto") {
    try {
      device = c10::Device(config.device);
    } catch (const c10::Error&) {
      throw ConfigError(
          fmt::format("device = \"{}\" is not a device; write \"cpu\", \"cuda\" or \"cuda:1\"", config.device));
    }
  }
  if (device.is_cpu()) return c10::kCPU;
  const bool is_there = device.type() == accelerator();
  const std::string kind = c10::DeviceTypeName(accelerator().value_or(c10::kCUDA), /*lower_case=*/true);
  if (!is_there && !device.is_cuda()) {
    throw ConfigError(
        fmt::format("device = \"{}\" is not served; set device to \"cpu\" or \"{}\"", config.device, kind));
  }
  const auto count = is_there ? c10::impl::VirtualGuardImpl(device.type()).deviceCount() : 0;
  if (count <= std::max<int>(device.index(), 0)) {
    throw ConfigError(fmt::format("device = \"{}\" is not there: torch sees {} {} devices; set device=\"cpu\"",
                                  config.device, static_cast<int>(count), c10::DeviceTypeName(device.type())));
  }
  at::globalContext().lazyInitDevice(device.type());
  return device.has_index() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

/// Whether operators run on the host's memory.
bool is_on_host(c10::Device device, const Machine* planned) {
  return planned ? planned->speeds.is_unified : device.is_cpu();
}

bool has_separate_memory(const Config& config, bool on_host) {
  if (config.memory == "auto") return !on_host;
  if (config.memory == "separate") return true;
  if (config.memory == "unified" && on_host) return false;
  throw ConfigError(fmt::format("memory = \"{}\" with device = \"{}\"; write \"separate\" or \"auto\"{}",
                                config.memory, config.device, on_host ? ", or \"unified\"" : ""));
}

/// Gives roles without a tier of their own the tier `states`.
Config with_states(Config config) {
  for (std::string* role : {&config.parameters, &config.gradients, &config.optimizer}) {
    if (*role == "auto") *role = config.states;
  }
  return config;
}

TierChoice tier_choice_of(std::string_view setting, const std::string& tier) {
  if (tier == "auto") return TierChoice::automatic;
  if (tier == "device") return TierChoice::device;
  if (tier == "host") return TierChoice::host;
  if (tier == "disk") return TierChoice::disk;
  throw ConfigError(
      fmt::format("{} = \"{}\" is not a tier; write \"device\", \"host\", \"disk\" or \"auto\"", setting, tier));
}

IoEngine engine_of(const std::string& io) {
  if (io == "auto") return IoEngine::automatic;
  if (io == "uring") return IoEngine::uring;
  if (io == "threads") return IoEngine::threads;
  throw ConfigError(fmt::format("io = \"{}\" is not an I/O engine; write \"uring\", \"threads\" or \"auto\"", io));
}

IoOptions io_of(const Config& config) {
  IoOptions options{.engine = engine_of(config.io)};
  if (config.io_block != "auto") options.block_bytes = parse_bytes(config.io_block, "io_block");
  if (config.io_depth == "auto") return options;
  const std::string& text = config.io_depth;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), options.depth);
  if (error != std::errc() || end != text.data() + text.size() || options.depth == 0) {
    throw ConfigError(fmt::format("io_depth = \"{}\" is not a number of requests; write one, or \"auto\"", text));
  }
  return options;
}

std::size_t size_of(std::string_view setting, const std::string& text, std::size_t automatic) {
  return text == "auto" ? automatic : parse_bytes(text, setting);
}

/// Small enough that rules can stream five tensors, with prefetch, through a budget; at most 4 MiB.
std::size_t automatic_page_size(std::size_t device_bytes, std::size_t host_bytes, bool separate) {
  // With one memory pages pass through the larger budget; with two, through both.
  const std::size_t share = (separate ? std::min(host_bytes, device_bytes) : std::max(host_bytes, device_bytes)) / 64;
  return std::clamp(std::bit_floor(std::max<std::size_t>(share, 1)), 4 * kBlockBytes, 4 * kMiB);
}

bool flag_of(std::string_view setting, const std::string& text) {
  if (text == "true" || text == "True" || text == "1") return true;
  if (text == "false" || text == "False" || text == "0") return false;
  throw ConfigError(fmt::format("{} = \"{}\"; write \"true\" or \"false\"", setting, text));
}

CheckRanks check_of(const std::string& check) {
  if (check == "auto") return CheckRanks::automatic;
  if (check == "always") return CheckRanks::always;
  if (check == "never") return CheckRanks::never;
  throw ConfigError(fmt::format("check_ranks = \"{}\"; write \"always\", \"never\" or \"auto\"", check));
}

std::optional<std::size_t> peer_bytes_of(const std::string& peer_memory) {
  const char* const for_tests = std::getenv("ZEROPAGE_PEER_BYTES");
  if (peer_memory == "auto")
    return for_tests ? parse_bytes(for_tests, "ZEROPAGE_PEER_BYTES") : Neighbours::kLeastBytes;
  if (peer_memory == "never") return std::nullopt;
  throw ConfigError(fmt::format("peer_memory = \"{}\"; write \"never\" or \"auto\"", peer_memory));
}

int count_of(const char* variable) {
  const char* const text = std::getenv(variable);
  return text ? std::atoi(text) : 0;
}

/// The ranks of a node, in a group of `size`.
int node_ranks_of(const std::string& ranks, int size) {
  if (ranks == "auto") {
    const int local = count_of("LOCAL_WORLD_SIZE");
    return local > 0 && size == count_of("WORLD_SIZE") && size % local == 0 ? local : size;
  }
  const bool is_number = !ranks.empty() && ranks.size() < 8 && ranks.find_first_not_of("0123456789") == ranks.npos;
  const int number = is_number ? std::stoi(ranks) : 0;
  if (number == 0 || size % number > 0) {
    throw ConfigError(
        fmt::format("node_ranks = \"{}\" does not divide the group's {} ranks; write the number of its "
                    "ranks on each node, or \"auto\"",
                    ranks, size));
  }
  return number;
}

std::optional<Tier> secondary_of(const Config& config, const Partition& partition) {
  if (config.secondary_partition == "off") return std::nullopt;
  for (const Tier tier : {Tier::device, Tier::host, Tier::disk}) {
    if (config.secondary_partition != name_of(tier)) continue;
    if (partition.partitions[static_cast<int>(Role::parameter)]) return tier;
    throw ConfigError(fmt::format(
        "secondary_partition = \"{}\" is of partitioned parameters, and stage = {} partitions none; write stage = 3",
        config.secondary_partition, config.stage));
  }
  throw ConfigError(fmt::format("secondary_partition = \"{}\"; write \"device\", \"host\", \"disk\" or \"off\"",
                                config.secondary_partition));
}

std::optional<kernels::CodeBits> bits_of(const std::string& dtype) {
  if (dtype == "int8") return kernels::CodeBits::eight;
  if (dtype == "int4") return kernels::CodeBits::four;
  return std::nullopt;
}

Tiling tiling_of(const std::string& tiling) {
  if (tiling == "auto") return Tiling::automatic;
  if (tiling == "exact") return Tiling::exact;
  if (tiling == "off") return Tiling::off;
  throw ConfigError(fmt::format("tiling = \"{}\"; write \"auto\", \"exact\" or \"off\"", tiling));
}

EarlyUpdate early_update_of(const std::string& when) {
  if (when == "auto") return EarlyUpdate::automatic;
  if (when == "always") return EarlyUpdate::always;
  if (when == "never") return EarlyUpdate::never;
  throw ConfigError(fmt::format("early_update = \"{}\"; write \"auto\", \"always\" or \"never\"", when));
}

c10::ScalarType dtype_of(std::string_view setting, const std::string& dtype) {
  const std::pair<const char*, c10::ScalarType> known[] = {{"auto", c10::ScalarType::Undefined},
                                                           {"None", c10::ScalarType::Undefined},
                                                           {"float64", c10::kDouble},
                                                           {"float32", c10::kFloat},
                                                           {"bfloat16", c10::kBFloat16},
                                                           {"float16", c10::kHalf}};
  for (const auto& [name, value] : known) {
    if (dtype == name || dtype == fmt::format("torch.{}", name)) return value;
  }
  throw ConfigError(fmt::format(
      "{} = \"{}\" is not a floating dtype; write \"float32\", \"bfloat16\", \"float16\", \"float64\" or \"auto\"",
      setting, dtype));
}

Moments moments_of(const Config& config, const Domain& domain) {
  const std::string& kept = config.optimizer_dtype;
  if (kept == "auto" || kept == "None" || kept == "float32") return Moments::as_they_are;
  if (kept != "bfloat16" && kept != "8bit") {
    throw ConfigError(fmt::format("optimizer_dtype = \"{}\"; write \"bfloat16\", \"8bit\" or \"auto\"", kept));
  }
  if (!domain.on_host && config.optimizer_device == "device") {
    throw ConfigError(fmt::format(
        "optimizer_dtype = \"{}\" is for updates in the host; here optimizer_device = \"device\"; write \"host\"",
        kept));
  }
  if (!domain.on_host && config.optimizer == "device") {
    throw ConfigError(fmt::format(
        "optimizer_dtype = \"{}\" is for states in the host or on disk; here optimizer = \"device\"; write \"auto\"",
        kept));
  }
  return kept == "8bit" ? Moments::blocks8 : Moments::bfloat16;
}

bool updates_in_host(const Config& config, DeviceMemory* separate, const Domain& domain) {
  const std::string& where = config.optimizer_device;
  if (where != "auto" && where != "host" && where != "device") {
    throw ConfigError(fmt::format("optimizer_device = \"{}\"; write \"host\", \"device\" or \"auto\"", where));
  }
  if (!separate || where == "device") return false;
  if (where == "host" || domain.on_host) return true;
  return domain.planned_on ? domain.planned_on->updates_are_faster_in_host() : updates_are_faster_in_host(*separate);
}

/// Sets the dtypes of parameters, their masters and their gradients.
void choose_dtypes(const Config& config, Domain& domain) {
  domain.compute_dtype = dtype_of("compute_dtype", config.compute_dtype);
  domain.keeps_hi_lo = config.master_dtype == "float32_split";
  domain.master_dtype = domain.keeps_hi_lo ? c10::kFloat : dtype_of("master_dtype", config.master_dtype);
  if (domain.keeps_hi_lo && domain.compute_dtype != c10::kBFloat16) {
    throw ConfigError(
        fmt::format("master_dtype = \"float32_split\" keeps float32 as a bfloat16 and what it lacks, but "
                    "compute_dtype = \"{}\"; write "
                    "compute_dtype = \"bfloat16\", or master_dtype = \"float32\"",
                    config.compute_dtype));
  }
  domain.gradient_dtype = dtype_of("gradient_dtype", config.gradient_dtype);
  const auto bytes = [](c10::ScalarType dtype) { return c10::elementSize(dtype); };
  for (const auto& [name, dtype] :
       {std::pair{"master_dtype", &domain.master_dtype}, std::pair{"gradient_dtype", &domain.gradient_dtype}}) {
    if (*dtype == c10::ScalarType::Undefined) *dtype = c10::kFloat;
    if (domain.mixes() && bytes(*dtype) < bytes(domain.compute_dtype)) {
      throw ConfigError(fmt::format("{} = \"{}\" is less precise than compute_dtype = \"{}\"; write \"float32\"",
                                    name, c10::toString(*dtype), config.compute_dtype));
    }
  }
  if (domain.compute_dtype == domain.master_dtype) domain.compute_dtype = c10::ScalarType::Undefined;
}

/// Which roles are partitioned.
void partition_roles(const Config& config, Partition& partition) {
  bool* const partitions = partition.partitions;
  if (config.stage.size() != 1 || config.stage < "0" || config.stage > "3") {
    throw ConfigError(fmt::format("stage = \"{}\" is not a stage of ZeRO; write 0, 1, 2 or 3", config.stage));
  }
  const int stage = config.stage[0] - '0';
  partitions[static_cast<int>(Role::optimizer)] = stage >= 1;
  partitions[static_cast<int>(Role::gradient)] = stage >= 2;
  partitions[static_cast<int>(Role::parameter)] = stage >= 3;
  if (config.partition != "auto") {
    std::fill(partitions, partitions + kRoles, false);
    std::string text = config.partition == "none" ? "" : config.partition;
    std::replace(text.begin(), text.end(), ',', ' ');
    std::istringstream words(text);
    for (std::string word; words >> word;) {
      if (word == "parameters") {
        partitions[static_cast<int>(Role::parameter)] = true;
      } else if (word == "gradients") {
        partitions[static_cast<int>(Role::gradient)] = true;
      } else if (word == "optimizer") {
        partitions[static_cast<int>(Role::optimizer)] = true;
      } else if (word == "activations") {
        partitions[static_cast<int>(Role::activation)] = true;
      } else {
        throw ConfigError(
            fmt::format("partition = \"{}\": \"{}\" is not a role; name some of \"parameters, gradients, optimizer, "
                        "activations\", "
                        "or write \"none\" or \"auto\"",
                        config.partition, word));
      }
    }
  }
  partition.reduces_whole =
      !partitions[static_cast<int>(Role::gradient)] && !partitions[static_cast<int>(Role::optimizer)];
}

/// Bytes of device_memory for gathered tensors; the rest is for this rank's own. Homes on the device need most of it.
/// Without such homes, whole parameters do.
std::size_t gathered_share(std::size_t device_bytes, const Domain& domain, bool separate) {
  const auto& partitioned = domain.partition.partitions;
  if (std::none_of(std::begin(partitioned), std::end(partitioned), [](bool s) { return s; })) return 0;
  const bool homes = std::find(domain.tiers, domain.tiers + 3, TierChoice::device) != domain.tiers + 3;
  std::size_t share = device_bytes / 4;
  if (partitioned[static_cast<int>(Role::parameter)] && !homes)
    share = separate ? device_bytes / 2 : device_bytes / 8 * 7;
  return round_down(share, kBlockBytes);
}

/// device_memory and host_memory; automatic ones suit this machine.
std::map<std::string, std::size_t> memory_of(const Config& config, c10::Device device, bool over_ranks,
                                             const Machine* planned = nullptr) {
  const std::size_t free = free_memory(over_ranks, planned);
  const std::size_t device_share = is_on_host(device, planned) ? free / 4 : free_memory_of(device, planned) / 5 * 4;
  return {{"device_memory", size_of("device_memory", config.device_memory, device_share)},
          {"host_memory", size_of("host_memory", config.host_memory, free / 2)}};
}

/// `of()`, or `otherwise` if it throws: ranks compare settings before anything has checked them.
template <class Of, class Value>
Value or_else(Of&& of, Value otherwise) {
  try {
    return of();
  } catch (const Error&) {
    return otherwise;
  }
}

/// The settings that decide which collectives run. Homes on the device decide how much of device_memory gathered
/// tensors have; each rank may choose between host and disk for other homes.
std::vector<Agreed> settings_of_all_ranks(const Config& given) {
  const Config config = with_states(given);
  std::vector<Agreed> settings;
  const auto add = [&](const char* name, const std::string& meaning, const std::string& text) {
    settings.push_back({name, meaning, text});
  };
  const auto size = [&](const char* name, const std::string& text) {
    add(name, or_else([&] { return std::to_string(size_of(name, text, 0)); }, text), text);
  };
  const auto dtype = [&](const char* name, const std::string& text) {
    add(name, or_else([&] { return std::string(c10::toString(dtype_of(name, text))); }, text), text);
  };
  add("device", or_else([&] { return c10::DeviceTypeName(device_of(config).type()); }, config.device), config.device);
  add("memory", config.memory, config.memory);
  for (const auto& [name, tier] : {std::pair{"parameters", config.parameters},
                                   {"gradients", config.gradients},
                                   {"optimizer", config.optimizer}}) {
    add(name, tier == "device" ? tier : "elsewhere", tier);
  }
  size("device_memory", config.device_memory);
  size("page_size", config.page_size);
  size("min_page_bytes", config.min_page_bytes);
  Partition partition;
  const std::string partitioned = config.partition == "auto" ? "" : ", partition " + config.partition;
  const std::string stage = config.stage + partitioned;
  add("stage",
      or_else(
          [&] {
            partition_roles(config, partition);
            return fmt::format("{}", fmt::join(partition.partitions, " "));
          },
          stage),
      stage);
  dtype("compute_dtype", config.compute_dtype);
  config.master_dtype == "float32_split" ? add("master_dtype", "float32_split", "float32_split")
                                         : dtype("master_dtype", config.master_dtype);
  dtype("gradient_dtype", config.gradient_dtype);
  bits_of(config.reduce_dtype) ? add("reduce_dtype", config.reduce_dtype, config.reduce_dtype)
                               : dtype("reduce_dtype", config.reduce_dtype);
  add("gather_dtype", config.gather_dtype, config.gather_dtype);
  add("optimizer_dtype", config.optimizer_dtype, config.optimizer_dtype);
  add("async_step",
      or_else([&] { return std::to_string(flag_of("async_step", config.async_step)); }, config.async_step),
      config.async_step);
  add("tiling", config.tiling, config.tiling);
  size("tile_above", config.tile_above);
  add("node_ranks", config.node_ranks, config.node_ranks);
  add("secondary_partition", config.secondary_partition, config.secondary_partition);
  add("check_ranks", config.check_ranks, config.check_ranks);
  add("peer_memory", config.peer_memory, config.peer_memory);
  return settings;
}

}  // namespace

struct Space::Here {
  std::shared_ptr<Machine> planned;  // null: this machine
  Frontend frontend;
  /// By setting: bytes, or the ranks of a node. An automatic number is the least of all ranks.
  std::map<std::string, std::size_t> sizes;
};

std::shared_ptr<Space> Space::make(const Config& config, Frontend frontend) { return make(config, {}, frontend); }

std::shared_ptr<Space> Space::make(const Config& config, const Groups& groups, Frontend frontend) {
  return make_on(nullptr, config, groups, frontend);
}

std::shared_ptr<Space> Space::make_planned(const Config& config, const std::shared_ptr<Machine>& machine, int ranks) {
  const Groups groups{.shard = ranks > 1 ? make_planned_group(machine, ranks) : nullptr, .replica = {}, .node = {}};
  return make_on(machine, config, groups, Frontend::python);
}

std::shared_ptr<Space> Space::make_on(const std::shared_ptr<Machine>& planned, const Config& config,
                                      const Groups& groups, Frontend frontend) {
  if (!groups.shard) {
    const c10::Device device = device_of(config, planned.get());
    return make_here(config, groups, {planned, frontend, memory_of(config, device, false, planned.get())});
  }
  const c10::Device device = or_else([&] { return device_of(config, planned.get()); }, c10::Device(c10::kCPU));
  Collectives ranks(groups.shard, device, CheckRanks::never, false);
  std::optional<Collectives> replicas;
  if (groups.replica && groups.replica->getSize() > 1) {
    replicas.emplace(groups.replica, device, CheckRanks::never, false);
  }
  Agreement agreement(ranks, replicas ? &*replicas : nullptr);
  const std::map<std::string, std::size_t> unknown{{"device_memory", SIZE_MAX}, {"host_memory", SIZE_MAX}};
  auto sizes = or_else([&] { return memory_of(config, device, true, planned.get()); }, unknown);
  // Hosts may have different numbers of ranks.
  sizes["node_ranks"] = or_else([&] { return node_ranks_of(config.node_ranks, ranks.size()); }, ranks.size());
  const auto least = agreement.settle(settings_of_all_ranks(config), sizes);
  std::shared_ptr<Space> made;
  try {
    made = make_here(config, groups, {planned, frontend, least});
  } catch (const Error& error) {
    agreement.confirm(error.what());
    throw;
  }
  agreement.confirm("");
  return made;
}

namespace {

/// Sets the tier of each role. Returns whether any role's tensors may go to disk.
bool choose_tiers(const Config& config, Domain& domain) {
  tier_choice_of("states", config.states);
  const std::tuple<Role, const char*, const std::string&> roles[] = {
      {Role::parameter, "parameters", config.parameters},
      {Role::gradient, "gradients", config.gradients},
      {Role::optimizer, "optimizer", config.optimizer},
      {Role::activation, "activations", config.activations}};
  bool may_go_to_disk = false;
  for (const auto& [role, name, text] : roles) {
    const TierChoice tier = tier_choice_of(name, text);
    domain.tiers[static_cast<int>(role)] = tier;
    may_go_to_disk |= tier == TierChoice::disk || tier == TierChoice::automatic;
  }
  may_go_to_disk |= config.secondary_partition == "disk";
  if (domain.tiers[static_cast<int>(Role::activation)] == TierChoice::automatic) {
    throw ConfigError("activations = \"auto\"; write \"device\", \"host\" or \"disk\"");
  }
  if (!config.disk_path.empty() && !may_go_to_disk) {
    throw ConfigError(
        fmt::format("disk_path = \"{}\" is set but no role is on disk; set a role to \"disk\" or \"auto\", or "
                    "leave disk_path out",
                    config.disk_path));
  }
  return may_go_to_disk;
}

/// Throws ConfigError unless both budgets fit the free memory.
void check_memory(const CacheOptions& options, const Domain& domain, bool over_ranks) {
  const std::size_t free = free_memory(over_ranks, domain.planned_on.get());
  if (options.device_bytes < 16 * kBlockBytes) {
    throw ConfigError(
        fmt::format("device_memory = {} cannot hold a frame; raise it, at least to the largest operator's "
                    "tensors",
                    format_bytes(options.device_bytes)));
  }
  const std::size_t device_free = domain.on_host ? free : free_memory_of(domain.device, domain.planned_on.get());
  if (!domain.on_host && options.device_bytes > device_free) {
    throw ConfigError(fmt::format("device_memory = {} is more than the {} that are free on {}; lower it",
                                  format_bytes(options.device_bytes), format_bytes(device_free),
                                  domain.device.str()));
  }
  if ((domain.on_host ? options.device_bytes : 0) + options.host_bytes > free) {
    throw ConfigError(
        fmt::format("device_memory = {} and host_memory = {} are more than the {} that are free on this "
                    "machine{}; lower them",
                    format_bytes(options.device_bytes), format_bytes(options.host_bytes), format_bytes(free),
                    over_ranks ? " for each rank" : ""));
  }
}

std::chrono::milliseconds memory_timeout_of(const std::string& text) {
  int seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size() || seconds < 0) {
    throw ConfigError(fmt::format("memory_timeout = \"{}\" is not a number of seconds; write one, such as 60", text));
  }
  return std::chrono::seconds(seconds);
}

/// `least`: the automatic device_memory and host_memory.
CacheOptions choose_sizes(const Config& config, const std::map<std::string, std::size_t>& least, const Domain& domain,
                          bool separate, bool over_ranks) {
  CacheOptions options;
  options.device_bytes = size_of("device_memory", config.device_memory, least.at("device_memory"));
  options.host_bytes = size_of("host_memory", config.host_memory, least.at("host_memory"));
  options.memory_timeout = memory_timeout_of(config.memory_timeout);
  check_memory(options, domain, over_ranks);
  options.page_bytes = size_of("page_size", config.page_size,
                               automatic_page_size(least.at("device_memory"), least.at("host_memory"), separate));
  if (options.page_bytes < kBlockBytes || options.page_bytes % kBlockBytes != 0 || options.page_bytes > 64 * kMiB) {
    throw ConfigError(
        fmt::format("page_size = {} bytes must be a multiple of 4KiB, up to 64MiB", options.page_bytes));
  }
  if (separate && options.host_bytes < 4 * options.page_bytes) {
    throw ConfigError(
        fmt::format("host_memory = {} cannot stage what moves between disk and device: at least four pages of {}; "
                    "raise host_memory",
                    format_bytes(options.host_bytes), format_bytes(options.page_bytes)));
  }
  options.io = io_of(config);
  return options;
}

/// Sets how ranks send parameters and gradients.
void choose_wire_formats(const Config& config, Domain& domain) {
  Partition& partition = domain.partition;
  partition.reduce_bits = bits_of(config.reduce_dtype);
  if (partition.reduce_bits && !partition.partitions[static_cast<int>(Role::gradient)]) {
    throw ConfigError(fmt::format(
        "reduce_dtype = \"{}\" is for partitioned gradients, and stage = {} partitions none; write stage = 2 or 3",
        config.reduce_dtype, config.stage));
  }
  if (!partition.reduce_bits) partition.reduce_dtype = dtype_of("reduce_dtype", config.reduce_dtype);
  if (config.gather_dtype == "auto") return;
  if (config.gather_dtype != "int8") {
    throw ConfigError(fmt::format("gather_dtype = \"{}\"; write \"int8\" or \"auto\"", config.gather_dtype));
  }
  const auto refuse = [](std::string_view why) {
    throw ConfigError(fmt::format("gather_dtype = \"int8\" rounds what operators see, {}", why));
  };
  if (!partition.partitions[static_cast<int>(Role::parameter)])
    refuse(
        fmt::format("if parameters are partitioned, and stage = {} partitions none; write stage = 3", config.stage));
  if (!domain.mixes()) refuse("so the optimizer needs master weights; write compute_dtype = \"bfloat16\"");
  if (domain.compute_dtype != at::kBFloat16 && domain.compute_dtype != at::kHalf)
    refuse(fmt::format("and compute_dtype = \"{}\"; write \"bfloat16\" or \"float16\"", config.compute_dtype));
  if (domain.keeps_hi_lo)
    refuse(
        "and master_dtype = \"float32_split\" keeps a part of each master there; write master_dtype = \"float32\"");
  if (!domain.saves_masters) refuse("and state_dict = \"compute\" would save that; write state_dict = \"master\"");
  partition.codes_gathers = true;
}

/// Sets dtypes, tiling, partitioning and how steps run.
void choose_handling(const Config& config, const CacheOptions& options, bool separate, bool over_ranks,
                     Domain& domain) {
  domain.min_page_bytes = parse_bytes(config.min_page_bytes, "min_page_bytes");
  domain.tiling = tiling_of(config.tiling);
  domain.tile_above = size_of("tile_above", config.tile_above, options.device_bytes / 2);
  domain.async_step = flag_of("async_step", config.async_step);
  if (const char* const seed = std::getenv("ZEROPAGE_LEAVE_UPDATES")) {
    domain.leaves_updates = true;
    domain.portions.seed(static_cast<std::uint32_t>(std::strtoul(seed, nullptr, 10)) * 48271 + 1);
  }
  if (const char* const bytes = std::getenv("ZEROPAGE_BUCKET_BYTES")) {
    domain.bucket_bytes = parse_bytes(bytes, "ZEROPAGE_BUCKET_BYTES");
  }
  choose_dtypes(config, domain);
  if (config.state_dict != "master" && config.state_dict != "compute") {
    throw ConfigError(fmt::format("state_dict = \"{}\": must be \"master\" or \"compute\"", config.state_dict));
  }
  domain.saves_masters = config.state_dict == "master";
  domain.homes_in_files = flag_of("lazy_load", config.lazy_load);
  domain.moments = moments_of(config, domain);
  partition_roles(config, domain.partition);
  if (domain.partition.partitions[static_cast<int>(Role::activation)] &&
      domain.tiers[static_cast<int>(Role::activation)] == TierChoice::device) {
    throw ConfigError(
        "partition names activations, but activations = \"device\" leaves them where PyTorch made them; write "
        "activations = \"host\" or \"disk\"");
  }
  const EarlyUpdate early_update = early_update_of(config.early_update);
  const auto& partitions = domain.partition.partitions;
  const bool has_only_shares = partitions[static_cast<int>(Role::parameter)] &&
                               partitions[static_cast<int>(Role::gradient)] &&
                               partitions[static_cast<int>(Role::optimizer)];
  if ((!over_ranks || has_only_shares) && !separate) domain.early_update = early_update;
  choose_wire_formats(config, domain);
}

/// Chooses whether the host updates optimizer states.
void choose_where_to_update(Config& config, const CacheOptions& options, const Groups& groups, Domain& domain) {
  if (domain.moments != Moments::as_they_are && !domain.on_host) {
    config.optimizer_device = "host";
    domain.shares_pages = false;  // so that the host can reach all of them
    auto& of_optimizer = domain.tiers[static_cast<int>(Role::optimizer)];
    if (of_optimizer == TierChoice::automatic) of_optimizer = TierChoice::automatic_below;
  }
  domain.updates_in_host = updates_in_host(config, options.device.get(), domain);
  // Ranks that update the same tensor all use the device's arithmetic: each rank alone knows which of its pages are
  // in the host.
  if (groups.shard && (domain.partition.reduces_whole || groups.replica)) domain.updates_in_host = false;
  domain.updates_where_all_fits = config.optimizer_device == "auto";
}

/// Tells the ranks which of them share a node: each so many consecutive ones.
void set_nodes(const Config& config, const Groups& groups, int of_node, const Domain& domain) {
  Collectives& ranks = *domain.partition.ranks;
  (void)node_ranks_of(config.node_ranks, ranks.size());  // checks it
  const Partition& partition = domain.partition;
  if (domain.planned_on &&
      (config.secondary_partition != "off" || partition.codes_gathers || partition.reduce_bits)) {
    throw ConfigError(
        "secondary_partition, gather_dtype and an integer reduce_dtype have no plan, because a planned machine has "
        "one network between all ranks; leave them out");
  }
  const bool needs_group = of_node > 1 && of_node < ranks.size() && config.secondary_partition != "off";
  if (needs_group && !groups.node && !ranks.gathers_by_parts()) {
    throw ConfigError(
        "secondary_partition needs Groups::node, a group of the ranks of one node, for a backend other "
        "than Gloo");
  }
  if (groups.node && groups.node->getSize() != of_node) {
    throw ConfigError(fmt::format("Groups::node has {} ranks, and node_ranks = {}: they must be the same",
                                  groups.node->getSize(), of_node));
  }
  ranks.set_nodes(of_node, groups.node);
}

/// Whether libtorch calls the functions of stock/ ([Note: interposition] in stock/libtorch.cpp).
bool is_before_torch() { return defines_first("_ZNK2at10TensorBase8set_dataERKS0_"); }

/// Throws ConfigError for settings that have no effect without Python's hooks.
void refuse_settings_of_python(const Config& config, const Domain& domain) {
  if (domain.tiers[static_cast<int>(Role::activation)] != TierChoice::device) {
    throw ConfigError(fmt::format(
        "activations = \"{}\" has no effect in C++, where no hook pages saved activations; write \"device\"",
        config.activations));
  }
  if (domain.moments != Moments::as_they_are) {
    throw ConfigError(fmt::format(
        "optimizer_dtype = \"{}\" has no effect on torch::optim, because only fused optimizers of Python store their "
        "moments so; write \"auto\"",
        config.optimizer_dtype));
  }
  if (!is_before_torch() && (!domain.async_step || config.early_update == "always")) {
    throw ConfigError(fmt::format(
        "{} has no effect, because zeropage is linked after torch: name zeropage::zeropage before torch's libraries",
        domain.async_step ? "early_update = \"always\"" : "async_step = \"false\""));
  }
}

void know(const at::Tensor& tensor, Domain& domain) {
  auto* segment = segment_of(tensor);
  if (!tensor.requires_grad() || !tensor.is_leaf()) return;
  segment->leaf_known = true;
  domain.leaves.know(tensor);
}

/// Does Space::mix() for a floating-point tensor that is paged in the domain.
void mix_in(const std::shared_ptr<Domain>& domain, at::Tensor& parameter) {
  const SameValues same;  // all ranks do it together
  segment_of(parameter)->set_keeps_same(true);
  give_master(parameter, *domain);
  know(parameter, *domain);
}

}  // namespace

std::shared_ptr<Space> Space::make_here(const Config& requested, const Groups& groups, const Here& here) {
  Config config = with_states(requested);
  const auto& [planned, frontend, sizes] = here;
  const bool over_ranks = groups.shard != nullptr;
  auto domain = std::make_shared<Domain>();
  domain->planned_on = planned;
  domain->device = device_of(config, planned.get());
  domain->on_host = is_on_host(domain->device, planned.get());
  const bool separate = has_separate_memory(config, domain->on_host);
  const bool may_go_to_disk = choose_tiers(config, *domain);
  CacheOptions options = choose_sizes(config, sizes, *domain, separate, over_ranks);
  options.disk_path = may_go_to_disk && config.disk_path.empty() ? "/var/tmp" : config.disk_path;
  choose_handling(config, options, separate, over_ranks, *domain);
  if (frontend == Frontend::cpp) refuse_settings_of_python(config, *domain);
  if (frontend == Frontend::cpp && !is_before_torch()) {
    TORCH_WARN_ONCE(
        "zeropage is linked after torch: torch::load, Module::to and set_data take tensors out of the budgets, and "
        "torch::save throws; name zeropage::zeropage before torch's libraries in the link line");
  }
  if (frontend == Frontend::cpp && domain->mixes()) domain->begin_parameter = &mix_in;
  const CheckRanks check = check_of(config.check_ranks);
  (void)peer_bytes_of(config.peer_memory);
  const std::optional<Tier> secondary = secondary_of(config, domain->partition);
  const std::size_t device_bytes = options.device_bytes;
  const std::size_t gathered_bytes = over_ranks ? gathered_share(device_bytes, *domain, separate) : 0;
  options.device_bytes -= gathered_bytes;
  const auto device_memory = [&](std::size_t bytes) -> std::shared_ptr<DeviceMemory> {
    if (!separate || bytes == 0) return nullptr;
    if (planned) return make_planned_device(planned, bytes);
    return domain->device.is_cpu() ? make_cpu_apart(bytes) : make_torch_device(domain->device, bytes);
  };
  if (planned) options.hollow = {planned->speeds.disk_bytes, planned->speeds.copy};
  options.device = device_memory(options.device_bytes);
  choose_where_to_update(config, options, groups, *domain);
  const bool has_disk = planned && !options.disk_path.empty();
  domain->cache = FrameCache::make(options, has_disk ? make_planned_io(planned, options.io) : nullptr);
  if (over_ranks) {
    domain->partition.ranks = std::make_shared<Collectives>(groups.shard, domain->device, check, groups.keep);
    set_nodes(config, groups, static_cast<int>(sizes.at("node_ranks")), *domain);
    if (groups.replica && groups.replica->getSize() > 1) {
      domain->partition.replicas = std::make_shared<Collectives>(groups.replica, domain->device, check, groups.keep);
    }
    if (gathered_bytes > 0) {
      domain->gathered = FrameCache::make_gathered(domain->cache, domain->partition.ranks, gathered_bytes,
                                                   device_memory(gathered_bytes), secondary);
    }
    domain->reducer = Reducer::make(domain);
  }
  list_domain(domain);
  if (!planned && !options.disk_path.empty()) domain->archive_folder = split_disk_path(options.disk_path).front();

  config.device = domain->device.str();
  config.disk_path = options.disk_path;
  config.device_memory = std::to_string(device_bytes);
  config.host_memory = std::to_string(options.host_bytes);
  config.page_size = std::to_string(options.page_bytes);
  config.min_page_bytes = std::to_string(domain->min_page_bytes);
  config.disk_endurance = std::to_string(parse_bytes(config.disk_endurance, "disk_endurance"));
  config.io = std::string(domain->cache->io_name());
  config.async_step = domain->async_step ? "true" : "false";
  if (domain->early_update == EarlyUpdate::never) config.early_update = "never";
  config.optimizer_device = domain->updates_in_host || !separate ? "host" : "device";
  config.memory = separate ? "separate" : "unified";
  const bool uses_heap = !planned && domain->device.is_cpu();
  auto space = std::shared_ptr<Space>(new Space(std::move(config), std::move(domain)));
  if (uses_heap) space->tensor_heap_ = use_tensor_heap();
  return space;
}

namespace {

/// Does Space::page() for any space.
bool page_in(const std::shared_ptr<Domain>& domain, at::Tensor& tensor, Role role) {
  const bool paged = page_tensor(domain, tensor, role);
  if (paged && tensor.grad().defined()) page_in(domain, tensor.mutable_grad(), Role::gradient);
  auto* segment = segment_of(tensor);
  // Except buffers, which may become each rank's own.
  if (segment && role == Role::parameter && tensor.requires_grad()) segment->set_keeps_same(true);
  if (segment && segment->domain() == domain) know(tensor, *domain);
  if (segment && segment->domain() == domain && domain->partition.ranks && !scope_domain()) {
    std::lock_guard lock(domain->sharing_mutex);
    domain->created.push_back(segment->storage());  // the caller calls start_equal()
  }
  return paged;
}

}  // namespace

bool Space::page(at::Tensor& tensor, Role role) { return page_in(domain_, tensor, role); }

bool Space::page_inner(at::Tensor& tensor, std::shared_ptr<const Outer> outer) {
  page_inner_tensors();
  page_in(domain_, tensor, Role::parameter);
  if (!segment_of(tensor) || segment_of(tensor)->domain() != domain_) return false;
  make_same(tensor);  // a part that a collective has brought is this rank's own
  auto* const segment = segment_of(tensor);
  compat::add_keys(*tensor.unsafeGetTensorImpl());  // of a tensor that was paged before, too
  segment->set_keeps_same(true);
  segment->set_outer(std::move(outer));
  segment->leaf_known = true;
  domain_->leaves.know(tensor);
  return true;
}

bool Space::mix(at::Tensor& parameter) {
  auto* segment = segment_of(parameter);
  if (!segment || segment->domain() != domain_ || !domain_->mixes() || !parameter.is_floating_point()) return false;
  mix_in(domain_, parameter);
  return true;
}

void Space::keep_whole(at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  if (!segment || segment->domain() != domain_ || !domain_->partition.ranks) return;
  make_whole(tensor);
  segment_of(tensor)->set_keeps_same(false);
}

std::vector<std::pair<std::string, std::size_t>> Space::unpaged_operators() const {
  return domain_->unpaged_operators.counts();
}

void Space::set_groups(const Groups::Group& gathers, const Groups::Group& sums, const Groups::Group& checks) {
  const auto peer_bytes = peer_bytes_of(config_.peer_memory);
  Collectives& ranks = *domain_->partition.ranks;
  ranks.set_groups(gathers, sums, checks, peer_bytes);
  const Partition& partition = domain_->partition;
  const bool updates_shares = !partition.reduces_whole && !partition.partitions[static_cast<int>(Role::parameter)];
  if (!updates_shares || !domain_->device.is_cpu() || !ranks.gathers_by_parts()) return;
  // Its messages have tags of their own, so they share the connection of gathers. Ranks agree on what it gathers.
  auto own = std::make_shared<Collectives>(gathers, domain_->device, CheckRanks::never, ranks.keeps_group());
  own->share_group(peer_bytes);
  domain_->refresher = std::make_shared<Refresher>(std::move(own));
}

void Space::start_equal() {
  const Booking booking(&domain_->cache->booked(), Spent::overhead);
  zeropage::start_equal(*domain_);
}

void Space::synchronize() {
  const Booking booking(&domain_->cache->booked(), Spent::overhead);
  run_deferred(*domain_);
  domain_->cache->wait();
}

void step_ended(c10::ArrayRef<at::Tensor> parameters) {
  std::vector<std::shared_ptr<Domain>> domains;
  for (const at::Tensor& parameter : parameters) {
    const auto* segment = segment_of(parameter);
    if (!segment || std::find(domains.begin(), domains.end(), segment->domain()) != domains.end()) continue;
    domains.push_back(segment->domain());
  }
  for (const auto& domain : domains) {
    const Booking booking(&domain->cache->booked(), Spent::overhead);
    if (!domain->async_step) run_deferred(*domain);
  }
}

void Space::close() {
  if (domain_->refresher) domain_->refresher->finish();
  if (domain_->gathered) domain_->gathered->close();
  domain_->cache->close();
  if (!closed_.exchange(true)) tensor_heap_ = nullptr;  // two threads may close one space
}

std::shared_ptr<Activations> Space::activations() const {
  const bool page = domain_->tiers[static_cast<int>(Role::activation)] != TierChoice::device;
  return page ? std::make_shared<Activations>(domain_) : nullptr;
}

namespace {

void fill_times(Report& report, const BookedTime::Seconds& spent) {
  const auto in = [&](Spent cause) { return spent[static_cast<int>(cause)]; };
  report.waited_for_disk = in(Spent::disk);
  report.waited_for_upload = in(Spent::upload);
  report.waited_for_gather = in(Spent::gather);
  report.waited_for_memory = in(Spent::memory);
  report.waited_for_device = in(Spent::device);
  report.waited_for_ranks = in(Spent::ranks);
  report.waited_for_threads = in(Spent::threads);
  report.waited_for_checkpoint = in(Spent::checkpoint);
  report.update_seconds = in(Spent::updates);
  report.copy_seconds = in(Spent::copies);
  report.overhead_seconds = in(Spent::overhead);
  report.waited_total = 0;
  for (int i = 0; i < kSpent; ++i) report.waited_total += is_wait(static_cast<Spent>(i)) ? spent[i] : 0;
}

}  // namespace

Report Space::report() const {
  const FrameCache& cache = *domain_->cache;
  CacheStats stats = cache.stats();
  const FrameCache* const gathered = domain_->gathered.get();
  if (gathered) {
    const CacheStats wholes = gathered->stats();
    stats.faults += wholes.faults, stats.evictions += wholes.evictions;
    for (int i = 0; i < kSpent; ++i) stats.spent[i] += wholes.spent[i];
  }
  const auto& [ranks, replicas] = std::tie(domain_->partition.ranks, domain_->partition.replicas);
  Traffic traffic = ranks ? ranks->traffic() : Traffic{};
  if (replicas) traffic += replicas->traffic();
  if (domain_->refresher) traffic += domain_->refresher->traffic();
  Report report{.homes = {},
                .budgets = {},
                .faults = stats.faults,
                .evictions = stats.evictions,
                .read_bytes = stats.read_bytes,
                .written_bytes = stats.written_bytes,
                .uploaded_bytes = stats.uploaded_bytes,
                .downloaded_bytes = stats.downloaded_bytes,
                .swap_bytes = cache.swap_bytes(),
                .file_bytes = stats.source_bytes,
                .ranks = domain_->partition.world(),
                .peers = ranks ? ranks->neighbours() : 0,
                .gathered_bytes = traffic.gathered,
                .reduced_bytes = traffic.reduced,
                .sent_inside_nodes = traffic.inside_nodes,
                .broadcast_bytes = traffic.broadcast,
                .control_bytes = traffic.control,
                .nonfinite_grads = domain_->not_finite.load(),
                .updated_in_host = domain_->updated_in_host.load(),
                .updated_on_device = domain_->updated_on_device.load(),
                .early_updates = domain_->early_updates.load(),
                .updates_committed = domain_->updates_committed.load(),
                .previews = domain_->previews.load(),
                .wasted_bytes = domain_->wasted_bytes.load(),
                .collectives = traffic.collectives,
                .read_by_peers = traffic.in_memory,
                .network_seconds = traffic.received.busy_seconds,
                .waited_for_network = traffic.received.waited_seconds,
                .io = std::string(cache.io_name()),
                .unpaged_operators = domain_->unpaged_operators.counts(),
                .seconds = std::chrono::duration<double>(Clock::now() - made_).count(),
                .disk_endurance = std::stoull(config_.disk_endurance)};
  BookedTime::Seconds spent = BookedTime::of_no_space().seconds();
  for (int i = 0; i < kSpent; ++i) spent[i] += stats.spent[i] - spent_before_[i];
  fill_times(report, spent);
  for (int role = 0; role < kRoles; ++role) {
    for (int tier = 0; tier < kTiers; ++tier) {
      if (stats.home_peak[role][tier] == 0) continue;
      report.homes.push_back({std::string(name_of(static_cast<Role>(role))),
                              std::string(name_of(static_cast<Tier>(tier))), stats.home_bytes[role][tier],
                              stats.home_peak[role][tier]});
    }
  }
  for (const Pool pool : {Pool::device, Pool::host}) {
    const FrameCache::Usage used = cache.usage(pool);
    Report::Memory memory{used.name, used.now, used.peak, used.limit};
    if (gathered && pool == Pool::device) {  // its part of device_memory
      const FrameCache::Usage part = gathered->usage(pool);
      memory.now += part.now, memory.peak += part.peak, memory.limit += part.limit;
    }
    report.budgets.push_back(memory);
  }
  return report;
}

bool Space::holds(const at::Tensor& tensor) const {
  const auto* segment = segment_of(tensor);
  return segment && segment->domain() == domain_;
}

bool is_paged(const at::Tensor& tensor) { return segment_of(tensor) != nullptr; }

std::optional<Kept> kept(const at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  if (!segment || segment->at_home().is_unallocated()) return {};
  const Segment& home = segment->at_home();
  const at::Tensor& master = segment->master();
  return Kept{std::string(name_of(home.role())),
              std::string(name_of(home.tier())),
              segment->is_partitioned(),
              c10::toString(tensor.scalar_type()),
              master.defined() ? c10::toString(master.scalar_type()) : "",
              reinterpret_cast<std::uintptr_t>(home.run())};
}

int ranks_of(const at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  return segment ? segment->domain()->partition.world() : 1;
}

std::uint64_t number_of(const at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  return segment ? segment->number() : 0;
}

void evict(const at::Tensor& tensor) {
  auto* segment = segment_of(tensor);
  if (!segment) return;
  if (segment->is_unallocated()) {
    // Evict the segments that its operators read instead. Not over ranks: pending programs may differ between ranks,
    // but gathered tensors must not.
    if (segment->domain()->partition.ranks) return;
    std::lock_guard lock(segment->domain()->deferral_mutex);
    const auto deferred = segment->deferred();
    if (deferred) deferred->for_each_segment([](StorageSegment& other) { other.cache()->evict(other); });
    return;
  }
  segment->cache()->evict(*segment);
  if (segment->is_partitioned()) segment->share_segment().cache()->evict(segment->share_segment());
}

std::uint64_t virtual_address(const at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  return segment ? segment->virtual_address() + tensor.storage_offset() * tensor.itemsize() : 0;
}

at::Tensor plain_copy(const at::Tensor& tensor) {
  c10::NoGradGuard no_grad;
  at::Tensor copy;
  {
    c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
    const auto options = tensor.options().requires_grad(false);
    const bool overlaps = at::has_internal_overlap(tensor.unsafeGetTensorImpl()) == at::MemOverlap::Yes;
    copy =
        overlaps ? at::empty(tensor.sizes(), options) : at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  // Inside torch.tensor([…]) PyTorch excludes the key.
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ - kPagedKeys;
  const c10::impl::ForceDispatchKeyGuard not_excluded(keys);
  return copy.copy_(tensor);
}

RegionPin::RegionPin(c10::ArrayRef<at::Tensor> tensors, const std::vector<bool>& writes) {
  c10::SmallVector<PinRequest, 8> requests;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    auto* segment = segment_of(tensor);
    if (!segment) continue;
    if (is_quantised(tensor) || (writes[i] && segment->master().defined())) {
      throw AccessError(
          fmt::format("compiled code cannot {} a tensor of [{}] that is kept in another precision: leave that code "
                      "uncompiled, as "
                      "optimizers are",
                      writes[i] ? "write" : "read", fmt::join(tensor.sizes(), ", ")));
    }
    if (tensor.is_leaf() && tensor.requires_grad()) leaves_.push_back(hook_gradient(tensor));
    requests.push_back({segment, writes[i] ? Access::write : Access::read});
  }
  pin_ = TensorPin(requests, {.lasting = true});
}

void RegionPin::release() { pin_.release(); }
void RegionPin::drop() { pin_ = TensorPin(); }

void take_data(at::Tensor parameter) {
  const auto* segment = segment_of(parameter);
  if (!parameter.is_leaf() || (segment && (!segment->domain()->partition.ranks || segment->keeps_same()))) return;
  const auto domain = domain_that_knows(parameter);
  if (!domain) return;
  const bool is_sampled = !segment && domain->partition.ranks && parameter.is_cpu() && parameter.numel() > 0;
  const double sample = is_sampled ? sample_of(parameter.detach()) : 0;
  if (!page_again(parameter, domain) || !is_sampled) return;
  domain->contract.note(segment_of(parameter)->number(), sample,
                        fmt::format("`.data =` on a parameter [{}]", fmt::join(parameter.sizes(), ", ")));
}

void take_gradient(const at::Tensor& parameter) {
  const auto* segment = segment_of(parameter);
  if (segment && segment->domain()->partition.ranks) reducer_of(*segment->domain()).take_set_gradient(parameter);
}

std::vector<at::Tensor> accumulate_here(c10::ArrayRef<at::Tensor> parameters, bool here) {
  std::vector<at::Tensor> changed;
  std::uint64_t group = 0;
  try {
    for (const at::Tensor& parameter : parameters) {
      auto* const segment = segment_of(parameter);
      const bool is_over_ranks = segment && segment->domain()->partition.ranks;
      if (!is_over_ranks || segment->accumulates_here == here) continue;
      const auto& domain = segment->domain();
      if (group == 0) group = domain->leaves.know(parameter);
      if (here) reducer_of(*domain).expect_local_sums(parameter, group);
      segment->accumulates_here = here;
      changed.push_back(parameter);
    }
  } catch (...) {
    if (here) accumulate_here(changed, false);
    throw;
  }
  return changed;
}

bool before_step(c10::ArrayRef<at::Tensor> parameters, bool has_closure) {
  std::vector<std::shared_ptr<Domain>> domains;
  for (at::Tensor parameter : parameters) {
    take_data(parameter);
    const auto* segment = segment_of(parameter);
    if (!segment || !segment->domain()->partition.ranks) continue;
    if (std::find(domains.begin(), domains.end(), segment->domain()) == domains.end()) {
      domains.push_back(segment->domain());
    }
  }
  for (const auto& domain : domains) {
    const Booking booking(&domain->cache->booked(), Spent::overhead);
    reducer_of(*domain).average(parameters, /*with_local_sums=*/!has_closure);
  }
  return !domains.empty();
}

TensorPin hold(c10::ArrayRef<at::Tensor> tensors) {
  std::vector<PinRequest> requests;
  for (const at::Tensor& tensor : tensors) {
    auto* segment = segment_of(tensor);
    if (!segment || !segment->domain()->partition.ranks) continue;
    segment->refresh(Access::read);  // with all ranks, because the module may use it on one
    if (segment->is_partitioned()) requests.push_back({segment, Access::read});
  }
  return TensorPin(requests, {.lasting = true});
}

void expect_end_of_backward(const at::Tensor& parameter) {
  const auto* segment = segment_of(parameter);
  if (segment && segment->domain()->partition.ranks) reducer_of(*segment->domain()).expect_end();
}

void settle_gradients(const at::Tensor& parameter) {
  const auto* segment = segment_of(parameter);
  if (segment && segment->domain()->partition.ranks) reducer_of(*segment->domain()).settle();
}

struct RawPin::Held {
  TensorPin pin;
  std::optional<WrittenMasters> written;
};

RawPin::RawPin() noexcept = default;
RawPin::RawPin(RawPin&&) noexcept = default;

RawPin::RawPin(const at::Tensor& tensor, Access access) {
  auto* segment = segment_of(tensor);
  if (!segment) return;
  const Booking booking(&segment->domain()->cache->booked(), Spent::overhead);
  auto held = std::make_unique<Held>();
  const PinRequest request{segment, access};
  if (access != Access::read) {
    segment->complete();
    held->written.emplace(*segment);
  }
  held->pin = TensorPin(request, {.lasting = true});
  held_ = std::move(held);
}

RawPin& RawPin::operator=(RawPin&& other) noexcept {
  std::swap(held_, other.held_);
  return *this;
}

RawPin::~RawPin() {
  try {
    release();
  } catch (...) {
  }
}

void RawPin::release() {
  const auto held = std::exchange(held_, nullptr);
  if (!held) return;
  held->pin.release();
  if (held->written) held->written->follow();
}

void RawPin::drop() { held_.reset(); }

RawPin pin(const at::Tensor& tensor, Access access) { return {tensor, access}; }

bool page_like(at::Tensor& tensor, const at::Tensor& other) {
  const auto* segment = segment_of(other);
  if (!segment) return false;
  const auto domain = segment->domain();
  if (!page_in(domain, tensor, segment->role())) return false;
  if (segment->master().defined()) give_master(tensor, *domain);
  know(tensor, *domain);
  return true;
}

at::Tensor saved(const at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  return segment && segment->domain()->saves_masters ? most_precise(tensor) : tensor;
}

c10::ScalarType dtype_of_states(const at::Tensor& parameter) {
  const auto* segment = segment_of(parameter);
  const bool has_master = segment && segment->master().defined();
  return has_master ? segment->domain()->master_dtype : parameter.scalar_type();
}

bool in_one_space(const at::Tensor& tensor, const at::Tensor& other) {
  const auto *a = segment_of(tensor), *b = segment_of(other);
  return a && b && a->domain() == b->domain();
}

bool is_quantised(const at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  return segment && segment->quantisation();
}

}  // namespace zeropage
