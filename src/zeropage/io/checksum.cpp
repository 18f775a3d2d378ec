#include "zeropage/io/checksum.h"

#include <array>
#include <cstring>

namespace zeropage {
namespace {

// Polynomials, reflected.
constexpr std::uint32_t kCastagnoli = 0x82f63b78, kZlib = 0xedb88320;

using Table = std::array<std::uint32_t, 256>;

constexpr Table table_of(std::uint32_t polynomial) {
  Table table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? polynomial : 0);
    table[byte] = crc;
  }
  return table;
}

constexpr auto kTables = [] {
  std::array<Table, 8> tables{table_of(kCastagnoli)};
  for (std::size_t i = 1; i < 8; ++i) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      tables[i][byte] = (tables[i - 1][byte] >> 8) ^ tables[0][tables[i - 1][byte] & 255];
    }
  }
  return tables;
}();

std::uint64_t load(const std::byte* at) {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

std::uint32_t step(std::uint32_t crc, std::byte byte, const Table& table = kTables[0]) {
  return (crc >> 8) ^ table[(crc ^ static_cast<std::uint32_t>(byte)) & 255];
}

/// Eight bytes at a time by tables.
std::uint32_t extend_by_tables(std::uint32_t crc, const std::byte* at, std::size_t bytes) {
  for (; bytes >= 8; at += 8, bytes -= 8) {
    const std::uint64_t word = load(at) ^ crc;
    crc = 0;
    for (std::size_t i = 0; i < 8; ++i) crc ^= kTables[7 - i][(word >> (8 * i)) & 255];
  }
  for (; bytes > 0; ++at, --bytes) crc = step(crc, *at);
  return crc;
}

#if defined(__x86_64__)
/// By the processor's own instruction.
[[gnu::target("sse4.2")]] std::uint32_t extend_by_instruction(std::uint32_t crc, const std::byte* at,
                                                              std::size_t bytes) {
  std::uint64_t wide = crc;
  for (; bytes >= 8; at += 8, bytes -= 8) wide = __builtin_ia32_crc32di(wide, load(at));
  crc = static_cast<std::uint32_t>(wide);
  for (; bytes > 0; ++at, --bytes) crc = step(crc, *at);
  return crc;
}
#endif

using Extend = std::uint32_t (*)(std::uint32_t, const std::byte*, std::size_t);

Extend fastest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return extend_by_instruction;
#endif
  return extend_by_tables;
}

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, std::span<const std::byte> data) {
  static const Extend extend = fastest();
  return ~extend(~crc, data.data(), data.size());
}

std::uint32_t crc32(std::uint32_t crc, std::span<const std::byte> data) {
  static constexpr Table table = table_of(kZlib);
  crc = ~crc;
  for (const std::byte byte : data) crc = step(crc, byte, table);
  return ~crc;
}

}  // namespace zeropage
