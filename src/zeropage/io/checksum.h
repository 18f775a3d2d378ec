// CRC-32C (Castagnoli), used by iSCSI, ext4 and most storage formats: RFC 3720, appendix B.4. Checkpoints carry it,
// so that a changed byte is an error and not a wrong number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zeropage {

/// Extends the checksum `crc` of earlier data by `data`. The checksum of no data is 0.
std::uint32_t crc32c(std::uint32_t crc, std::span<const std::byte> data);

}  // namespace zeropage
