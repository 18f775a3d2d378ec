// How a tensor's content lies in its segment and in a file: which bytes of which pages are which bytes of the tensor.
// Private to checkpoint/.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <vector>

#include "zeropage/checkpoint/tensor_content.h"
#include "zeropage/tensor/paged_tensor.h"

namespace zeropage {

inline constexpr std::size_t kPieceBytes = FileReader::kMostBytes;

/// What this rank has of a tensor: consecutive bytes of it, that are consecutive in a segment too.
struct Span {
  std::uint64_t begin, end;  // bytes, in the tensor
  std::uint64_t at;          // where it begins in the segment
};

/// Whether the segment's bytes, in order, are the tensor's.
bool is_in_order(const at::Tensor& tensor);
/// Of the segment's elements, which a tensor over it may see as another dtype.
std::size_t item_bytes_of(const at::Tensor& tensor);
std::vector<Span> spans_of(const StorageSegment& segment, std::size_t item_bytes);
/// A part of a segment that is written: at most a page, and at most kPieceBytes.
struct Part {
  std::uint64_t begin;  // bytes, in the tensor
  std::size_t page;
  std::size_t in_page;
  std::size_t bytes;
};

std::vector<Part> parts_of(const StorageSegment& segment, const StorageSegment& home, std::size_t item_bytes);
/// Cuts [begin, end) of the segment's bytes where its pages end, and into at most kPieceBytes.
void for_each_part(const StorageSegment& segment, std::uint64_t begin, std::uint64_t end,
                   c10::function_ref<void(std::size_t page, std::uint64_t begin, std::size_t bytes)> visit);
/// Memory as a tensor of bytes.
at::Tensor bytes_at(std::byte* data, std::size_t bytes, c10::Device device);
/// A tensor of the same shape, paged where `tensor` is, that is to be converted or laid out otherwise.
at::Tensor in_between(const at::Tensor& tensor, c10::ScalarType dtype);
/// Writes all of it.
std::vector<Piece> write_memory(const std::byte* data, std::size_t bytes, FileWriter& writer, std::uint64_t offset);
/// A page that is there; what was made ahead of it is settled first.
PagePin pin_page(StorageSegment& segment, std::size_t page, Access access);
/// Whether this rank writes what it has of the segment: what all ranks have alike, one of them does.
bool is_ours_to_write(const StorageSegment& segment);

}  // namespace zeropage
