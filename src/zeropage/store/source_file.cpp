#include "zeropage/store/source_file.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

namespace zeropage {
namespace {

struct stat stat_of(const File& file) {
  struct stat info {};
  if (::fstat(file.descriptor(), &info) != 0) {
    throw DiskError(
        fmt::format("{}, the file that contains loaded tensors, can no longer be read: {}; load the model again",
                    file.name(), std::strerror(errno)),
        errno, file.name());
  }
  return info;
}

}  // namespace

SourceFile::SourceFile(const std::string& path) : SourceFile(File::open(path, /*writable=*/false)) {}

SourceFile::SourceFile(File file) : file_(std::move(file)), direct_(file_.reopen_direct(/*writable=*/false)) {
  const struct stat info = stat_of(file_);
  size_ = info.st_size;
  changed_ = info.st_mtim;
}

const File& SourceFile::file_for(std::uint64_t offset, std::size_t bytes) const {
  const bool whole_blocks = offset % kBlockBytes == 0 && bytes % kBlockBytes == 0;
  return direct_ && whole_blocks ? direct_ : file_;
}

void SourceFile::check() const {
  const struct stat info = stat_of(file_);
  const bool same = static_cast<std::uint64_t>(info.st_size) == size_ && info.st_mtim.tv_sec == changed_.tv_sec &&
                    info.st_mtim.tv_nsec == changed_.tv_nsec;
  if (same) return;
  throw DiskError(
      fmt::format("{} was changed while loaded tensors still read from it (it had {}, now {}): their content "
                  "is lost. Load the model again; lazy_load = false copies tensors at loading",
                  file_.name(), format_bytes(size_), format_bytes(info.st_size)),
      ESTALE, file_.name());
}

}  // namespace zeropage
