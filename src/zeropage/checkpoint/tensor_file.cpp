#include "zeropage/checkpoint/tensor_file.h"

namespace zeropage {

TensorFileWriter::TensorFileWriter(const std::string& path, std::uint64_t bytes)
    : file_(bytes > 0 ? File::create(path, bytes) : File::open(path, /*writable=*/true)) {}

void TensorFolderReader::read(const std::string& file, const at::Tensor& tensor, std::uint64_t offset,
                              c10::ScalarType dtype, std::span<const Piece> pieces, const std::string& name) {
  const auto found = files_.find(file);
  ContentFile& opened = found != files_.end()
                            ? found->second
                            : files_.try_emplace(file, *io_, folder_ + "/" + file, blocks_).first->second;
  read_content(tensor, opened, offset, dtype, pieces, name);
}

}  // namespace zeropage
