// The layout of checkpoint files: safetensors (https://github.com/huggingface/safetensors#format), with tensors at
// multiples of 4 KiB, in shards of at most 4 GiB. It equals that of Python's _safetensors.py. Private to checkpoint/.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zeropage {

/// A tensor to save.
struct Source {
  std::string name;
  at::Tensor tensor;
  bool precise = false;  // save its master

  c10::ScalarType dtype() const;
  std::size_t bytes() const;
};

struct FileLayout {
  struct Entry {
    Source source;
    std::uint64_t offset;  // in the file
  };
  std::string name;    // of the file
  std::string header;  // its first bytes
  std::vector<Entry> entries;
  std::uint64_t size = 0;  // bytes of the file
};

/// The files of one part of a checkpoint, such as "model". Throws Error for a dtype that safetensors lacks.
std::vector<FileLayout> files_of(const std::string& part, const std::vector<Source>& sources);

/// "float32", as in torch.float32.
std::string_view name_of_dtype(c10::ScalarType dtype);
/// The reverse. Throws Error for an unknown name.
c10::ScalarType dtype_named(std::string_view name);

}  // namespace zeropage
