#include "zeropage/io/file.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "temporary_directory.h"
#include "zeropage/base/errors.h"

using namespace zeropage;

TEST_CASE("a swap file has no name, can get none, and is for its owner only") {
  TemporaryDirectory directory;
  File file = File::make_unnamed(directory.path());
  CHECK(directory.empty());
  struct stat info {};
  REQUIRE(::fstat(file.descriptor(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0600);
  CHECK(info.st_nlink == 0);
  const std::string link = "/proc/self/fd/" + std::to_string(file.descriptor()), name = directory.path() + "/name";
  CHECK(::linkat(AT_FDCWD, link.c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) != 0);
}

TEST_CASE("a file is opened again for O_DIRECT as the same file, though another has its name") {
  TemporaryDirectory directory;
  const std::string path = directory.path() + "/file", other = directory.path() + "/other";
  const File file = File::create(path, 4096);
  File::create(other, 4096);
  std::filesystem::rename(other, path);
  const File direct = file.reopen_direct(/*writable=*/true);
  REQUIRE(direct);
  struct stat expected {
  }, got{};
  REQUIRE(::fstat(file.descriptor(), &expected) == 0);
  REQUIRE(::fstat(direct.descriptor(), &got) == 0);
  CHECK(got.st_ino == expected.st_ino);
  std::filesystem::remove(path);
  CHECK(file.reopen_direct(/*writable=*/false));
}

TEST_CASE("where there is no room for a file, the one that was there is not removed") {
  TemporaryDirectory directory;
  const std::string path = directory.path() + "/file", other_name = directory.path() + "/other";
  std::ofstream(path) << "content";
  std::filesystem::create_hard_link(path, other_name);
  CHECK_THROWS_WITH_AS(File::create(path, std::uint64_t{1} << 50), doctest::Contains("are free on its disk"),
                       DiskError);
  CHECK(std::filesystem::hard_link_count(path) == 2);
  CHECK(std::filesystem::file_size(path) == 0);
}

TEST_CASE("an unusable directory is an error that says what is wrong with it") {
  TemporaryDirectory directory;
  CHECK_THROWS_WITH_AS(File::make_unnamed(directory.path() + "/missing"),
                       doctest::Contains("make the directory or set disk_path"), DiskError);
  const std::string file = directory.path() + "/file";
  std::ofstream(file) << "x";
  CHECK_THROWS_WITH_AS(File::make_unnamed(file), doctest::Contains("is not a directory"), DiskError);
  CHECK_THROWS_WITH_AS(File::make_unnamed("/proc"), doctest::Contains("/proc"), DiskError);
}
