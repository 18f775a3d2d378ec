// The content that each page of a simulated program must have: one stamp, repeated, or zeros before its first write.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "zeropage/pager/frame_cache.h"

namespace zeropage::simulate {

using Stamp = std::uint64_t;

struct PageModel {
  Stamp stamp = 0;
  std::vector<Stamp> others = {};  // after failed overwrites, the page may hold one of these

  /// A write of the page that succeeds, or that fails and may be undone.
  void write(Stamp next, bool fails) {
    fails ? others.push_back(stamp) : others.clear();
    stamp = next;
  }
  bool may_be(Stamp content) const { return stamp == content || std::ranges::find(others, content) != others.end(); }
};

/// A segment, its owner thread and its model. Only the owner changes it. Others read it, and compare it while it is
/// not busy.
class SimulatedSegment final : public Segment {
 public:
  SimulatedSegment(int id, int owner) : id_(id), owner_(owner) {}
  ~SimulatedSegment() override {
    if (cache()) cache()->release(*this);
  }

  std::byte* data = nullptr;  // null outside pins of the whole segment
  std::vector<PageModel> model;
  DeviceMemory::Event written;  // on a device: after the owner's latest writes
  int busy = 0;                 // operations of the owner that write
  std::uint64_t writes = 0;     // number of such operations so far
  bool in_version = false;
  SegmentSpec spec{};

  int id() const { return id_; }
  int owner() const { return owner_; }
  std::byte* at(std::size_t page) const { return data + page * page_bytes(); }

 protected:
  void expose(std::byte* where) override { data = where; }
  void hide() override { data = nullptr; }

 private:
  const int id_, owner_;
};

inline void fill(std::byte* at, std::size_t bytes, Stamp stamp) {
  for (std::size_t i = 0; i < bytes; i += sizeof stamp)
    std::memcpy(at + i, &stamp, std::min(bytes - i, sizeof stamp));
}

inline bool is_filled(const std::byte* at, std::size_t bytes, Stamp stamp) {
  for (std::size_t i = 0; i < bytes; i += sizeof stamp) {
    if (std::memcmp(at + i, &stamp, std::min(bytes - i, sizeof stamp)) != 0) return false;
  }
  return true;
}

/// Describes the stamps of a page, for reports.
inline std::string describe(const std::byte* at, std::size_t bytes) {
  std::string text;
  std::optional<Stamp> before;
  int parts = 0;
  for (std::size_t i = 0; i + sizeof(Stamp) <= bytes && parts < 4; i += sizeof(Stamp)) {
    Stamp stamp = 0;
    std::memcpy(&stamp, at + i, sizeof stamp);
    if (before == stamp) continue;
    before = stamp;
    ++parts;
    text += (text.empty() ? "" : ", ") + std::to_string(stamp >> 24) + " of segment " +
            std::to_string(stamp >> 12 & 0xFFF) + " page " + std::to_string(stamp & 0xFFF) + " from byte " +
            std::to_string(i);
  }
  return text;
}

}  // namespace zeropage::simulate
