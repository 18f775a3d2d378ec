#include "zeropage/checkpoint/segment_parts.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

namespace zeropage {
namespace {

bool is_first_of_replicas(const Partition& partition) {
  return !partition.replicas || partition.replicas->rank() == 0;
}

}  // namespace

bool is_in_order(const at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  const bool is_view = tensor.is_conj() || tensor.is_neg();
  return segment && is_whole(tensor) && tensor.is_contiguous() && !is_view && !segment->quantisation();
}

std::size_t item_bytes_of(const at::Tensor& tensor) {
  return tensor.nbytes() / std::max<std::size_t>(segment_of(tensor)->elements(), 1);
}

std::vector<Span> spans_of(const StorageSegment& segment, std::size_t item_bytes) {
  const std::uint64_t bytes = segment.elements() * item_bytes;
  const Partition& partition = segment.domain()->partition;
  if (!partition.ranks || !segment.is_shareable()) return {{0, bytes, 0}};
  std::vector<Span> spans;
  const Stripes& stripes = segment.stripes();
  for (std::size_t i = 0, end = 0; i < stripes.own(); i = end) {
    end = std::min(stripes.part_end(i), stripes.own());
    const std::uint64_t begin = stripes.in_tensor(i) * item_bytes;
    spans.push_back({begin, begin + (end - i) * item_bytes, segment.is_partitioned() ? i * item_bytes : begin});
  }
  return spans;
}

at::Tensor bytes_at(std::byte* data, std::size_t bytes, c10::Device device) {
  return at::from_blob(
      data, {static_cast<std::int64_t>(bytes)}, [](void*) {}, at::TensorOptions().dtype(at::kByte).device(device),
      device);
}

void for_each_part(const StorageSegment& segment, std::uint64_t begin, std::uint64_t end,
                   c10::function_ref<void(std::size_t page, std::uint64_t begin, std::size_t bytes)> visit) {
  while (begin < end) {
    const std::size_t page = begin / segment.page_bytes();
    const std::uint64_t page_end = (page + 1) * segment.page_bytes();
    const std::uint64_t part_end = std::min({end, page_end, begin + kPieceBytes});
    visit(page, begin, part_end - begin);
    begin = part_end;
  }
}

std::vector<Part> parts_of(const StorageSegment& segment, const StorageSegment& home, std::size_t item_bytes) {
  std::vector<Part> parts;
  for (const Span& span : spans_of(segment, item_bytes)) {
    for_each_part(home, span.at, span.at + (span.end - span.begin), [&](std::size_t i, std::uint64_t at, auto bytes) {
      parts.push_back({span.begin + (at - span.at), i, at - i * home.page_bytes(), bytes});
    });
  }
  return parts;
}

at::Tensor in_between(const at::Tensor& tensor, c10::ScalarType dtype) {
  const auto* segment = segment_of(tensor);
  if (!segment) return at::empty(tensor.sizes(), at::TensorOptions().dtype(dtype));
  return make_paged(segment->domain(), tensor.sizes(), c10::contiguous_strides(tensor.sizes()),
                    c10::scalarTypeToTypeMeta(dtype), Role::optimizer, {.like = segment});
}

std::vector<Piece> write_memory(const std::byte* data, std::size_t bytes, FileWriter& writer, std::uint64_t offset) {
  std::vector<Piece> pieces;
  for (std::size_t at = 0; at < bytes; at += kPieceBytes) {
    const std::size_t length = std::min(kPieceBytes, bytes - at);
    pieces.push_back({at, length, writer.write(offset + at, {data + at, length})});
  }
  return pieces;
}

PagePin pin_page(StorageSegment& segment, std::size_t page, Access access) {
  while (true) {
    try {
      PagePin pin = segment.cache()->pin_page(segment, page, access);
      pin.wait();
      return pin;
    } catch (const VersionOpen&) {
      segment.settle();
    }
  }
}

bool is_ours_to_write(const StorageSegment& segment) {
  const Partition& partition = segment.domain()->partition;
  if (!is_first_of_replicas(partition)) return false;
  return !partition.ranks || segment.is_shareable() || partition.ranks->rank() == 0;
}

}  // namespace zeropage
