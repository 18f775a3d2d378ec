// The words for paged tensors that programs and the pager share: roles, tiers, and kinds of access.
#pragma once

#include <cstdint>
#include <string_view>

namespace zeropage {

/// A tensor's purpose. It decides the tensor's tier, and whether ranks partition it.
enum class Role : std::uint8_t { parameter, gradient, optimizer, activation };
/// The memory or disk that stores a tensor's bytes.
enum class Tier : std::uint8_t { device, host, disk };
inline constexpr int kRoles = 4, kTiers = 3;
/// How ranks send a tensor when they gather it: as it is, or its elements in blocks of 8 bits
/// (kernels/block_codes.h).
enum class Coding : std::uint8_t { none, float32_in_8_bits, bfloat16_in_8_bits, float16_in_8_bits };
std::string_view name_of(Role role);
std::string_view name_of(Tier tier);

/// How an operator accesses a page. `overwrite` promises to write every byte, so the cache need not read the page.
enum class Access : std::uint8_t { read, write, overwrite };

}  // namespace zeropage
