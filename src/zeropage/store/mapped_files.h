// Finds the file behind mapped memory, such as safetensors that a loader maps. Its bytes then have a home without a
// copy.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "zeropage/store/source_file.h"

namespace zeropage {

class MappedFiles {
 public:
  /// The file range of the memory's bytes. The memory must be a private or read-only mapping of a file that can be
  /// opened by its name, and this process must not have written to it. Otherwise returns none, and the caller copies.
  /// Never throws.
  SourceRange find(const void* data, std::size_t bytes) noexcept;

 private:
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<const SourceFile>> known_;  // by the system's identity of the mapped file
};

}  // namespace zeropage
