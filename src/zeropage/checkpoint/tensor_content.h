// A tensor's content as bytes of a file, whole rows one after another, as safetensors has it: written and read page
// by page, so that no more of it is in memory than a page, and over ranks by each rank its own share. What lies in
// the file does not depend on ranks, tiers, page sizes or masters.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "zeropage/io/file_reader.h"
#include "zeropage/io/file_writer.h"

namespace zeropage {

/// A range of a tensor's content and its CRC-32C. At most FileReader::kMostBytes.
struct Piece {
  std::uint64_t begin;  // bytes, from the tensor's first
  std::uint64_t bytes;
  std::uint32_t crc;
};

struct Placed {
  at::Tensor tensor;
  std::uint64_t offset;  // where its content begins in the file
};

/// Writes what this rank has of the tensors, in this order, each to [offset, offset + nbytes) of the file. Over
/// ranks, all of them call it: of a tensor that lies over them each writes its share, of others rank 0 writes the
/// whole. What optimizers left to do to them is done first. Returns what was written, by tensor. Throws DiskError,
/// BudgetError, RankError.
std::vector<std::vector<Piece>> write_contents(std::span<const Placed> tensors, FileWriter& writer);

/// The same for one rank that writes alone: the whole tensor. Over ranks the others must gather it too, by pinning
/// it; it is then in memory whole.
std::vector<Piece> write_whole(const at::Tensor& tensor, FileWriter& writer, std::uint64_t offset);

/// The tensor's content becomes that of the file, which is of `dtype`, at `offset`, and in these pieces, in order,
/// which cover it. Where dtypes differ it is converted, once; a parameter with a master is loaded into that. Over
/// ranks, all of them call it; each reads what it has of the tensor. Throws DiskError, naming `name`, if a piece is
/// not what was written; the tensor is then neither what it was nor what it should be.
void read_content(at::Tensor tensor, FileReader& reader, std::uint64_t offset, c10::ScalarType dtype,
                  std::span<const Piece> pieces, const std::string& name);

/// Elements [begin, end) of a tensor, which in this rank's share begin at `at`.
struct OwnRange {
  std::uint64_t begin, end, at;
};
/// What this rank has of a tensor that is partitioned; none for others.
std::optional<std::vector<OwnRange>> own_ranges(const at::Tensor& tensor);
/// This rank's share of a tensor that is partitioned, flat. What optimizers left to do to it is done, and with
/// `write` no rank holds what it was whole. All ranks call it; until the tensor is used again, each reads, and with
/// `write` writes, as it likes.
at::Tensor own_share(const at::Tensor& tensor, bool write);

}  // namespace zeropage
