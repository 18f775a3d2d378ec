// The partition of a tensor over ranks. Every page is divided evenly, so each rank's disk and link carry 1/N of every
// transfer (bandwidth-centric partitioning, ZeRO-Infinity, section 6.1).
//
//   tensor   | page 0: rank 0 | rank 1 | rank 2 | page 1: rank 0 | rank 1 | rank 2 | last page: 0 | 1 | 2 |
//   share of rank 1:  page 0's part, page 1's part, last page's part, one after another
//
// Pages are counted in elements, so tensors of one shape have the same cuts whatever their dtype. A parameter, its
// gradient and its moments match element by element in each rank's share. All pages except the last are full. In the
// last, parts are rounded up, and the last ranks' parts may be short or empty.
#pragma once

#include <algorithm>
#include <cstddef>

#include "zeropage/base/units.h"

namespace zeropage {

class Stripes {
 public:
  /// Parts are multiples of this many elements, or of more: whole vectors (see [Note: bits at the edges]), whole
  /// cache lines.
  static constexpr std::size_t kPartElements = 64;
  /// Parts of full pages are multiples of this many elements: whole disk blocks, whatever the dtype.
  static constexpr std::size_t kFullPartElements = 4096;

  Stripes() = default;
  /// Parts are multiples of `unit`: kPartElements times a power of two, at most kFullPartElements.
  Stripes(std::size_t elements, std::size_t page_bytes, int ranks, int rank, std::size_t unit = kPartElements)
      : elements_(elements), page_(page_elements(page_bytes, ranks)), unit_(unit), ranks_(ranks), rank_(rank) {}

  /// Elements of a full page, for pages of about `page_bytes` of four-byte elements.
  static std::size_t page_elements(std::size_t page_bytes, int ranks) {
    const std::size_t unit = kFullPartElements * ranks;
    return std::max(round_down(page_bytes / 4, unit), unit);
  }

  std::size_t full_page() const { return page_; }
  int ranks() const { return ranks_; }
  int rank() const { return rank_; }
  std::size_t elements() const { return elements_; }
  std::size_t pages() const { return std::max<std::size_t>(ceil_div(elements_, page_), 1); }
  /// Elements of one rank's part of a page, with padding.
  std::size_t part(std::size_t page) const {
    return page + 1 < pages() ? page_ / ranks_ : round_up(ceil_div(elements_ - page * page_, ranks_), unit_);
  }
  /// The first element of a page in the tensor.
  std::size_t page_begin(std::size_t page) const { return page * page_; }
  /// The first element of its part in a rank's share.
  std::size_t part_begin(std::size_t page) const { return page * (page_ / ranks_); }

  /// Elements of every rank's share and of the whole, with padding.
  std::size_t share() const { return part_begin(pages() - 1) + part(pages() - 1); }
  std::size_t padded() const { return page_begin(pages() - 1) + ranks_ * part(pages() - 1); }
  /// Elements of this rank's share without padding; they come first.
  std::size_t own() const {
    const std::size_t last = pages() - 1, begin = page_begin(last) + rank_ * part(last);
    return part_begin(last) + (begin < elements_ ? std::min(part(last), elements_ - begin) : 0);
  }
  /// The index in the tensor of element `i` of this rank's share.
  std::size_t in_tensor(std::size_t i) const {
    const std::size_t page = std::min(i / (page_ / ranks_), pages() - 1);
    return page_begin(page) + rank_ * part(page) + (i - part_begin(page));
  }
  /// The end of the part with element `i` of the share: up to it, share and tensor are consecutive.
  std::size_t part_end(std::size_t i) const {
    const std::size_t page = std::min(i / (page_ / ranks_), pages() - 1);
    return part_begin(page) + part(page);
  }

  bool operator==(const Stripes&) const = default;

 private:
  std::size_t elements_ = 0;
  std::size_t page_ = kFullPartElements, unit_ = kPartElements;
  int ranks_ = 1, rank_ = 0;
};

}  // namespace zeropage
