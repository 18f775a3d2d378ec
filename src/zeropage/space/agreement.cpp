#include "zeropage/space/agreement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>

#include "zeropage/base/errors.h"

namespace zeropage {
namespace {

// The separator of fields. Settings are words and paths, and never contain it.
constexpr char kEnd = '\x1f';

std::vector<std::string> fields_of(const std::string& text) {
  std::vector<std::string> fields;
  std::istringstream stream(text);
  for (std::string field; std::getline(stream, field, kEnd);) fields.push_back(field);
  return fields;
}

/// "16KiB" on rank 0; "32KiB" on ranks 1, 2
std::string values_by_rank(const std::vector<std::string>& values) {
  std::vector<std::pair<std::string, std::vector<std::size_t>>> ranks_of;
  for (std::size_t rank = 0; rank < values.size(); ++rank) {
    const auto known =
        std::find_if(ranks_of.begin(), ranks_of.end(), [&](auto& v) { return v.first == values[rank]; });
    known == ranks_of.end() ? ranks_of.push_back({values[rank], {rank}}) : known->second.push_back(rank);
  }
  std::string text;
  for (const auto& [value, ranks] : ranks_of) {
    text += fmt::format("{}\"{}\" on {} {}", text.empty() ? "" : "; ", value, ranks.size() == 1 ? "rank" : "ranks",
                        fmt::join(ranks, ", "));
  }
  return text;
}

}  // namespace

/// Every rank's text; with replicas, one shard group after another.
std::vector<std::string> Agreement::everyones(const std::string& mine, const Subject& subject) {
  constexpr char kEndOfRank = '\x1e';
  const auto group = ranks_.all_gather_text(mine, subject);
  if (!replicas_) return group;
  std::vector<std::string> all;
  for (const std::string& texts : replicas_->all_gather_text(fmt::format("{}", fmt::join(group, "\x1e")), subject)) {
    std::size_t begin = 0;
    for (std::size_t i = 0; i < group.size(); ++i) {
      const std::size_t end = std::min(texts.find(kEndOfRank, begin), texts.size());
      all.push_back(texts.substr(begin, end - begin));
      begin = std::min(end + 1, texts.size());
    }
  }
  return all;
}

std::map<std::string, std::size_t> Agreement::settle(const std::vector<Agreed>& settings,
                                                     const std::map<std::string, std::size_t>& sizes) {
  std::string mine;
  for (const Agreed& setting : settings) mine += setting.meaning + kEnd + setting.text + kEnd;
  for (const auto& [_, size] : sizes) mine += std::to_string(size) + kEnd;
  std::vector<std::vector<std::string>> all;
  for (const std::string& text : everyones(mine, {"settings", 0, 0})) {
    all.push_back(fields_of(text));
    if (all.back().size() != 2 * settings.size() + sizes.size()) {
      throw ConfigError("ranks run different versions of zeropage; install the same one on every host");
    }
  }
  std::string differ;
  for (std::size_t i = 0; i < settings.size(); ++i) {
    if (std::all_of(all.begin(), all.end(), [&](const auto& a) { return a[2 * i] == all[0][2 * i]; })) continue;
    std::vector<std::string> texts;
    for (const auto& fields : all) texts.push_back(fields[2 * i + 1]);
    differ += fmt::format("{}{} differs between ranks: {}", differ.empty() ? "" : ". ", settings[i].name,
                          values_by_rank(texts));
  }
  if (!differ.empty()) throw ConfigError(differ + ". Give every rank the same");
  std::map<std::string, std::size_t> least = sizes;
  for (const auto& fields : all) {
    std::size_t i = 2 * settings.size();
    for (auto& [_, size] : least) size = std::min<std::size_t>(size, std::stoull(fields[i++]));
  }
  return least;
}

void Agreement::confirm(const std::string& failure) {
  const auto failures = everyones(failure, {"settings", 1, 0});
  if (!failure.empty()) return;
  for (std::size_t rank = 0; rank < failures.size(); ++rank) {
    if (!failures[rank].empty()) {
      throw RankError(fmt::format("rank {} could not make its space: {}", rank, failures[rank]));
    }
  }
}

}  // namespace zeropage
