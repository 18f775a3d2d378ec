#include "zeropage/checkpoint/tensor_content.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/FunctionRef.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>

#include "zeropage/base/errors.h"
#include "zeropage/checkpoint/segment_parts.h"
#include "zeropage/io/checksum.h"
#include "zeropage/rules/call.h"
#include "zeropage/rules/mixed.h"

namespace zeropage {
namespace {

/// Announces a stream over the segment, so that its pages are read ahead.
void announce(StorageSegment& segment, Access access) {
  const PinRequest request{&segment, access};
  segment.cache()->announce({&request, 1});
}

/// Writes the parts of segments one after another. Pages that are only on disk are read past the cache, some ahead,
/// so that no page of an operator has to leave memory.
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
    Buffer memory;  // outlives the read
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

/// Checks pieces and passes on the parts of them that are in `spans`.
void read_spans(FileReader& reader, std::uint64_t offset, std::span<const Piece> pieces, std::vector<Span> spans,
                const std::string& name,
                c10::function_ref<void(std::uint64_t at, std::span<const std::byte>)> visit) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  std::vector<FileReader::Range> ranges;
  std::vector<const Piece*> wanted;
  std::size_t first = 0;  // the first span that does not end before the piece
  for (const Piece& piece : pieces) {
    while (first < spans.size() && spans[first].end <= piece.begin) ++first;
    if (first == spans.size() || spans[first].begin >= piece.begin + piece.bytes) continue;
    ranges.push_back({offset + piece.begin, piece.bytes});
    wanted.push_back(&piece);
  }
  first = 0;
  reader.read(ranges, [&](std::size_t index, std::span<const std::byte> data) {
    const Piece& piece = *wanted[index];
    if (crc32c(0, data) != piece.crc) {
      throw DiskError(fmt::format("\"{}\" is damaged: bytes {} to {} of {} are not what was written; load another "
                                  "checkpoint",
                                  name, offset + piece.begin, offset + piece.begin + piece.bytes, reader.name()),
                      EIO, reader.name());
    }
    const std::uint64_t end = piece.begin + piece.bytes;
    while (first < spans.size() && spans[first].end <= piece.begin) ++first;
    for (std::size_t i = first; i < spans.size() && spans[i].begin < end; ++i) {
      const std::uint64_t from = std::max(spans[i].begin, piece.begin), to = std::min(spans[i].end, end);
      visit(spans[i].at + (from - spans[i].begin), data.subspan(from - piece.begin, to - from));
    }
  });
}

/// Throws DiskError unless the pieces cover bytes [0, bytes), in order.
void check_pieces(std::span<const Piece> pieces, std::uint64_t bytes, const FileReader& reader,
                  const std::string& name) {
  std::uint64_t covered = 0;
  for (const Piece& piece : pieces) {
    if (piece.begin != covered || piece.bytes == 0 || piece.bytes > kPieceBytes) {
      throw DiskError(
          fmt::format("{}: the list of the pieces of \"{}\" is damaged at byte {}", reader.name(), name, covered),
          EIO, reader.name());
    }
    covered += piece.bytes;
  }
  if (covered < bytes) {
    throw DiskError(fmt::format("{} has only {} of \"{}\"'s {} bytes: it was not written whole", reader.name(),
                                covered, name, bytes),
                    EIO, reader.name());
  }
}

/// Makes the file the home of each page that whole pieces cover. Returns the spans of the other pages.
std::vector<Span> map_segment(StorageSegment& segment, ContentFile& file, std::uint64_t offset,
                              std::span<const Piece> pieces, const std::string& name) {
  std::vector<Span> rest{{0, segment.bytes(), 0}};
  const Domain& domain = *segment.domain();
  if (segment.tier() != Tier::disk || !domain.homes_in_files || domain.planned_on) return rest;
  if (offset + segment.bytes() > file.reader.size()) return rest;
  const auto tensor = std::make_shared<const std::string>(name);
  std::vector<SlotRef> slots(segment.pages());
  std::vector<Span> unmapped;
  auto piece = pieces.begin();
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::uint64_t begin = i * segment.page_bytes(), end = begin + segment.bytes_of(i);
    while (piece != pieces.end() && piece->begin < begin) ++piece;
    const auto first = piece;
    std::vector<Checksum> checksums;
    std::uint64_t covered = begin;
    for (; piece != pieces.end() && piece->begin == covered && covered + piece->bytes <= end; ++piece) {
      checksums.push_back({piece->bytes, piece->crc});
      covered += piece->bytes;
    }
    if (covered == end) {
      slots[i] =
          std::make_shared<Slot>(SourceRange{file.source(), offset + begin}, Expected{tensor, std::move(checksums)});
    } else {
      unmapped.push_back({begin, end, begin});
      piece = first;
    }
  }
  return segment.cache()->map(segment, slots) ? unmapped : rest;
}

void read_segment(StorageSegment& segment, std::size_t item_bytes, ContentFile& file, std::uint64_t offset,
                  std::span<const Piece> pieces, const std::string& name) {
  segment.complete();
  if (segment.is_shareable()) segment.open_share(Access::overwrite);
  StorageSegment& home = segment.at_home();
  std::vector<Span> spans = spans_of(segment, item_bytes);
  check_pieces(pieces, spans.empty() ? 0 : std::ranges::max(spans, {}, &Span::end).end, file.reader, name);
  if (!segment.domain()->partition.ranks) spans = map_segment(home, file, offset, pieces, name);
  if (spans.empty()) return;
  announce(home, Access::overwrite);
  const c10::Device device = segment.domain()->device;
  const bool is_apart = home.cache()->has_separate_memory() && !device.is_cpu();
  read_spans(file.reader, offset, pieces, std::move(spans), name,
             [&](std::uint64_t at, std::span<const std::byte> data) {
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

const std::shared_ptr<const SourceFile>& ContentFile::source() {
  if (!source_) source_ = std::make_shared<const SourceFile>(reader.file().duplicate());
  return source_;
}

std::vector<std::vector<Piece>> write_contents(std::span<const Placed> tensors, FileWriter& writer) {
  c10::NoGradGuard no_grad;
  std::vector<std::vector<Piece>> pieces(tensors.size());
  std::vector<at::Tensor> copies;  // live until they are written
  SegmentWriter segments(writer);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& [tensor, offset] = tensors[i];
    if (!segment_of(tensor)) {
      segments.finish();  // keeps the order: the writer joins what is consecutive
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
    c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
    if (is_ours_to_write(segment)) segments.add(segment, item_bytes_of(ordered), offset, pieces[i]);
  }
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
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
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  const at::Tensor on_host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous();
  return write_memory(static_cast<const std::byte*>(on_host.const_data_ptr()), on_host.nbytes(), writer, offset);
}

void read_content(at::Tensor tensor, ContentFile& file, std::uint64_t offset, c10::ScalarType dtype,
                  std::span<const Piece> pieces, const std::string& name) {
  c10::NoGradGuard no_grad;
  const at::Tensor master = stored_master(tensor);
  const at::Tensor& stored = master.defined() ? master : tensor;
  const bool has_other = segment_of(tensor) && segment_of(tensor)->master().defined() && !master.defined();
  if (!has_other && is_in_order(stored) && stored.scalar_type() == dtype) {
    {
      c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
      read_segment(*segment_of(stored), item_bytes_of(stored), file, offset, pieces, name);
    }
    if (master.defined()) follow_master(*segment_of(tensor));
    bump_version(tensor);
    return;
  }
  at::Tensor content = in_between(tensor, dtype);
  if (segment_of(content)) {
    c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
    read_segment(*segment_of(content), item_bytes_of(content), file, offset, pieces, name);
  } else {
    const std::vector<Span> all{{0, content.nbytes(), 0}};
    auto* const data = static_cast<std::byte*>(content.mutable_data_ptr());
    check_pieces(pieces, content.nbytes(), file.reader, name);
    read_spans(file.reader, offset, pieces, all, name, [&](std::uint64_t at, std::span<const std::byte> bytes) {
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
  c10::impl::ExcludeDispatchKeyGuard ordinary(kPagedKeys);
  segment->open_share(write ? Access::write : Access::read);
  return segment->share();
}

}  // namespace zeropage
