#include "zeropage/tensor/placement.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <sstream>
#include <utility>

#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {
namespace {

thread_local int steps = 0;  // under way on this thread
thread_local int same_values = 0, ones_ranks = 0;
std::atomic<bool> are_announced = false;

/// Ranks on different processors round differently.
constexpr double kTolerance = 1e-3;

}  // namespace

StepScope::StepScope() { ++steps; }
StepScope::~StepScope() { --steps; }
OutsideSteps::OutsideSteps() : outer_(std::exchange(steps, 0)) {}
OutsideSteps::~OutsideSteps() { steps = outer_; }
SameValues::SameValues(bool all_ranks) : all_ranks_(all_ranks) { ++same_values, ones_ranks += !all_ranks; }
SameValues::~SameValues() { --same_values, ones_ranks -= !all_ranks_; }

bool makes_what_all_ranks_make() { return values_are_same() && ones_ranks == 0; }

void announce_steps() { are_announced.store(true, std::memory_order_relaxed); }

bool values_are_same() {
  if (scope_domain() || same_values > 0) return true;
  if (torch::autograd::get_current_graph_task_id() >= 0) return false;
  return steps > 0 || (!are_announced.load(std::memory_order_relaxed) && !c10::GradMode::is_enabled());
}

void ContractLog::note(std::uint64_t number, double value, std::string what) {
  std::lock_guard lock(mutex_);
  if (entries_.size() < kMostEntries) entries_.push_back({number, value, std::move(what)});
}

void ContractLog::count(std::string_view operator_name) {
  std::lock_guard lock(mutex_);
  ++of_parameters_;
  last_of_parameter_ = operator_name;
}

ContractLog::Taken ContractLog::take() {
  std::lock_guard lock(mutex_);
  Taken taken{(0xcbf29ce484222325 ^ of_parameters_) * 0x100000001b3,  // FNV-1a
              fmt::format("{} {}\n", of_parameters_, last_of_parameter_)};
  for (const Entry& entry : entries_) {
    taken.hash = (taken.hash ^ entry.number) * 0x100000001b3;
    taken.hash = (taken.hash ^ std::bit_cast<std::uint64_t>(entry.value)) * 0x100000001b3;
    taken.text += fmt::format("{} {:.17g} {}\n", entry.number, entry.value, entry.what);
  }
  entries_.clear();
  return taken;
}

std::string ContractLog::difference(const std::vector<std::string>& texts, bool have_ended) {
  std::vector<std::istringstream> lines(texts.begin(), texts.end());
  std::vector<std::uint64_t> counts(texts.size());
  std::string by_count;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    std::string last;
    lines[i] >> counts[i] >> std::ws;
    std::getline(lines[i], last);
    by_count += fmt::format("\n  rank {}: parameters {} times, the last one by {}", i, counts[i], last);
  }
  const bool are_equal = std::all_of(counts.begin(), counts.end(), [&](auto count) { return count == counts[0]; });
  while (true) {
    std::vector<Entry> entries(lines.size());
    bool differs = false;
    std::size_t over = 0;  // texts
    for (std::size_t i = 0; i < lines.size(); ++i) {
      std::string line;
      if (!std::getline(lines[i], line)) {
        ++over;
        entries[i].what = "no operator";
        continue;
      }
      std::istringstream words(line);
      std::string value;
      words >> entries[i].number >> value >> std::ws;
      entries[i].value = std::strtod(value.c_str(), nullptr);  // also of nan and inf, which streams do not read
      std::getline(words, entries[i].what);
    }
    if (over == texts.size() || (over > 0 && !have_ended)) return have_ended && !are_equal ? by_count : "";
    const double first = entries[0].value;
    for (const Entry& entry : entries) {
      const bool close =
          entry.value == first || (std::isnan(entry.value) && std::isnan(first)) ||
          std::abs(entry.value - first) <= kTolerance * std::max(std::abs(first), std::abs(entry.value));
      differs = differs || over > 0 || entry.number != entries[0].number || !close;
    }
    if (!differs) continue;
    std::string text;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      text += fmt::format("\n  rank {}: {:.6g} by {}", i, entries[i].value, entries[i].what);
    }
    return text;
  }
}

}  // namespace zeropage
