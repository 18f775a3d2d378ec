// Simulates the pager under many seeds: simulate FIRST:END [options]. Each seed runs in a process of its own, so that
// a crash or a deadlock ends only that seed. The same seed repeats the same run.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "simulate/program.h"
#include "zeropage/store/budget.h"

using namespace zeropage;
using namespace zeropage::simulate;

namespace {

enum class Plant : std::uint8_t { none, lost_wakeup, lost_write, double_grant };

struct Arguments {
  std::uint64_t first = 0, end = 100;
  bool is_verbose = false, long_waits_fail = false, without_faults = false, stops = false;
  int streams = 1;  // of a device
  Plant plant = Plant::none;
  std::set<Kind> skipped;
};

constexpr unsigned kMostSeconds = 60;  // of real time, for one seed

void simulate_seed(std::uint64_t seed, const Arguments& arguments, Result& result) {
  result.seed = seed;
  Random random(seed);
  Setup setup = Setup::of(seed, random);
  setup.skipped = arguments.skipped;
  if (arguments.without_faults) {
    setup.disk.refused_in = setup.disk.failed_in = setup.disk.short_in = 0;
    setup.has_small_disk = false, setup.disk_bytes = kGiB;
  }
  SchedulerOptions options{
      .seed = seed, .long_waits_fail = arguments.long_waits_fail, .is_verbose = arguments.is_verbose};
  if (arguments.plant == Plant::lost_wakeup) options.dropped_notification = 1 + below(random, 200);
  if (arguments.plant == Plant::lost_write) setup.disk.lost_write = 1 + below(random, 20);
  if (arguments.plant == Plant::double_grant) Budget::forgets_one_in = 4;
  if (arguments.is_verbose) fmt::print(stderr, "seed {}: {}\n", seed, setup.describe());
  Threads threads(options, result);
  World world(threads, result, setup);
  threads.run([&] {
    auto io = std::make_unique<SimulatedIo>(threads, result, setup.disk);
    world.io = io.get();
    if (setup.has_device)
      world.device = std::make_shared<SimulatedDevice>(threads, setup.device_bytes, arguments.streams);
    world.cache = FrameCache::make({.device_bytes = setup.device_bytes,
                                    .host_bytes = setup.host_bytes,
                                    .disk_path = "simulated",
                                    .page_bytes = setup.page_bytes,
                                    .device = world.device},
                                   std::move(io), SwapFile::make_hollow(setup.disk_bytes));
    threads.set_check([&] { world.check_budgets(); });
    std::vector<std::unique_ptr<Owner>> owners;
    std::vector<int> running;
    for (int i = 0; i < setup.owners; ++i) {
      owners.push_back(std::make_unique<Owner>(world, i, random()));
      running.push_back(threads.spawn(fmt::format("owner {}", i), [owner = owners.back().get()] { owner->run(); }));
    }
    const int saver = threads.spawn("checkpoint", [&] { save_all(world); });
    if (setup.closes_early) {
      threads.doing("closes early");
      threads.sleep_for(std::chrono::microseconds(below(random, 60'000)));
      world.is_closing = true;
      world.cache->close();
    }
    threads.doing("waits for the owners");
    for (const int owner : running) threads.join(owner);
    {
      const std::unique_lock lock(world.mutex);
      world.no_more = true;
      world.changed.notify_all();
    }
    threads.join(saver);
    world.io->heal();
    if (!world.is_closing) check_everything(world);
    const CacheStats stats = world.cache->stats();
    result.evictions = stats.evictions, result.faults = stats.faults, result.surprises = stats.surprises;
    world.is_closing = true;
    threads.doing("closes");
    world.cache->close();
    world.check_closed();
    threads.set_check(nullptr);
    world.segments.clear();
    owners.clear();
    world.cache.reset();
    if (world.device) world.device->finish_all();
    world.device.reset();
  });
  result.virtual_us = static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(threads.now().time_since_epoch()).count());
  result.done = true;
}

/// One thread runs at a time, and the next one starts soonest on the same core.
void stay_on_one_core() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<unsigned>(std::max(::sched_getcpu(), 0)), &cores);
  (void)::sched_setaffinity(0, sizeof cores, &cores);
}

/// Runs one seed in a child. True if it was right.
bool run_seed(std::uint64_t seed, const Arguments& arguments, Result& result) {
  result = Result{};
  result.seed = seed;
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(kMostSeconds);
    stay_on_one_core();
    simulate_seed(seed, arguments, result);
    std::fflush(nullptr);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0 && result.done) return true;
  if (WIFSIGNALED(status)) {
    std::snprintf(result.failure.data(), result.failure.size(), "signal %d (%s)", WTERMSIG(status),
                  ::strsignal(WTERMSIG(status)));
    std::fprintf(stderr, "seed %llu failed at event %llu: %s\n", static_cast<unsigned long long>(seed),
                 static_cast<unsigned long long>(result.events), result.failure.data());
  }
  return false;
}

bool parse(int count, char** values, Arguments& arguments) {
  for (int i = 1; i < count; ++i) {
    const std::string_view value = values[i];
    const std::string_view next = i + 1 < count ? values[i + 1] : "";
    if (value == "--verbose") {
      arguments.is_verbose = true;
    } else if (value == "--no-timeouts") {
      arguments.long_waits_fail = true;
    } else if (value == "--no-faults") {
      arguments.without_faults = true;
    } else if (value == "--stop") {
      arguments.stops = true;
    } else if (value == "--two-streams") {
      arguments.streams = 2;
    } else if (value == "--plant") {
      ++i;
      arguments.plant = next == "lost-wakeup"    ? Plant::lost_wakeup
                        : next == "lost-write"   ? Plant::lost_write
                        : next == "double-grant" ? Plant::double_grant
                                                 : Plant::none;
      if (arguments.plant == Plant::none) return false;
    } else if (value == "--skip") {
      ++i;
      const auto kind = std::ranges::find(kKinds, next);
      if (kind == std::end(kKinds)) return false;
      arguments.skipped.insert(static_cast<Kind>(kind - std::begin(kKinds)));
    } else if (const auto colon = value.find(':'); colon != std::string_view::npos) {
      arguments.first = std::strtoull(values[i], nullptr, 10);
      arguments.end = std::strtoull(values[i] + colon + 1, nullptr, 10);
    } else {
      return false;
    }
  }
  return true;
}

void add(Result& sum, const Result& one) {
  sum.events += one.events, sum.operations += one.operations, sum.virtual_us += one.virtual_us;
  sum.disk_errors += one.disk_errors, sum.budget_errors += one.budget_errors, sum.transfers += one.transfers;
  sum.faults_injected += one.faults_injected, sum.long_waits_ended += one.long_waits_ended;
  sum.evictions += one.evictions, sum.faults += one.faults, sum.surprises += one.surprises;
  sum.checked_pages += one.checked_pages, sum.saved_pages += one.saved_pages, sum.versions += one.versions;
}

void print_sum(const Result& sum, std::uint64_t seeds, double seconds) {
  fmt::print(
      "{} seeds, {} events ({:.0f} a second), {:.0f} s of virtual time: {} operations, {} transfers ({} failed), "
      "{} faults, {} evictions, {} surprises, {} pages compared, {} saved, {} versions; {} disk errors, {} budget "
      "errors, {} long waits ran out\n",
      seeds, sum.events, static_cast<double>(sum.events) / seconds, static_cast<double>(sum.virtual_us) / 1e6,
      sum.operations, sum.transfers, sum.faults_injected, sum.faults, sum.evictions, sum.surprises, sum.checked_pages,
      sum.saved_pages, sum.versions, sum.disk_errors, sum.budget_errors, sum.long_waits_ended);
}

constexpr const char* kUsage[] = {
    "usage: simulate FIRST:END [options]",
    "  --verbose      prints each operation and each seed's hash",
    "  --stop         ends at the first failure",
    "  --no-timeouts  a wait of a second or more must not run to its deadline",
    "  --no-faults    the disk does not fail and is large",
    "  --two-streams  threads that use a device share two streams, not one",
    "  --skip KIND    leaves out one kind of operations",
    "  --plant FAULT  lost-wakeup, lost-write or double-grant; exit code 0 if a seed finds it",
};

}  // namespace

int main(int count, char** values) {
  Arguments arguments;
  if (!parse(count, values, arguments)) {
    for (const char* line : kUsage) fmt::print(stderr, "{}\n", line);
    fmt::print(stderr, "  The kinds are {}\n", fmt::join(kKinds, ", "));
    return 2;
  }
  // The same addresses at each run, since some orders follow from them.
  if (const int now = ::personality(0xffffffff); now >= 0 && (now & ADDR_NO_RANDOMIZE) == 0) {
    if (::personality(static_cast<unsigned long>(now) | ADDR_NO_RANDOMIZE) >= 0) ::execv("/proc/self/exe", values);
  }
  void* const memory = ::mmap(nullptr, sizeof(Result), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 2;
  Result& result = *new (memory) Result;
  Result sum;
  std::vector<std::pair<std::uint64_t, std::string>> failures;
  const auto start = std::chrono::steady_clock::now();
  auto told = start;
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  for (std::uint64_t seed = arguments.first; seed < arguments.end; ++seed) {
    if (!run_seed(seed, arguments, result)) failures.emplace_back(seed, result.failure.data());
    add(sum, result);
    if (arguments.is_verbose) fmt::print("seed {}: {} events, hash {:016x}\n", seed, result.events, result.hash);
    if (std::chrono::steady_clock::now() - told > std::chrono::seconds(20)) {
      told = std::chrono::steady_clock::now();
      fmt::print("... {} seeds, {} failed\n", seed + 1 - arguments.first, failures.size());
      std::fflush(stdout);
    }
    if ((arguments.stops || arguments.plant != Plant::none) && !failures.empty()) break;
  }
  print_sum(sum, result.seed + 1 - arguments.first, seconds());
  for (const auto& [seed, text] : failures) fmt::print("FAILED seed {}: {}\n", seed, text);
  if (arguments.plant != Plant::none) {
    fmt::print("the planted fault was {}\n", failures.empty() ? "NOT found" : "found");
    return failures.empty() ? 1 : 0;
  }
  return failures.empty() ? 0 : 1;
}
