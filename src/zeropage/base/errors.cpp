#include "zeropage/base/errors.h"

#include <atomic>

namespace zeropage {
namespace {

std::atomic<ErrorTranslator> translator{nullptr};

}  // namespace

void set_error_translator(ErrorTranslator translate) { translator.store(translate); }
bool has_error_translator() { return translator.load() != nullptr; }

void throw_translated(const Error& error, const std::string& before) {
  const std::string message = before.empty() ? error.what() : before + ": " + error.what();
  const auto throw_as = [&](const auto& typed) {
    if (auto translate = translator.load()) translate(typed);
    throw typed;
  };
  if (dynamic_cast<const BudgetError*>(&error)) throw_as(BudgetError(message));
  if (const auto* disk = dynamic_cast<const DiskError*>(&error)) {
    throw_as(DiskError(message, disk->code(), disk->path()));
  }
  if (dynamic_cast<const AccessError*>(&error)) throw_as(AccessError(message));
  if (dynamic_cast<const RankError*>(&error)) throw_as(RankError(message));
  if (dynamic_cast<const ConfigError*>(&error)) throw_as(ConfigError(message));
  throw_as(Error(message));
  throw;
}

}  // namespace zeropage
