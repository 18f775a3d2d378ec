#include "zeropage/store/mapped_files.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/utsname.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <vector>

#include "forbidden_calls.h"
#include "forked_child.h"
#include "temporary_directory.h"
#include "zeropage/base/units.h"

using namespace zeropage;

namespace {

constexpr std::size_t kPage = kBlockBytes;

File file_of(const std::string& path, char content) {
  File file = File::create(path, 8 * kPage);
  const std::vector<std::byte> bytes(8 * kPage, static_cast<std::byte>(content));
  file.write(0, bytes.data(), bytes.size());
  return file;
}

/// A mapping of two pages of a file, from its third on. In place of what is at `at`, if that is given.
const std::byte* map(const File& file, int flags = MAP_PRIVATE, int rights = PROT_READ, const void* at = nullptr) {
  void* const mapped =
      ::mmap(const_cast<void*>(at), 2 * kPage, rights, flags | (at ? MAP_FIXED : 0), file.descriptor(), 2 * kPage);
  return mapped == MAP_FAILED ? nullptr : static_cast<const std::byte*>(mapped);
}

}  // namespace

TEST_CASE("the file behind a mapping is found, though another has its name or its place by then") {
  TemporaryDirectory directory;
  const std::string path = directory.path() + "/a file";
  MappedFiles files;
  const File first = file_of(path, 1);
  const std::byte* const at = map(first);
  REQUIRE(at);
  const SourceRange found = files.find(at + 5, kPage);
  REQUIRE(found);
  CHECK(found.offset == 2 * kPage + 5);
  CHECK(found.file->name() == path);
  CHECK(files.find(at, 2 * kPage).file == found.file);
  CHECK_FALSE(files.find(at, 2 * kPage + 1));
  // Another file with the same name, at the same address.
  std::filesystem::remove(path);
  const File second = file_of(path, 2);
  CHECK(files.find(at, kPage).file == found.file);
  REQUIRE(map(second, MAP_PRIVATE, PROT_READ, at) == at);
  const SourceRange other = files.find(at, kPage);
  REQUIRE(other);
  CHECK(other.file != found.file);
  std::byte byte{};
  other.file->file_for(other.offset, 1).read(other.offset, &byte, 1);
  CHECK(byte == std::byte{2});
  ::munmap(const_cast<std::byte*>(at), 2 * kPage);
}

TEST_CASE("memory that is no file's, or differs from it, has none") {
  TemporaryDirectory directory;
  MappedFiles files;
  const std::vector<std::byte> plain(kPage);
  CHECK_FALSE(files.find(plain.data(), kPage));
  CHECK_FALSE(files.find(nullptr, 1));
  const File file = file_of(directory.path() + "/file", 1);
  for (const int flags : {MAP_PRIVATE, MAP_SHARED}) {
    CAPTURE(flags);
    const std::byte* const at = map(file, flags, PROT_READ | PROT_WRITE);
    REQUIRE(at);
    CHECK(static_cast<bool>(files.find(at, kPage)) == (flags == MAP_PRIVATE));
    const_cast<std::byte&>(at[kPage]) = std::byte{3};
    CHECK(static_cast<bool>(files.find(at, kPage)) == (flags == MAP_PRIVATE));
    CHECK_FALSE(files.find(at, 2 * kPage));
    ::munmap(const_cast<std::byte*>(at), 2 * kPage);
  }
}

#ifndef __SANITIZE_THREAD__  // which has threads of its own in a forked child
TEST_CASE("a file is found where the kernel cannot be asked for one mapping") {
  TemporaryDirectory directory;
  const File file = file_of(directory.path() + "/a file", 1);
  const int wrong = in_forked_child([&] {
    if (!forbid(__NR_ioctl)) return 0;
    MappedFiles files;
    const SourceRange found = files.find(map(file), kPage);
    const std::vector<std::byte> plain(kPage);
    if (files.find(plain.data(), kPage)) return 1;
    return found && found.offset == 2 * kPage && found.file->name() == file.name() ? 0 : 2;
  });
  CHECK(wrong == 0);
}
#endif

TEST_CASE("a file is found in no more time among thousands of mappings") {
  utsname system{};
  int version[2] = {};
  if (::uname(&system) != 0 || std::sscanf(system.release, "%d.%d", &version[0], &version[1]) != 2) return;
  if (version[0] < 6 || (version[0] == 6 && version[1] < 11)) return;  // it cannot ask for one mapping
  TemporaryDirectory directory;
  MappedFiles files;
  const File file = file_of(directory.path() + "/file", 1);
  constexpr std::size_t kMappings = 20'000;
  auto* const many = static_cast<std::byte*>(
      ::mmap(nullptr, kMappings * kPage, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (std::size_t i = 0; i < kMappings; i += 2) ::mprotect(many + i * kPage, kPage, PROT_NONE);
  const std::byte* const at = map(file);
  const auto begin = std::chrono::steady_clock::now();
  std::size_t found = 0;
  for (int i = 0; i < 100; ++i) found += static_cast<bool>(files.find(at, kPage));
  const auto took = std::chrono::steady_clock::now() - begin;
  CHECK(found == 100);
  CHECK(took < std::chrono::milliseconds(300));
  ::munmap(const_cast<std::byte*>(at), 2 * kPage);
  ::munmap(many, kMappings * kPage);
}
