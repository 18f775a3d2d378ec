#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>

#include "zeropage/base/booked_time.h"
#include "zeropage/base/errors.h"
#include "zeropage/base/json.h"
#include "zeropage/base/units.h"
#include "zeropage/checkpoint/checkpoint.h"
#include "zeropage/checkpoint/manifest.h"
#include "zeropage/checkpoint/partial_folder.h"
#include "zeropage/checkpoint/saved_contents.h"
#include "zeropage/checkpoint/segment_parts.h"
#include "zeropage/checkpoint/tensor_file.h"
#include "zeropage/io/checksum.h"
#include "zeropage/rules/mixed.h"
#include "zeropage/space/frontend.h"
#include "zeropage/space/space.h"

namespace zeropage {
namespace {

constexpr const char* kIndex = "model.safetensors.index.json";
constexpr std::size_t kBatchBytes = 256 * kMiB;  // so that copies of few tensors exist at a time

/// Pieces by file and tensor.
using Written = std::map<std::string, std::map<std::string, std::vector<Piece>>>;

/// Errors of one rank during collective work. The rank does the rest of the work, then throws the first error.
class Failure {
 public:
  template <class Work>
  void keep(Work&& work) {
    try {
      work();
    } catch (...) {
      if (!first_) first_ = std::current_exception();
    }
  }
  explicit operator bool() const { return first_ != nullptr; }
  void raise() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::exception_ptr first_;
};

/// The content to write, row by row in its storage. Over ranks, all of them call it, because a copy gathers.
at::Tensor content_of(const Source& source) {
  const at::Tensor content = source.precise ? most_precise(source.tensor) : source.tensor;
  if (!segment_of(content) || is_in_order(content)) return content;
  return content.new_empty(content.sizes()).copy_(content);
}

/// Writes this rank's parts of the tensors. After an error, it still gathers with the other ranks.
class Writing {
 public:
  Writing(const SavedContents& contents, const std::filesystem::path& path, bool first,
          const CheckpointProgress& progress)
      : contents_(contents), path_(path), first_(first), progress_(progress), size_(contents.size()) {}

  Written write() {
    for (const FileLayout& file : contents_.files) write_file(file);
    failure_.raise();
    return std::move(written_);
  }

 private:
  void write_file(const FileLayout& file) {
    std::optional<TensorFileWriter> writer;
    failure_.keep([&] { writer.emplace((path_ / file.name).string(), 0); });
    auto& written = written_[file.name];
    for (std::size_t i = 0, end = 0; i < file.entries.size(); i = end) {
      std::uint64_t bytes = 0;
      for (; end < file.entries.size() && bytes < kBatchBytes; ++end) bytes += file.entries[end].source.bytes();
      write_batch({file.entries.data() + i, end - i}, writer, written);
      done_ += bytes;
      if (progress_ && !failure_) failure_.keep([&] { progress_(done_, size_); });
    }
    if (!failure_) failure_.keep([&] { writer->finish(); });
  }

  void write_batch(std::span<const FileLayout::Entry> entries, std::optional<TensorFileWriter>& writer,
                   std::map<std::string, std::vector<Piece>>& written) {
    std::vector<Placed> placed;
    std::vector<const std::string*> names;
    for (const auto& [source, offset] : entries) {
      if (ranks_of(source.tensor) == 1 && (!first_ || failure_)) continue;
      failure_.keep([&] {
        placed.push_back({content_of(source), offset});
        names.push_back(&source.name);
      });
    }
    if (failure_) {  // runs deferred updates, as writing does
      for (const Placed& one : placed) failure_.keep([&] { own_ranges(one.tensor); });
      return;
    }
    failure_.keep([&] {
      auto pieces = writer->write(placed);
      for (std::size_t i = 0; i < names.size(); ++i) written[*names[i]] = std::move(pieces[i]);
    });
  }

  const SavedContents& contents_;
  const std::filesystem::path& path_;
  const bool first_;
  const CheckpointProgress& progress_;
  const std::uint64_t size_;
  std::uint64_t done_ = 0;
  Failure failure_;
  Written written_;
};

Json as_json(const std::vector<Piece>& pieces) {
  Json::Array array;
  for (const Piece& piece : pieces) {
    array.push_back(Json::Array{piece.begin, piece.bytes, std::uint64_t{piece.crc}});
  }
  return array;
}

Json as_json(const Written& written) {
  Json::Object files;
  for (const auto& [file, tensors] : written) {
    Json::Object listed;
    for (const auto& [name, pieces] : tensors) listed.emplace_back(name, as_json(pieces));
    files.emplace_back(file, std::move(listed));
  }
  return files;
}

/// All ranks' pieces.
Written joined(const std::vector<std::string>& everyones) {
  Written all;
  for (const std::string& text : everyones) {
    const Json written = Json::parse(text);
    for (const auto& [file, tensors] : written.object()) {
      for (const auto& [name, pieces] : tensors.object()) {
        for (const Json& piece : pieces.array()) {
          const auto& numbers = piece.array();
          all[file][name].push_back(
              {numbers.at(0).count(), numbers.at(1).count(), static_cast<std::uint32_t>(numbers.at(2).count())});
        }
      }
    }
  }
  return all;
}

/// Sorts a tensor's pieces. Throws Error unless they cover it.
void put_in_order(const Source& source, std::vector<Piece>& pieces) {
  std::ranges::sort(pieces, {}, &Piece::begin);
  std::uint64_t covered = 0;
  for (const Piece& piece : pieces) {
    if (piece.begin != covered) break;
    covered += piece.bytes;
  }
  std::uint64_t all = 0;
  for (const Piece& piece : pieces) all += piece.bytes;
  if (covered == source.bytes() && all == covered) return;
  throw Error(
      fmt::format("\"{}\" was written by ranks that do not hold it whole: {} of {} bytes; save what all ranks have",
                  source.name, covered, source.bytes()));
}

Json described(const FileLayout& file, std::map<std::string, std::vector<Piece>>& pieces) {
  Json::Object tensors;
  for (const auto& [source, offset] : file.entries) {
    const auto sizes = source.tensor.sizes();
    auto& own = pieces[source.name];
    put_in_order(source, own);
    tensors.emplace_back(source.name, Json::Object{{"dtype", std::string(name_of_dtype(source.dtype()))},
                                                   {"shape", Json::Array(sizes.begin(), sizes.end())},
                                                   {"offset", offset},
                                                   {"pieces", as_json(own)}});
  }
  const std::uint64_t crc = crc32(0, std::as_bytes(std::span(file.header)));
  return Json::Object{{"size", file.size},
                      {"header", Json::Object{{"bytes", file.header.size()}, {"crc", crc}}},
                      {"tensors", std::move(tensors)}};
}

/// Writes the index of a model in several files. Returns its checksum by its name; nothing for one file.
Json::Object write_index(const std::filesystem::path& path, const SavedContents& contents) {
  Json::Object where;
  std::uint64_t bytes = 0;
  for (const FileLayout& file : contents.files) {
    if (!file.name.starts_with("model-")) continue;
    bytes += file.size - file.header.size();
    for (const auto& entry : file.entries) where.emplace_back(entry.source.name, file.name);
  }
  if (where.empty()) return {};
  const std::string text =
      Json(Json::Object{{"metadata", Json::Object{{"total_size", bytes}}}, {"weight_map", std::move(where)}}).dump();
  write_file(path / kIndex, text);
  return {{kIndex, std::uint64_t{crc32(0, std::as_bytes(std::span(text)))}}};
}

/// Creates the files with their final size, so that a full disk fails now.
void create_files(const std::filesystem::path& path, const SavedContents& contents) {
  for (const FileLayout& file : contents.files) {
    TensorFileWriter made((path / file.name).string(), file.size);
    made.write_bytes(0, std::as_bytes(std::span(file.header)));
    made.flush();  // it reaches the disk with the later writes
  }
}

/// Writes everything outside the safetensors files.
void finish(const std::filesystem::path& path, const SavedContents& contents, Written pieces,
            const std::string& run) {
  Json::Object files;
  for (const FileLayout& file : contents.files) files.emplace_back(file.name, described(file, pieces[file.name]));
  const Json body(Json::Object{{"files", std::move(files)},
                               {"aliases", contents.aliases},
                               {"optimizer", contents.optimizer},
                               {"ranks", contents.rests},
                               {"others", write_index(path, contents)}});
  write_file(path / Manifest::kName, Manifest::encode(body, run));
}

std::filesystem::path place_of(const std::filesystem::path& folder) {
  const auto place = std::filesystem::weakly_canonical(std::filesystem::absolute(folder));
  return place.has_filename() ? place : place.parent_path();
}

void save_all(const std::filesystem::path& folder, const torch::nn::Module& module,
              const torch::optim::Optimizer* optimizer, const SaveOptions& options) {
  const Booking booking(&BookedTime::of_no_space(), Spent::checkpoint);
  const c10::NoGradGuard no_grad;
  const OutsideScopes ordinary;
  const std::vector<NamedTensor> tensors = tensors_of(module);
  RankTalk talk(all_of(tensors, optimizer));
  SavedContents contents;
  talk.together([&] { contents = SavedContents::of(tensors, optimizer); });
  contents.add_rests(talk);
  const std::vector<std::string> layouts = talk.gather(std::to_string(contents.layout()));
  if (std::ranges::any_of(layouts, [&](const std::string& other) { return other != layouts[0]; })) {
    throw RankError("ranks have other tensors, names or dtypes to save; save the same on all of them");
  }
  std::optional<PartialFolder> partial;  // of the first rank
  talk.together([&] {
    if (!talk.is_first()) return;
    partial.emplace(place_of(folder), &Manifest::names_in);
    create_files(partial->path(), contents);
    partial->check_names();
  });
  const std::filesystem::path path = talk.of_first(partial ? partial->path().string() : "");
  const std::string run = talk.of_first(current_run());
  continue_run(run);  // the same on all ranks
  Written written;
  talk.together([&] { written = Writing(contents, path, talk.is_first(), options.progress).write(); });
  const std::vector<std::string> everyones = talk.gather(as_json(written).dump());
  talk.together([&] {
    if (!partial) return;
    finish(path, contents, joined(everyones), run);
    partial->appear();
  });
}

}  // namespace

void save(const std::filesystem::path& folder, const torch::nn::Module& module, const SaveOptions& options) {
  save_all(folder, module, nullptr, options);
}

void save(const std::filesystem::path& folder, const torch::nn::Module& module,
          const torch::optim::Optimizer& optimizer, const SaveOptions& options) {
  save_all(folder, module, &optimizer, options);
}

}  // namespace zeropage
