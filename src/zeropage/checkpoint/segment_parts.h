// Maps a tensor's bytes to bytes of its segment's pages and of a file. Private to checkpoint/.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <vector>

#include "zeropage/checkpoint/tensor_content.h"
#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

inline constexpr std::size_t kPieceBytes = FileReader::kMostBytes;

/// One part of a tensor on this rank: bytes that are consecutive both in the tensor and in a segment.
struct Span {
  std::uint64_t begin, end;  // bytes, in the tensor
  std::uint64_t at;          // of its first byte in the segment
};

/// Whether the segment's bytes, in order, are the tensor's.
bool is_in_order(const at::Tensor& tensor);
/// Bytes of one of the segment's elements; a tensor over it may view it as another dtype.
std::size_t item_bytes_of(const at::Tensor& tensor);
std::vector<Span> spans_of(const StorageSegment& segment, std::size_t item_bytes);
/// One write of a segment: at most a page, and at most kPieceBytes.
struct Part {
  std::uint64_t begin;  // bytes, in the tensor
  std::size_t page;
  std::size_t in_page;
  std::size_t bytes;
};

std::vector<Part> parts_of(const StorageSegment& segment, const StorageSegment& home, std::size_t item_bytes);
/// Cuts [begin, end) of the segment's bytes at page ends, and into pieces of at most kPieceBytes.
void for_each_part(const StorageSegment& segment, std::uint64_t begin, std::uint64_t end,
                   c10::function_ref<void(std::size_t page, std::uint64_t begin, std::size_t bytes)> visit);
/// Memory as a tensor of bytes.
at::Tensor bytes_at(std::byte* data, std::size_t bytes, c10::Device device);
/// A tensor of the same shape for a conversion or another layout, paged if `tensor` is.
at::Tensor in_between(const at::Tensor& tensor, c10::ScalarType dtype);
std::vector<Piece> write_memory(const std::byte* data, std::size_t bytes, FileWriter& writer, std::uint64_t offset);
/// A pin of a page that has been read. Settles an early update of the segment first.
PagePin pin_page(StorageSegment& segment, std::size_t page, Access access);
/// Whether this rank writes its bytes of the segment. If all ranks have the same bytes, one of them writes.
bool is_ours_to_write(const StorageSegment& segment);

}  // namespace zeropage
