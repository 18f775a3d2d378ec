#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string_view>

#include "failing_io.h"
#include "temporary_directory.h"
#include "zeropage/base/errors.h"
#include "zeropage/io/checksum.h"
#include "zeropage/io/file_reader.h"
#include "zeropage/io/file_writer.h"

using namespace zeropage;

namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::vector<std::byte> random_bytes(std::size_t size) {
  std::vector<std::byte> bytes(size);
  std::mt19937 generator(1);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(generator());
  return bytes;
}

std::vector<std::byte> content_of(const std::string& path) {
  const File file = File::open(path, /*writable=*/false);
  std::vector<std::byte> content(file.size());
  file.read(0, content.data(), content.size());
  return content;
}

}  // namespace

TEST_CASE("crc32c is that of RFC 3720, appendix B.4") {
  CHECK(crc32c(0, {}) == 0);
  CHECK(crc32c(0, bytes_of("123456789")) == 0xe3069283);
  CHECK(crc32c(0, std::vector<std::byte>(32)) == 0x8a9136aa);
  CHECK(crc32c(0, std::vector<std::byte>(32, std::byte{0xff})) == 0x62a8ab43);
  const auto data = random_bytes(1000);
  for (std::size_t cut = 0; cut <= 1000; cut += 37) {
    const auto all = std::span(data);
    CHECK(crc32c(crc32c(0, all.first(cut)), all.subspan(cut)) == crc32c(0, data));
  }
}

TEST_CASE("what is written in any ranges is read in any others") {
  for (const IoEngine engine : {IoEngine::threads, IoEngine::automatic}) {
    TemporaryDirectory directory;
    const std::string path = directory.path() + "/file";
    const auto io = make_io({.engine = engine});
    const auto data = random_bytes(3 * FileWriter::kBufferBytes + 12345);
    const File file = File::create(path, data.size());
    CHECK(file.size() == data.size());
    std::mt19937 generator(2);
    {
      FileWriter writer(*io, file);
      // In order, from the middle on; then what is before, in pieces of odd sizes, some of them out of order.
      const std::size_t middle = 5'000'001;
      for (std::size_t at = middle; at < data.size();) {
        const std::size_t bytes = std::min<std::size_t>(generator() % 700'000 + 1, data.size() - at);
        const auto part = std::span(data).subspan(at, bytes);
        CHECK(writer.write(at, part) == crc32c(0, part));
        at += bytes;
      }
      std::vector<std::pair<std::size_t, std::size_t>> rest;
      for (std::size_t at = 0; at < middle;) {
        const std::size_t bytes = std::min<std::size_t>(generator() % 9'000 + 1, middle - at);
        rest.emplace_back(at, bytes);
        at += bytes;
      }
      for (std::size_t i = 0; i + 3 < rest.size(); i += 7) std::swap(rest[i], rest[i + 3]);
      for (const auto& [at, bytes] : rest) writer.write(at, std::span(data).subspan(at, bytes));
      writer.finish();
    }
    CHECK(content_of(path) == data);

    FileReader reader(*io, path);
    std::vector<FileReader::Range> ranges;
    for (std::size_t at = 0; at < data.size();) {
      const std::size_t most = std::min<std::size_t>(FileReader::kMostBytes, data.size() - at);
      const std::size_t bytes = generator() % 3 == 0 ? most : generator() % most + 1;
      ranges.push_back({at, bytes});
      at += bytes;
    }
    std::size_t next = 0;
    reader.read(ranges, [&](std::size_t index, std::span<const std::byte> got) {
      CHECK(index == next++);
      const auto expected = std::span(data).subspan(ranges[index].offset, ranges[index].bytes);
      CHECK(std::equal(got.begin(), got.end(), expected.begin(), expected.end()));
    });
    CHECK(next == ranges.size());
  }
}

TEST_CASE("a write that fails is an error of a later write or of the end, and is not taken for done") {
  TemporaryDirectory directory;
  FailingIo io;
  const File file = File::create(directory.path() + "/file", 4 * FileWriter::kBufferBytes);
  FileWriter writer(io, file);
  io.set_outcome([](const Transfer& transfer) { return transfer.offset == 0 ? -EIO : 1; });
  const auto data = random_bytes(2 * FileWriter::kBufferBytes);
  CHECK_THROWS_AS((writer.write(0, data), writer.finish()), DiskError);
  CHECK_THROWS_AS(writer.finish(), DiskError);
}

TEST_CASE("what could not be written is an error of every flush, and is written when it can be") {
  TemporaryDirectory directory;
  FailingIo io;
  const std::string path = directory.path() + "/file";
  const auto data = random_bytes(10'000);
  File file = File::create(path, data.size());
  File writable = std::exchange(file, File::open(path, /*writable=*/false));
  FileWriter writer(io, file);
  writer.write(0, std::span(data).first(100));  // less than a disk block: through the page cache
  for (int i = 0; i < 2; ++i) CHECK_THROWS_AS(writer.flush(), DiskError);
  std::swap(file, writable);
  writer.finish();
  const auto content = content_of(path);
  CHECK(std::equal(data.begin(), data.begin() + 100, content.begin()));
}

TEST_CASE("data that once did not reach the disk is an error of every end, though the disk says that it has") {
  TemporaryDirectory directory;
  const auto io = make_io();
  File file = File::create(directory.path() + "/file", 4096);
  FileWriter writer(*io, file);
  writer.write(0, random_bytes(4096));
  writer.flush();
  File on_disk = std::exchange(file, File::open("/dev/null", /*writable=*/true));
  CHECK_THROWS_AS(writer.finish(), DiskError);
  std::swap(file, on_disk);
  CHECK_THROWS_AS(writer.finish(), DiskError);
}

TEST_CASE("a file cut short and one that is missing are errors, and the reader goes on") {
  TemporaryDirectory directory;
  const std::string path = directory.path() + "/file";
  const auto io = make_io();
  CHECK_THROWS_WITH_AS(FileReader(*io, path), doctest::Contains("cannot be opened"), DiskError);
  const auto data = random_bytes(10'000);
  const File file = File::create(path, data.size());
  FileWriter writer(*io, file);
  writer.write(0, data);
  writer.finish();
  FileReader reader(*io, path);
  const FileReader::Range beyond[] = {{0, 4096}, {9'000, 1'001}};
  CHECK_THROWS_WITH_AS(reader.read(beyond, [](std::size_t, std::span<const std::byte>) {}),
                       doctest::Contains("was cut short"), DiskError);
  const FileReader::Range wraps[] = {{~std::uint64_t{0} - 10, 100}};
  CHECK_THROWS_WITH_AS(reader.read(wraps, [](std::size_t, std::span<const std::byte>) {}),
                       doctest::Contains("was cut short"), DiskError);
  const FileReader::Range whole[] = {{0, 10'000}};
  const auto stops = [](std::size_t, std::span<const std::byte>) { throw Error("stop"); };
  CHECK_THROWS_WITH_AS(reader.read(whole, stops), "stop", Error);
  reader.read(whole, [&](std::size_t, std::span<const std::byte> got) { CHECK(got.size() == 10'000); });
}

TEST_CASE("a folder that cannot be written, and a file larger than its disk, are errors that leave nothing") {
  TemporaryDirectory directory;
  CHECK_THROWS_WITH_AS(File::create(directory.path() + "/no/file", 1), doctest::Contains("cannot be made"),
                       DiskError);
  CHECK_THROWS_WITH_AS(File::create(directory.path() + "/file", std::uint64_t{1} << 50),
                       doctest::Contains("are free on its disk"), DiskError);
  CHECK(directory.empty());
}

TEST_CASE("folders change places") {
  TemporaryDirectory directory;
  const std::string one = directory.path() + "/one", other = directory.path() + "/other";
  std::filesystem::create_directory(one);
  std::filesystem::create_directory(other);
  File::create(one + "/a", 1);
  exchange_paths(one, other);
  CHECK(std::filesystem::exists(other + "/a"));
  CHECK_THROWS_AS(exchange_paths(one, directory.path() + "/missing"), DiskError);
}
