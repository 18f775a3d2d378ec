#include "zeropage/store/file_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"

namespace zeropage {
namespace {

std::atomic<int> alive_now = 0;

[[noreturn]] void fail(const char* what, const std::string& folder, std::size_t bytes, int code) {
  throw DiskError(fmt::format("{} of an archive's tensor cannot be {} in \"{}\": {}", format_bytes(bytes), what,
                              folder, std::strerror(code)),
                  code, folder);
}

}  // namespace

FileMemory::FileMemory(const std::string& folder, std::size_t bytes) : folder_(folder), bytes_(bytes) {
  file_ = ::open(folder.c_str(), O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (file_ < 0) fail("placed", folder_, bytes_, errno);
  void* address = MAP_FAILED;
  if (::ftruncate(file_, static_cast<off_t>(bytes)) == 0) {
    address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  }
  if (address == MAP_FAILED) {
    const int code = errno;
    ::close(file_);
    fail("placed", folder_, bytes_, code);
  }
  address_ = address;
  ++alive_now;
}

FileMemory::~FileMemory() {
  ::munmap(address_, bytes_);
  ::close(file_);
  --alive_now;
}

void FileMemory::write(std::size_t offset, const void* data, std::size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::pwrite(file_, from, bytes, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail("written", folder_, bytes, written < 0 ? errno : ENOSPC);
    from += written;
    offset += static_cast<std::size_t>(written);
    bytes -= static_cast<std::size_t>(written);
  }
}

void FileMemory::leave_memory() noexcept { ::madvise(address_, bytes_, MADV_DONTNEED); }

int FileMemory::alive() { return alive_now; }

}  // namespace zeropage
