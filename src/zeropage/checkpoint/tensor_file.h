// Files of tensors, for checkpoints. A file is created with its full size, and all ranks fill it, each with its
// parts. It is no format: the caller chooses offsets, and stores names, dtypes and shapes. Only pages of a
// tensor are in memory, whatever its size.
//
// A program saves like this: compute offsets; make a writer; write(); keep the pieces; finish(). It loads by read(),
// with the offsets and the pieces. One thread uses a writer or a reader. Over ranks, all call them together.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zeropage/checkpoint/tensor_content.h"

namespace zeropage {

/// Fills one file. Writes go past the page cache. Their errors may come with a later call.
class TensorFileWriter {
 public:
  /// Creates a file of `bytes` and allocates its disk space; if `bytes` is 0, opens one that another rank has made.
  /// Throws DiskError.
  TensorFileWriter(const std::string& path, std::uint64_t bytes);

  /// Writes bytes of the caller's, such as a header. They may overlap no tensor. Throws DiskError.
  void write_bytes(std::uint64_t offset, std::span<const std::byte> data) { writer_.write(offset, data); }
  /// Writes this rank's parts of the tensors, as write_contents() does. Throws DiskError, BudgetError, RankError.
  std::vector<std::vector<Piece>> write(std::span<const Placed> tensors) { return write_contents(tensors, writer_); }
  /// Writes the whole tensor from this rank alone, as zeropage::write_whole() does. Throws the same.
  std::vector<Piece> write_whole(const at::Tensor& tensor, std::uint64_t offset) {
    return zeropage::write_whole(tensor, writer_, offset);
  }
  /// Returns when all has been written. Throws DiskError.
  void flush() { writer_.flush(); }
  /// Returns when all is on the disk and survives a crash of the machine. Throws DiskError.
  void finish() { writer_.finish(); }

 private:
  const File file_;
  const std::unique_ptr<Io> io_ = make_io();
  FileWriter writer_{*io_, file_};
};

/// Reads the files of one folder, with one file's buffers. Files are opened at their first use and stay open.
class TensorFolderReader {
 public:
  explicit TensorFolderReader(std::string folder) : folder_(std::move(folder)) {}
  /// Loads the tensor from the file of that name, as read_content() does. Throws DiskError if the file is missing or
  /// damaged, BudgetError, RankError. After an error the tensor may be partly loaded.
  void read(const std::string& file, const at::Tensor& tensor, std::uint64_t offset, c10::ScalarType dtype,
            std::span<const Piece> pieces, const std::string& name);

 private:
  const std::string folder_;
  const std::unique_ptr<Io> io_ = make_io();
  const std::shared_ptr<FileReader::Blocks> blocks_ = FileReader::make_blocks();
  std::map<std::string, ContentFile> files_;
};

}  // namespace zeropage
