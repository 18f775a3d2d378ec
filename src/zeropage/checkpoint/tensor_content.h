// A tensor's content as bytes of a file: row after row, in safetensors' order. It is read and written page by page,
// so only a page of it is in memory. Over ranks, each rank handles its own share. The bytes in the file do not depend
// on ranks, tiers, page sizes or masters. Ordinary tensors are written and read in the same way.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zeropage/io/file_reader.h"
#include "zeropage/io/file_writer.h"
#include "zeropage/store/source_file.h"

namespace zeropage {

/// A range of a tensor's content and its CRC-32C. At most FileReader::kMostBytes.
struct Piece {
  std::uint64_t begin;  // bytes, from the tensor's first
  std::uint64_t bytes;
  std::uint32_t crc;
};

/// A file with contents of tensors, open for reading. Tensors on disk go on reading from it.
class ContentFile {
 public:
  ContentFile(Io& io, const std::string& path, std::shared_ptr<FileReader::Blocks> blocks)
      : reader(io, path, std::move(blocks)) {}

  FileReader reader;
  /// The same file, for tensors that read from it later.
  const std::shared_ptr<const SourceFile>& source();

 private:
  std::shared_ptr<const SourceFile> source_;
};

/// A tensor and its place in a file.
struct Placed {
  at::Tensor tensor;
  std::uint64_t offset;  // of its content in the file
};

/// Writes this rank's parts of the tensors in this order, each to [offset, offset + nbytes) of the file. Over ranks,
/// all of them call it: each writes its share of a partitioned tensor, and rank 0 writes the others. Deferred updates
/// run first. Returns the pieces written, by tensor. Throws DiskError, BudgetError, RankError.
std::vector<std::vector<Piece>> write_contents(std::span<const Placed> tensors, FileWriter& writer);

/// The same for one rank that writes the whole tensor alone. Over ranks the others must pin the tensor too, to gather
/// it; it is then in memory as a whole. Throws DiskError, BudgetError, RankError.
std::vector<Piece> write_whole(const at::Tensor& tensor, FileWriter& writer, std::uint64_t offset);

/// Loads the tensor from the file's content at `offset`, of `dtype`. The pieces cover it, in order. If dtypes differ,
/// it is converted, once; a parameter with a master is loaded into the master. Over ranks, all of them call it, and
/// each reads its own parts. Throws DiskError, naming `name`, if a piece is damaged; the tensor is then partly
/// loaded. A page on disk that whole pieces cover is not read: the file becomes its home, until it is written. It is
/// compared with its checksums when it is used. The setting lazy_load = false turns that off.
void read_content(at::Tensor tensor, ContentFile& file, std::uint64_t offset, c10::ScalarType dtype,
                  std::span<const Piece> pieces, const std::string& name);

/// Elements [begin, end) of a tensor. In this rank's share they begin at `at`.
struct OwnRange {
  std::uint64_t begin, end, at;
};
/// This rank's parts of a partitioned tensor; none for others.
std::optional<std::vector<OwnRange>> own_ranges(const at::Tensor& tensor);
/// This rank's share of a partitioned tensor, flat. Deferred updates run first. With `write`, no rank keeps the old
/// whole tensor in memory. All ranks call it. Until the tensor is used again, each rank reads and, with `write`,
/// writes its share as it likes.
at::Tensor own_share(const at::Tensor& tensor, bool write);

}  // namespace zeropage
