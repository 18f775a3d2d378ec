#include "zeropage/checkpoint/open_checkpoint.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <fmt/format.h>

#include <algorithm>

#include "zeropage/base/errors.h"
#include "zeropage/checkpoint/file_layout.h"
#include "zeropage/checkpoint/segment_parts.h"
#include "zeropage/io/checksum.h"

namespace zeropage {

Checkpoint::Checkpoint(const std::filesystem::path& path)
    : path_(path), manifest_(Manifest::read(path)), reader_(path.string()) {
  try {
    for (const auto& [file, listed] : manifest_.body.at("files").object()) {
      check_file(file, listed);
      add_tensors(file, listed.at("tensors"));
    }
    for (const auto& [name, crc] : manifest_.body.at("others").object()) check_other(name, crc.count());
    for (const auto& [name, written] : manifest_.body.at("aliases").object()) aliases_[name] = written.text();
  } catch (const JsonError&) {
    throw DiskError(fmt::format("\"{}\" is damaged; load another checkpoint", manifest_.path.string()), EIO,
                    manifest_.path.string());
  }
}

std::set<std::string> Checkpoint::names(const std::string& part) const {
  std::set<std::string> names;
  for (const auto& [key, _] : stored_) {
    if (key.first == part) names.insert(key.second);
  }
  return names;
}

const Stored* Checkpoint::find(const std::string& part, const std::string& name) const {
  const auto found = stored_.find({part, name});
  return found == stored_.end() ? nullptr : &found->second;
}

void Checkpoint::read(const Stored& stored, const at::Tensor& into) {
  const bool direct = !segment_of(into) || is_in_order(into);
  const at::Tensor ordered = direct ? into : into.new_empty(into.sizes(), into.options().dtype(stored.dtype));
  keep([&] { reader_.read(stored.file, ordered, stored.offset, stored.dtype, stored.pieces, stored.name); });
  if (direct) return;
  // First into the target's layout: a copy between layouts uses the low-precision copy, not the master.
  keep([&] { into.copy_(at::empty_like(into, into.options().dtype(stored.dtype)).copy_(ordered)); });
}

at::Tensor Checkpoint::read(const Stored& stored) {
  const at::Tensor tensor = at::empty(stored.sizes, at::TensorOptions().dtype(stored.dtype));
  read(stored, tensor);
  return tensor;
}

void Checkpoint::keep(c10::function_ref<void()> work) {
  try {
    work();
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
}

void Checkpoint::raise() const {
  if (failure_) std::rethrow_exception(failure_);
}

void Checkpoint::fail(const std::string& file, const std::string& what) const {
  const std::string path = (path_ / file).string();
  throw DiskError(fmt::format("\"{}\" {}; load another checkpoint", path, what), EIO, path);
}

void Checkpoint::check_file(const std::string& name, const Json& listed) {
  if (!std::filesystem::exists(path_ / name)) fail(name, "is missing");
  const File file = File::open((path_ / name).string(), /*writable=*/false);
  const std::uint64_t size = listed.at("size").count(), header = listed.at("header").at("bytes").count();
  if (file.size() != size) fail(name, fmt::format("has {} bytes and was written with {}", file.size(), size));
  std::string bytes(std::min(header, size), '\0');
  file.read(0, reinterpret_cast<std::byte*>(bytes.data()), bytes.size());
  if (crc32(0, std::as_bytes(std::span(bytes))) != listed.at("header").at("crc").count()) {
    fail(name, "has a damaged header");
  }
  size_ += size;
}

void Checkpoint::check_other(const std::string& name, std::uint64_t crc) const {
  if (!std::filesystem::exists(path_ / name)) fail(name, "is missing");
  const std::string bytes = read_file(path_ / name);
  if (crc32(0, std::as_bytes(std::span(bytes))) != crc) fail(name, "is damaged");
}

void Checkpoint::add_tensors(const std::string& file, const Json& tensors) {
  const std::string part = file.substr(0, std::min(file.find('.'), file.find('-')));
  for (const auto& [name, entry] : tensors.object()) {
    Stored stored{name, file, dtype_named(entry.at("dtype").text()), {}, entry.at("offset").count(), {}};
    for (const Json& size : entry.at("shape").array()) {
      stored.sizes.push_back(static_cast<std::int64_t>(size.count()));
    }
    for (const Json& piece : entry.at("pieces").array()) {
      const auto& numbers = piece.array();
      if (numbers.size() != 3) throw JsonError("a piece has three numbers");
      stored.pieces.push_back(
          {numbers[0].count(), numbers[1].count(), static_cast<std::uint32_t>(numbers[2].count())});
    }
    stored_.emplace(std::pair(part, name), std::move(stored));
  }
}

}  // namespace zeropage
