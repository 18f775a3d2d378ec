// A checkpoint folder that is open for reading. Private to checkpoint/.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <exception>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "zeropage/checkpoint/manifest.h"
#include "zeropage/checkpoint/tensor_file.h"

namespace zeropage {

/// A tensor in a checkpoint.
struct Stored {
  std::string name, file;
  c10::ScalarType dtype;
  std::vector<std::int64_t> sizes;
  std::uint64_t offset;
  std::vector<Piece> pieces;
};

class Checkpoint {
 public:
  /// Reads the manifest, and compares the other files with it. Throws DiskError, Error.
  explicit Checkpoint(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  const Json& body() const { return manifest_.body; }
  /// Names of tied tensors, and the names that they are written under.
  const std::map<std::string, std::string>& aliases() const { return aliases_; }
  /// Names of the tensors of a part: "model", "master", "optimizer" or "state".
  std::set<std::string> names(const std::string& part) const;
  /// Null: there is none.
  const Stored* find(const std::string& part, const std::string& name) const;
  /// Bytes of all files of tensors.
  std::uint64_t size() const { return size_; }

  /// Reads a tensor into one of the same shape. After an error it goes on, because all ranks must make and gather the
  /// same tensors; raise() throws the first error.
  void read(const Stored& stored, const at::Tensor& into);
  at::Tensor read(const Stored& stored);
  /// Runs `work`, and keeps its error for raise().
  void keep(c10::function_ref<void()> work);
  void raise() const;

 private:
  [[noreturn]] void fail(const std::string& file, const std::string& what) const;
  void check_file(const std::string& name, const Json& listed);
  void check_other(const std::string& name, std::uint64_t crc) const;
  void add_tensors(const std::string& file, const Json& tensors);

  const std::filesystem::path path_;
  const Manifest manifest_;
  TensorFolderReader reader_;
  std::map<std::pair<std::string, std::string>, Stored> stored_;  // by part and name
  std::map<std::string, std::string> aliases_;
  std::uint64_t size_ = 0;
  std::exception_ptr failure_;
};

}  // namespace zeropage
