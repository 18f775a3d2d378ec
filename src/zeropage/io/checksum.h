// CRC-32C (Castagnoli), as iSCSI, ext4 and most storage formats use it: RFC 3720, appendix B.4. What is written to
// last carries one, so that a byte that changed on its way is an error and not a number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zeropage {

/// The checksum of what `crc` is the checksum of, followed by `data`. 0 is that of nothing.
std::uint32_t crc32c(std::uint32_t crc, std::span<const std::byte> data);

}  // namespace zeropage
