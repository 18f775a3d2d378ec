// The place of one page's content on disk: an extent of the swap file, or a position in a file that is only read. A
// run's home is a table of slots, one a page. Snapshots hold the slots of the content that they will write, and a
// slot that only the table holds may be written in place.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zeropage/store/source_file.h"
#include "zeropage/store/swap_file.h"

namespace zeropage {

/// The CRC-32C of the next `bytes` of a page.
struct Checksum {
  std::size_t bytes;
  std::uint32_t crc;
};

/// The content that a page must have in a file.
struct Expected {
  std::shared_ptr<const std::string> tensor;  // its name, for errors
  std::vector<Checksum> checksums;            // compared at each read. Empty: unknown
};

struct Slot {
  explicit Slot(Extent of_swap_file) : extent(std::move(of_swap_file)) {}
  explicit Slot(SourceRange of_file, Expected of_content = {})
      : source(std::move(of_file)), expected(std::move(of_content)) {}

  Extent extent;
  SourceRange source;  // used if there is no extent
  Expected expected;   // at the source
};

/// The cache's lock guards the count of references.
using SlotRef = std::shared_ptr<Slot>;

/// Whether only the holder of this reference uses the slot, and may write to it.
inline bool is_sole_and_writable(const SlotRef& slot) { return slot && slot.use_count() == 1 && slot->extent; }

}  // namespace zeropage
