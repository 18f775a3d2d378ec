#include "zeropage/checkpoint/file_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "zeropage/base/errors.h"
#include "zeropage/base/json.h"
#include "zeropage/base/units.h"
#include "zeropage/space/frontend.h"
#include "zeropage/space/space.h"

namespace zeropage {
namespace {

constexpr std::uint64_t kShardBytes = 4 * kGiB;

struct NamedDtype {
  c10::ScalarType dtype;
  std::string_view torch, safetensors;
};
// Files hold tensors in the reverse of this order, as the safetensors library writes them.
constexpr NamedDtype kDtypes[] = {{c10::kBool, "bool", "BOOL"},
                                  {c10::kByte, "uint8", "U8"},
                                  {c10::kChar, "int8", "I8"},
                                  {c10::kFloat8_e5m2, "float8_e5m2", "F8_E5M2"},
                                  {c10::kFloat8_e4m3fn, "float8_e4m3fn", "F8_E4M3"},
                                  {c10::kFloat8_e8m0fnu, "float8_e8m0fnu", "F8_E8M0"},
                                  {c10::kShort, "int16", "I16"},
                                  {c10::kUInt16, "uint16", "U16"},
                                  {c10::kHalf, "float16", "F16"},
                                  {c10::kBFloat16, "bfloat16", "BF16"},
                                  {c10::kInt, "int32", "I32"},
                                  {c10::kUInt32, "uint32", "U32"},
                                  {c10::kFloat, "float32", "F32"},
                                  {c10::kComplexFloat, "complex64", "C64"},
                                  {c10::kDouble, "float64", "F64"},
                                  {c10::kLong, "int64", "I64"},
                                  {c10::kUInt64, "uint64", "U64"}};

const NamedDtype& named(const Source& source) {
  const auto found = std::ranges::find(kDtypes, source.dtype(), &NamedDtype::dtype);
  if (found == std::end(kDtypes)) {
    throw Error(fmt::format("\"{}\" is {}, which safetensors has no name for; convert it", source.name,
                            c10::toString(source.dtype())));
  }
  return *found;
}

FileLayout layout_of(std::string name, std::vector<Source> sources) {
  const auto place = [](const Source& source) {
    return std::tuple(source.bytes() % kBlockBytes > 0, &std::end(kDtypes)[0] - &named(source), source.name);
  };
  std::ranges::sort(sources, [&](const Source& a, const Source& b) { return place(a) < place(b); });
  Json::Object header{{"__metadata__", Json::Object{{"format", "pt"}}}};
  FileLayout file{std::move(name), {}, {}, 0};
  for (Source& source : sources) {
    const std::uint64_t begin = file.size;
    file.size += source.bytes();
    const auto sizes = source.tensor.sizes();
    header.emplace_back(source.name, Json::Object{{"dtype", std::string(named(source).safetensors)},
                                                  {"shape", Json::Array(sizes.begin(), sizes.end())},
                                                  {"data_offsets", Json::Array{begin, file.size}}});
    file.entries.push_back({std::move(source), begin});
  }
  std::string text = Json(std::move(header)).dump();
  const std::size_t begin = round_up(8 + text.size(), kBlockBytes);
  text.resize(begin - 8, ' ');
  for (std::size_t i = 0; i < 8; ++i) file.header.push_back(static_cast<char>(text.size() >> (8 * i) & 255));
  file.header += text;
  for (auto& entry : file.entries) entry.offset += begin;
  file.size += begin;
  return file;
}

}  // namespace

c10::ScalarType Source::dtype() const { return precise ? dtype_of_states(tensor) : tensor.scalar_type(); }
std::size_t Source::bytes() const { return tensor.numel() * c10::elementSize(dtype()); }

std::vector<FileLayout> files_of(const std::string& part, const std::vector<Source>& sources) {
  std::vector<std::vector<Source>> shards(1);
  std::uint64_t used = 0;
  for (const Source& source : sources) {
    if (!shards.back().empty() && used + source.bytes() > kShardBytes) {
      shards.emplace_back();
      used = 0;
    }
    shards.back().push_back(source);
    used += source.bytes();
  }
  if (sources.empty()) return {};
  std::vector<FileLayout> files;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string number = fmt::format("-{:05}-of-{:05}", i + 1, shards.size());
    files.push_back(layout_of(part + (shards.size() > 1 ? number : "") + ".safetensors", std::move(shards[i])));
  }
  return files;
}

std::string_view name_of_dtype(c10::ScalarType dtype) {
  return std::ranges::find(kDtypes, dtype, &NamedDtype::dtype)->torch;
}

c10::ScalarType dtype_named(std::string_view name) {
  const auto found = std::ranges::find(kDtypes, name, &NamedDtype::torch);
  if (found == std::end(kDtypes)) {
    throw Error(fmt::format("the checkpoint has a tensor of {}, which this zeropage does not know", name));
  }
  return found->dtype;
}

}  // namespace zeropage
