// Checksums of checkpoints, so that a changed byte is an error and not a wrong number. CRC-32C (Castagnoli) covers
// tensors. iSCSI, ext4 and most storage formats use it: RFC 3720, appendix B.4. CRC-32, as in zlib, covers small
// files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zeropage {

/// Extends the checksum `crc` of earlier data by `data`. The checksum of no data is 0.
std::uint32_t crc32c(std::uint32_t crc, std::span<const std::byte> data);
/// The same with zlib's CRC-32, a byte at a time.
std::uint32_t crc32(std::uint32_t crc, std::span<const std::byte> data);

}  // namespace zeropage
