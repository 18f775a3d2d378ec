#include "zeropage/checkpoint/tensor_file.h"

namespace zeropage {

TensorFileWriter::TensorFileWriter(const std::string& path, std::uint64_t bytes)
    : file_(bytes > 0 ? File::create(path, bytes) : File::open(path, /*writable=*/true)) {}

}  // namespace zeropage
