// Files of tensors, for checkpoints. A file is created with its full size, and all ranks fill it, each with its
// parts. The caller decides the layout.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zeropage/checkpoint/tensor_content.h"

namespace zeropage {

class TensorFileWriter {
 public:
  /// Creates a file of `bytes` and allocates its disk space; if `bytes` is 0, opens one that another rank has made.
  /// Throws DiskError.
  TensorFileWriter(const std::string& path, std::uint64_t bytes);

  void write_bytes(std::uint64_t offset, std::span<const std::byte> data) { writer_.write(offset, data); }
  std::vector<std::vector<Piece>> write(std::span<const Placed> tensors) { return write_contents(tensors, writer_); }
  std::vector<Piece> write_whole(const at::Tensor& tensor, std::uint64_t offset) {
    return zeropage::write_whole(tensor, writer_, offset);
  }
  /// Returns when all has been written.
  void flush() { writer_.flush(); }
  /// Returns when all is on the disk and survives a crash of the machine.
  void finish() { writer_.finish(); }

 private:
  const File file_;
  const std::unique_ptr<Io> io_ = make_io();
  FileWriter writer_{*io_, file_};
};

/// Reads the files of one folder, with one file's buffers.
class TensorFolderReader {
 public:
  explicit TensorFolderReader(std::string folder) : folder_(std::move(folder)) {}
  /// read_content() from the file of that name.
  void read(const std::string& file, const at::Tensor& tensor, std::uint64_t offset, c10::ScalarType dtype,
            std::span<const Piece> pieces, const std::string& name);

 private:
  const std::string folder_;
  const std::unique_ptr<Io> io_ = make_io();
  const std::shared_ptr<FileReader::Blocks> blocks_ = FileReader::make_blocks();
  std::map<std::string, FileReader> files_;
};

}  // namespace zeropage
