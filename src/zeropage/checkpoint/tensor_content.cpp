#include "zeropage/checkpoint/tensor_content.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/FunctionRef.h>
#include <fmt/format.h>

#include <algorithm>

#include "zeropage/base/errors.h"
#include "zeropage/io/checksum.h"
#include "zeropage/rules/call.h"
#include "zeropage/rules/mixed.h"

namespace zeropage {
namespace {

constexpr std::size_t kPieceBytes = FileReader::kMostBytes;

/// What this rank has of a tensor: consecutive bytes of it, that are consecutive in a segment too.
struct Span {
  std::uint64_t begin, end;  // bytes, in the tensor
  std::uint64_t at;          // where it begins in the segment
};

/// Whether the segment's bytes, in order, are the tensor's.
bool is_in_order(const at::Tensor& tensor) {
  const auto* segment = segment_of(tensor);
  const bool is_view = tensor.is_conj() || tensor.is_neg();
  return segment && is_whole(tensor) && tensor.is_contiguous() && !is_view && !segment->quantisation();
}

bool is_first_of_replicas(const Partition& partition) {
  return !partition.replicas || partition.replicas->rank() == 0;
}

/// Of the segment's elements, which a tensor over it may see as another dtype.
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

/// Announces that the segment is gone through now, so that its pages are read ahead.
void announce(StorageSegment& segment, Access access) {
  const PinRequest request{&segment, access};
  segment.cache()->announce({&request, 1});
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

/// Cuts [begin, end) of the segment's bytes where its pages end, and into at most kPieceBytes.
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

/// A part of a segment that is written: at most a page, and at most kPieceBytes.
struct Part {
  std::uint64_t begin;  // bytes, in the tensor
  std::size_t page;
  std::size_t in_page;
  std::size_t bytes;
};

std::vector<Part> parts_of(const StorageSegment& segment, const StorageSegment& home, std::size_t item_bytes) {
  std::vector<Part> parts;
  for (const Span& span : spans_of(segment, item_bytes)) {
    for_each_part(home, span.at, span.at + (span.end - span.begin), [&](std::size_t i, std::uint64_t at, auto bytes) {
      parts.push_back({span.begin + (at - span.at), i, at - i * home.page_bytes(), bytes});
    });
  }
  return parts;
}

/// Writes the parts of segments one after another. Pages that are on disk alone are read past the cache, some ahead:
/// nothing that operators use has to leave memory.
class SegmentWriter {
 public:
  explicit SegmentWriter(FileWriter& writer) : writer_(writer), ahead_(kAhead) {}

  void add(StorageSegment& segment, std::size_t item_bytes, std::uint64_t offset, std::vector<Piece>& pieces) {
    segment.complete();
    if (segment.is_partitioned()) segment.open_share(Access::read);
    StorageSegment& home = segment.at_home();
    const std::vector<Part> parts = parts_of(segment, home, item_bytes);
    for (auto part = parts.begin(); part != parts.end();) {
      const auto end = std::find_if(part, parts.end(), [&](const Part& other) { return other.page != part->page; });
      if (waiting_ == kAhead) write_oldest();
      Ahead& next = ahead_[(oldest_ + waiting_++) % kAhead];
      next = {std::move(next.memory), {}, &home, {part, end}, offset, &pieces};
      if (home.bytes_of(part->page) <= kPieceBytes) {
        if (!next.memory) next.memory = make_buffer(kPieceBytes);
        next.read = home.cache()->read_home(home, part->page, next.memory.get());
      }
      part = end;
    }
  }

  void finish() {
    while (waiting_ > 0) write_oldest();
  }

 private:
  static constexpr std::size_t kAhead = 3;
  struct Ahead {
    Buffer memory;  // lives longer than the read
    HomeRead read;
    StorageSegment* home = nullptr;
    std::vector<Part> parts;   // of one page
    std::uint64_t offset = 0;  // of the tensor, in the file
    std::vector<Piece>* pieces = nullptr;
  };

  void write_oldest() {
    Ahead& ahead = ahead_[oldest_];
    oldest_ = (oldest_ + 1) % kAhead;
    --waiting_;
    if (ahead.read && ahead.read.wait()) return write(ahead, ahead.memory.get());
    PagePin page = pin_page(*ahead.home, ahead.parts[0].page, Access::read);
    page.will_not_reuse();
    const c10::Device device = ahead.home->domain()->device;
    if (device.is_cpu()) return write(ahead, page.data());
    const at::Tensor on_host = bytes_at(page.data(), ahead.home->bytes_of(ahead.parts[0].page), device).cpu();
    write(ahead, static_cast<const std::byte*>(on_host.const_data_ptr()));
  }

  void write(const Ahead& ahead, const std::byte* page) {
    for (const Part& part : ahead.parts) {
      const std::uint32_t crc = writer_.write(ahead.offset + part.begin, {page + part.in_page, part.bytes});
      ahead.pieces->push_back({part.begin, part.bytes, crc});
    }
  }

  FileWriter& writer_;
  std::vector<Ahead> ahead_;
  std::size_t oldest_ = 0, waiting_ = 0;
};

/// Whether this rank writes what it has of the segment: what all ranks have alike, one of them does.
bool is_ours_to_write(const StorageSegment& segment) {
  const Partition& partition = segment.domain()->partition;
  if (!is_first_of_replicas(partition)) return false;
  return !partition.ranks || segment.is_shareable() || partition.ranks->rank() == 0;
}

std::vector<Piece> write_memory(const std::byte* data, std::size_t bytes, FileWriter& writer, std::uint64_t offset) {
  std::vector<Piece> pieces;
  for (std::size_t at = 0; at < bytes; at += kPieceBytes) {
    const std::size_t length = std::min(kPieceBytes, bytes - at);
    pieces.push_back({at, length, writer.write(offset + at, {data + at, length})});
  }
  return pieces;
}

/// A tensor of the same shape, paged where `tensor` is, that is to be converted or laid out otherwise.
at::Tensor in_between(const at::Tensor& tensor, c10::ScalarType dtype) {
  const auto* segment = segment_of(tensor);
  if (!segment) return at::empty(tensor.sizes(), at::TensorOptions().dtype(dtype));
  return make_paged(segment->domain(), tensor.sizes(), c10::contiguous_strides(tensor.sizes()),
                    c10::scalarTypeToTypeMeta(dtype), Role::optimizer);
}

/// Checks pieces and hands out those parts of them that lie in `spans`.
void read_spans(FileReader& reader, std::uint64_t offset, std::span<const Piece> pieces, std::vector<Span> spans,
                const std::string& name,
                c10::function_ref<void(std::uint64_t at, std::span<const std::byte>)> visit) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  std::vector<FileReader::Range> ranges;
  std::vector<const Piece*> wanted;
  std::uint64_t covered = 0;
  std::size_t first = 0;  // of the spans, that does not end before the piece
  for (const Piece& piece : pieces) {
    if (piece.begin != covered || piece.bytes == 0 || piece.bytes > kPieceBytes) {
      throw DiskError(
          fmt::format("the list of what {} has of \"{}\" is damaged at byte {}", reader.name(), name, covered));
    }
    covered += piece.bytes;
    while (first < spans.size() && spans[first].end <= piece.begin) ++first;
    if (first == spans.size() || spans[first].begin >= covered) continue;
    ranges.push_back({offset + piece.begin, piece.bytes});
    wanted.push_back(&piece);
  }
  if (!spans.empty() && covered < spans.back().end) {
    throw DiskError(fmt::format("{} has only {} of \"{}\"'s {} bytes: it was not written whole", reader.name(),
                                covered, name, spans.back().end));
  }
  first = 0;
  reader.read(ranges, [&](std::size_t index, std::span<const std::byte> data) {
    const Piece& piece = *wanted[index];
    if (crc32c(0, data) != piece.crc) {
      throw DiskError(
          fmt::format("\"{}\" is damaged: bytes {} to {} of {} are not what was written; load another "
                      "checkpoint",
                      name, offset + piece.begin, offset + piece.begin + piece.bytes, reader.name()));
    }
    const std::uint64_t end = piece.begin + piece.bytes;
    while (first < spans.size() && spans[first].end <= piece.begin) ++first;
    for (std::size_t i = first; i < spans.size() && spans[i].begin < end; ++i) {
      const std::uint64_t from = std::max(spans[i].begin, piece.begin), to = std::min(spans[i].end, end);
      visit(spans[i].at + (from - spans[i].begin), data.subspan(from - piece.begin, to - from));
    }
  });
}

void read_segment(StorageSegment& segment, std::size_t item_bytes, FileReader& reader, std::uint64_t offset,
                  std::span<const Piece> pieces, const std::string& name) {
  segment.complete();
  if (segment.is_shareable()) segment.open_share(Access::overwrite);
  StorageSegment& home = segment.at_home();
  announce(home, Access::overwrite);
  const c10::Device device = segment.domain()->device;
  const bool is_apart = home.cache()->has_separate_memory() && !device.is_cpu();
  std::vector<Span> spans = spans_of(segment, item_bytes);
  read_spans(reader, offset, pieces, std::move(spans), name, [&](std::uint64_t at, std::span<const std::byte> data) {
    for_each_part(home, at, at + data.size(), [&](std::size_t i, std::uint64_t begin, std::size_t bytes) {
      const bool all = begin == i * home.page_bytes() && bytes == home.bytes_of(i);
      PagePin page = pin_page(home, i, all ? Access::overwrite : Access::write);
      const std::byte* from = data.data() + (begin - at);
      std::byte* into = page.data() + (begin - i * home.page_bytes());
      if (is_apart) {
        bytes_at(into, bytes, device).copy_(bytes_at(const_cast<std::byte*>(from), bytes, c10::kCPU));
      } else {
        page.fill(from, bytes, begin - i * home.page_bytes());
      }
    });
  });
}

}  // namespace

std::vector<std::vector<Piece>> write_contents(std::span<const Placed> tensors, FileWriter& writer) {
  c10::NoGradGuard no_grad;
  std::vector<std::vector<Piece>> pieces(tensors.size());
  std::vector<at::Tensor> copies;  // live until they are written
  SegmentWriter segments(writer);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& [tensor, offset] = tensors[i];
    if (!segment_of(tensor)) {
      segments.finish();  // in order: what follows what is written together
      const at::Tensor on_host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous();
      pieces[i] =
          write_memory(static_cast<const std::byte*>(on_host.const_data_ptr()), on_host.nbytes(), writer, offset);
      continue;
    }
    at::Tensor ordered = tensor;
    if (!is_in_order(tensor)) {
      copies.push_back(ordered = in_between(tensor, tensor.scalar_type()));
      ordered.copy_(tensor);
    }
    StorageSegment& segment = *segment_of(ordered);
    c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKey);
    if (is_ours_to_write(segment)) segments.add(segment, item_bytes_of(ordered), offset, pieces[i]);
  }
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKey);
  segments.finish();
  return pieces;
}

std::vector<Piece> write_whole(const at::Tensor& tensor, FileWriter& writer, std::uint64_t offset) {
  auto* segment = segment_of(tensor);
  if (!segment || !segment->domain()->partition.ranks) {
    const Placed placed{tensor, offset};
    return write_contents({&placed, 1}, writer)[0];
  }
  const PinRequest request{segment, Access::read};
  const TensorPin pin(request);
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKey);
  const at::Tensor on_host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous();
  return write_memory(static_cast<const std::byte*>(on_host.const_data_ptr()), on_host.nbytes(), writer, offset);
}

void read_content(at::Tensor tensor, FileReader& reader, std::uint64_t offset, c10::ScalarType dtype,
                  std::span<const Piece> pieces, const std::string& name) {
  c10::NoGradGuard no_grad;
  const at::Tensor master = stored_master(tensor);
  const at::Tensor& stored = master.defined() ? master : tensor;
  const bool has_other = segment_of(tensor) && segment_of(tensor)->master().defined() && !master.defined();
  if (!has_other && is_in_order(stored) && stored.scalar_type() == dtype) {
    {
      c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKey);
      read_segment(*segment_of(stored), item_bytes_of(stored), reader, offset, pieces, name);
    }
    if (master.defined()) follow_master(*segment_of(tensor));
    bump_version(tensor);
    return;
  }
  at::Tensor content = in_between(tensor, dtype);
  if (segment_of(content)) {
    c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKey);
    read_segment(*segment_of(content), item_bytes_of(content), reader, offset, pieces, name);
  } else {
    const std::vector<Span> all{{0, content.nbytes(), 0}};
    auto* const data = static_cast<std::byte*>(content.mutable_data_ptr());
    read_spans(reader, offset, pieces, all, name, [&](std::uint64_t at, std::span<const std::byte> bytes) {
      std::copy(bytes.begin(), bytes.end(), data + at);
    });
  }
  tensor.copy_(content);
}

std::optional<std::vector<OwnRange>> own_ranges(const at::Tensor& tensor) {
  auto* segment = segment_of(tensor);
  if (!segment || !is_in_order(tensor) || item_bytes_of(tensor) != tensor.itemsize()) return std::nullopt;
  segment->complete();
  if (!segment->is_partitioned()) return std::nullopt;
  std::vector<OwnRange> ranges;
  const std::size_t item_bytes = tensor.itemsize();
  for (const Span& span : spans_of(*segment, item_bytes)) {
    ranges.push_back({span.begin / item_bytes, span.end / item_bytes, span.at / item_bytes});
  }
  return ranges;
}

at::Tensor own_share(const at::Tensor& tensor, bool write) {
  auto* segment = segment_of(tensor);
  if (!segment || !segment->is_partitioned()) throw AccessError("only a tensor that is partitioned has shares");
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKey);
  segment->open_share(write ? Access::write : Access::read);
  return segment->share();
}

}  // namespace zeropage
