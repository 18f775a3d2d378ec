// Sizes in text ("256MB", "4 GiB") and in bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace zeropage {

inline constexpr std::size_t kKiB = 1024;
inline constexpr std::size_t kMiB = 1024 * kKiB;
inline constexpr std::size_t kGiB = 1024 * kMiB;

/// O_DIRECT needs file offsets, sizes and addresses in multiples of the logical block; 4 KiB serves every known disk.
inline constexpr std::size_t kBlockBytes = 4 * kKiB;
inline constexpr std::size_t kHugePageBytes = 2 * kMiB;

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr std::size_t round_down(std::size_t value, std::size_t multiple) { return value / multiple * multiple; }
constexpr std::size_t ceil_div(std::size_t value, std::size_t divisor) { return (value + divisor - 1) / divisor; }

/// "1024", "256MB" (1e6), "256MiB" (2^20), "1.5 GB", "64kB" -> bytes. Throws ConfigError, naming `setting`.
std::size_t parse_bytes(std::string_view text, std::string_view setting);

/// 12345678 -> "12.3 MB".
std::string format_bytes(std::size_t bytes);

}  // namespace zeropage
