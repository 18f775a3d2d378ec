// The text of a report: tables, the cause of most time, and advice. Python's _report.py prints the same, and also
// differences and shares of reports; a test compares the two.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ostream>

#include "zeropage/space/space.h"

namespace zeropage {
namespace {

using Row = std::vector<std::string>;

constexpr double kSecondsOfDay = 86'400, kDaysOfYear = 365.25;

/// Puts commas between thousands: "1234.5" -> "1,234.5".
std::string with_commas(std::string number) {
  for (std::size_t i = std::min(number.find('.'), number.size()); i > 3;) number.insert(i -= 3, 1, ',');
  return number;
}
std::string counted(std::size_t count) { return with_commas(std::to_string(count)); }
std::string megabytes(std::size_t bytes) {
  return with_commas(fmt::format("{:.1f}", static_cast<double>(bytes) / 1e6)) + " MB";
}

/// A table as Python's tabulate prints it. The columns from `numbers` on are at the right.
std::string table(const Row& headers, const std::vector<Row>& rows, std::size_t numbers) {
  std::vector<std::size_t> widths;
  for (const std::string& header : headers) widths.push_back(header.size() + 2);
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  Row lines;
  const auto add_line = [&](const Row& row, char fill) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string blanks(widths[i] - row[i].size(), fill);
      const bool is_number = i >= numbers && !rows.empty();
      line += (i > 0 ? "  " : "") + (is_number ? blanks + row[i] : row[i] + blanks);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    lines.push_back(std::move(line));
  };
  add_line(headers, ' ');
  add_line(Row(headers.size()), '-');
  for (const Row& row : rows) add_line(row, ' ');
  return fmt::format("{}", fmt::join(lines, "\n"));
}

double written_per_day(const Report& report) {
  return report.seconds > 0 ? static_cast<double>(report.written_bytes) / report.seconds * kSecondsOfDay : 0;
}

/// Years until the drive is worn at the rate of this report; 0 if that is unknown.
double disk_years(const Report& report) {
  if (report.disk_endurance == 0 || report.written_bytes == 0) return 0;
  return static_cast<double>(report.disk_endurance) / written_per_day(report) / kDaysOfYear;
}

std::string wear_warning(double years) {
  if (years == 0 || years >= 1) return "";
  return fmt::format(
      "WARNING: at this rate training uses up disk_endurance in {:.0f} days; keep more states in the host "
      "(optimizer=\"host\"), or shrink them (optimizer_dtype=\"8bit\")",
      years * kDaysOfYear);
}

std::vector<Row> moved(const Report& report) {
  std::vector<Row> rows{
      {"faults", counted(report.faults)},
      {"evictions", counted(report.evictions)},
      {"read from disk", megabytes(report.read_bytes)},
      {"written to disk", megabytes(report.written_bytes)},
      {"written to disk a day, at this rate",
       with_commas(fmt::format("{:.2f}", written_per_day(report) / 1e12)) + " TB"},
      {"copied to the device", megabytes(report.uploaded_bytes)},
      {"copied from the device", megabytes(report.downloaded_bytes)},
      {"swap file", megabytes(report.swap_bytes)},
      {"I/O by", report.io},
  };
  const auto add = [&](const char* name, std::string value) { rows.push_back({name, std::move(value)}); };
  if (const double years = disk_years(report)) {
    add("the drive is worn after, at this rate", fmt::format("{:.2g} years", years));
  }
  if (report.file_bytes) add("in files of a loader", megabytes(report.file_bytes));
  if (report.updated_in_host || report.updated_on_device) {
    add("elements updated in the host", counted(report.updated_in_host));
    add("elements updated on the device", counted(report.updated_on_device));
  }
  if (report.early_updates) {
    add("early updates of a parameter", counted(report.early_updates));
    add("early updates that the step accepted", counted(report.updates_committed));
    add("wasted by the other early updates", megabytes(report.wasted_bytes));
  }
  if (report.previews) add("lookups in embeddings ahead of their update", counted(report.previews));
  if (report.nonfinite_grads) add("values in gradients that were not finite", counted(report.nonfinite_grads));
  if (report.ranks > 1) {
    add("ranks", std::to_string(report.ranks));
    add("sent in all-gathers", megabytes(report.gathered_bytes));
    add("sent in sums of gradients", megabytes(report.reduced_bytes));
    if (report.sent_inside_nodes) add("of both, inside nodes alone", megabytes(report.sent_inside_nodes));
    add("sent to start equal", megabytes(report.broadcast_bytes));
    add("sent in checks and norms", megabytes(report.control_bytes));
    if (report.peers) add("of all that, read by ranks on this host", megabytes(report.read_by_peers));
    if (const auto hidden = hidden_network(report)) {
      add("network's time", fmt::format("{:.2f} s, {:.0f}% under compute", report.network_seconds, 100 * *hidden));
    }
    add("collectives", counted(report.collectives));
  }
  return rows;
}

/// A cause of time: its name in reports, its seconds, and its name and advice if it is the bound.
struct TimeCause {
  const char* name;
  double seconds;
  const char *bound, *advice;
};

std::vector<TimeCause> causes(const Report& report) {
  return {
      {"updates of parameters", report.update_seconds, "updates",
       "use more tokens a step; use fused=True; with a GPU, set optimizer_device='device' or raise device_memory"},
      {"waits for the disk", report.waited_for_disk, "disk",
       "raise host_memory; store fewer bytes (compute_dtype, master_dtype='float32_split', optimizer_dtype); use "
       "more tokens a step; add disks to disk_path"},
      {"waits for uploads", report.waited_for_upload, "upload",
       "raise device_memory; set compute_dtype, which halves the traffic; set optimizer_device='host'; use more "
       "tokens a step"},
      {"waits for all-gathers", report.waited_for_gather, "gather",
       "use more tokens a step; raise device_memory, so that gathered tensors stay; set stage=2, or use a shard "
       "group of fewer ranks"},
      {"waits for memory", report.waited_for_memory, "memory",
       "raise device_memory and host_memory: reads wait until other pages have left memory"},
      {"waits for the device", report.waited_for_device, "device",
       "the host needs results of the device: read losses and norms less often, or set optimizer_device='device'"},
      {"waits for other ranks", report.waited_for_ranks, "ranks",
       "use more tokens a step; set reduce_dtype; give all ranks equal work"},
      {"waits for other threads", report.waited_for_threads, "threads",
       "threads of the program use the same tensors at once"},
      {"checkpoints", report.waited_for_checkpoint, "checkpoint", "save less often, or with background=True"},
      {"copies into pages", report.copy_seconds, "copies", "use more tokens a step; page fewer activations"},
      {"bookkeeping", report.overhead_seconds, "overhead", "use more tokens a step; raise min_page_bytes"},
  };
}

std::vector<Row> times(const Report& report) {
  std::vector<Row> rows;
  const auto add = [&](const char* name, double seconds) {
    const double share = report.seconds > 0 ? seconds / report.seconds : 0;
    rows.push_back({name, with_commas(fmt::format("{:.2f}", seconds)) + " s", fmt::format("{:.1f}%", 100 * share)});
  };
  add("operators, and the program itself", operator_seconds(report));
  for (const TimeCause& cause : causes(report)) {
    if (cause.seconds >= 0.005) add(cause.name, cause.seconds);
  }
  return rows;
}

}  // namespace

std::optional<double> hidden_network(const Report& report) {
  if (report.network_seconds <= 0) return std::nullopt;
  return std::clamp(1 - report.waited_for_network / report.network_seconds, 0.0, 1.0);
}

double operator_seconds(const Report& report) {
  double rest = report.seconds;
  for (const TimeCause& cause : causes(report)) rest -= cause.seconds;
  return std::max(rest, 0.0);
}

Bound bound_by(const Report& report) {
  const auto all = causes(report);
  const TimeCause& most = *std::ranges::max_element(all, {}, &TimeCause::seconds);
  const double share = report.seconds > 0 ? most.seconds / report.seconds : 0;
  if (share >= 0.05) return {most.bound, share, most.advice};
  return {"compute", report.seconds > 0 ? operator_seconds(report) / report.seconds : 1,
          "transfers are hidden behind it"};
}

std::string to_string(const Report& report) {
  std::vector<Row> homes, budgets;
  for (const auto& [role, tier, now, peak] : report.homes) {
    homes.push_back({role, tier, megabytes(now), megabytes(peak)});
  }
  for (const auto& [name, now, peak, limit] : report.budgets) {
    budgets.push_back({name, megabytes(now), megabytes(peak), megabytes(limit)});
  }
  const Bound bound = bound_by(report);
  Row parts{table({"role", "tier", "now", "peak"}, homes, 2), table({"budget", "now", "peak", "limit"}, budgets, 1),
            table({"moved", ""}, moved(report), 1), table({"time", "", "share"}, times(report), 1),
            fmt::format("bound by {}: {:.0f}% of {:.1f} s; {}", bound.cause, 100 * bound.share, report.seconds,
                        bound.advice)};
  if (const std::string warning = wear_warning(disk_years(report)); !warning.empty()) parts.push_back(warning);
  if (!report.unpaged_operators.empty()) {
    auto calls = report.unpaged_operators;
    std::ranges::stable_sort(calls, std::ranges::greater(), &std::pair<std::string, std::size_t>::second);
    std::vector<Row> rows;
    for (const auto& [name, count] : calls) rows.push_back({name, std::to_string(count)});
    parts.push_back(table({"operator that loaded complete tensors", "calls"}, rows, 1));
  }
  return fmt::format("{}", fmt::join(parts, "\n\n"));
}

std::ostream& operator<<(std::ostream& out, const Report& report) { return out << to_string(report); }

}  // namespace zeropage
