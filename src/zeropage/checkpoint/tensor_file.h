// Files of tensors, as checkpoints are made of: one is created with its size, and filled by all ranks, each with what
// it has. What lies where is the caller's to say.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "zeropage/checkpoint/tensor_content.h"

namespace zeropage {

class TensorFileWriter {
 public:
  /// A new file of `bytes`, whose space the disk has given, or, if `bytes` is 0, one that another rank has made.
  /// Throws DiskError.
  TensorFileWriter(const std::string& path, std::uint64_t bytes);

  void write_bytes(std::uint64_t offset, std::span<const std::byte> data) { writer_.write(offset, data); }
  std::vector<std::vector<Piece>> write(std::span<const Placed> tensors) { return write_contents(tensors, writer_); }
  std::vector<Piece> write_whole(const at::Tensor& tensor, std::uint64_t offset) {
    return zeropage::write_whole(tensor, writer_, offset);
  }
  /// Returns when all is on the disk: it survives a crash of the machine.
  void finish() { writer_.finish(); }

 private:
  const File file_;
  const std::unique_ptr<Io> io_ = make_io();
  FileWriter writer_{*io_, file_};
};

class TensorFileReader {
 public:
  explicit TensorFileReader(const std::string& path) : reader_(*io_, path) {}
  void read(const at::Tensor& tensor, std::uint64_t offset, c10::ScalarType dtype, std::span<const Piece> pieces,
            const std::string& name) {
    read_content(tensor, reader_, offset, dtype, pieces, name);
  }
  std::uint64_t size() const { return reader_.size(); }

 private:
  const std::unique_ptr<Io> io_ = make_io();
  FileReader reader_;
};

}  // namespace zeropage
