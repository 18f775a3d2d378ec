// Which file memory is mapped from, as loaders map safetensors: then its bytes need not be copied to have a home.
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
  /// Where in a file the memory's bytes lie, if it is a private or read-only mapping of one that can be opened by its
  /// name, and of which this process has written nothing; else none. Never throws: what is not found is copied.
  SourceRange find(const void* data, std::size_t bytes) noexcept;

 private:
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<const SourceFile>> known_;  // by what the system calls the mapped file
};

}  // namespace zeropage
