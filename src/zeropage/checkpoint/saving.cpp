#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>

#include "zeropage/base/errors.h"
#include "zeropage/base/json.h"
#include "zeropage/base/units.h"
#include "zeropage/checkpoint/checkpoint.h"
#include "zeropage/checkpoint/file_layout.h"
#include "zeropage/checkpoint/manifest.h"
#include "zeropage/checkpoint/module_tensors.h"
#include "zeropage/checkpoint/optimizer_fields.h"
#include "zeropage/checkpoint/partial_folder.h"
#include "zeropage/checkpoint/rank_talk.h"
#include "zeropage/checkpoint/segment_parts.h"
#include "zeropage/checkpoint/tensor_file.h"
#include "zeropage/io/checksum.h"
#include "zeropage/rules/mixed.h"
#include "zeropage/space/space.h"

namespace zeropage {
namespace {

constexpr const char* kIndex = "model.safetensors.index.json";
constexpr std::size_t kBatchBytes = 256 * kMiB;  // so that copies of few tensors exist at a time

/// Pieces by file and tensor.
using Written = std::map<std::string, std::map<std::string, std::vector<Piece>>>;

/// Everything that one save writes.
struct SavedContents {
  std::vector<FileLayout> files;
  Json::Object aliases;  // names of tied tensors, and the names that they are written under
  Json optimizer;
  Json::Array rests;  // each rank's other state

  std::uint64_t size() const {
    std::uint64_t bytes = 0;
    for (const FileLayout& file : files) bytes += file.size;
    return bytes;
  }
  void add(std::vector<FileLayout> more) { std::move(more.begin(), more.end(), std::back_inserter(files)); }
};

Json as_tensor(const std::string& name) { return Json::Object{{"$tensor", name}}; }

std::vector<Source> collect_module(const std::vector<NamedTensor>& module, Json::Object& aliases) {
  std::vector<Source> sources;
  std::map<std::string, std::string> kept;
  for (const NamedTensor& named : module) {
    const auto [first, is_new] = kept.try_emplace(identity(named.tensor), named.name);
    if (!is_new) {
      aliases.emplace_back(named.name, first->second);
      continue;
    }
    sources.push_back({named.name, named.tensor, dtype_of_states(named.tensor) != named.tensor.scalar_type()});
  }
  return sources;
}

Json settings_of(const OptimizerKind& kind, const torch::optim::OptimizerOptions& options) {
  Json::Object settings;
  const auto copy = options.clone();
  for (const OptionField& field : kind.options_of(*copy)) {
    if (const auto* number = std::get_if<double*>(&field.value)) {
      settings.emplace_back(field.name, **number);
    } else if (const auto* flag = std::get_if<bool*>(&field.value)) {
      settings.emplace_back(field.name, **flag);
    } else {
      const auto [first, second] = *std::get<std::tuple<double, double>*>(field.value);
      settings.emplace_back(field.name, Json::Object{{"$tuple", Json::Array{first, second}}});
    }
  }
  for (const auto& [name, value] : kind.fixed) settings.emplace_back(name, value);
  return settings;
}

/// The step as Python's optimizers count it.
at::Tensor count_of(std::int64_t step) {
  const bool is_exact = static_cast<std::int64_t>(static_cast<float>(step)) == step;
  return at::scalar_tensor(static_cast<double>(step), at::TensorOptions(is_exact ? c10::kFloat : c10::kDouble));
}

Json collect_optimizer(const std::vector<NamedTensor>& module, const torch::optim::Optimizer& optimizer,
                       std::vector<Source>& sources) {
  const OptimizerKind& kind = kind_of(optimizer);
  const auto names = names_of_parameters(module, optimizer);
  Json::Array groups;
  Json::Object states;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const auto& group = optimizer.param_groups()[i];
    groups.push_back(Json::Object{{"params", Json::Array(names[i].begin(), names[i].end())},
                                  {"settings", settings_of(kind, group.options())}});
    for (std::size_t j = 0; j < names[i].size(); ++j) {
      const auto found = optimizer.state().find(group.params()[j].unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      Json::Object state;
      const auto copy = found->second->clone();
      for (const StateField& field : kind.state_of(*copy, group.options())) {
        const auto* const step = std::get_if<std::int64_t*>(&field.value);
        const at::Tensor tensor = step ? count_of(**step) : *std::get<at::Tensor*>(field.value);
        if (!tensor.defined()) continue;
        sources.push_back({names[i][j] + "/" + field.name, tensor.detach()});
        state.emplace_back(field.name, as_tensor(sources.back().name));
      }
      states.emplace_back(names[i][j], std::move(state));
    }
  }
  return Json::Object{{"groups", std::move(groups)}, {"states", std::move(states)}};
}

/// The states of generators as text that ranks can send.
Json random_states() {
  Json::Object states;
  for (const auto& [name, device] : generators()) {
    auto generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    const at::Tensor state = generator.get_state().contiguous();
    const auto* const data = state.const_data_ptr<std::uint8_t>();
    std::string digits;
    for (std::int64_t i = 0; i < state.numel(); ++i) digits += fmt::format("{:02x}", data[i]);
    states.emplace_back(name, std::move(digits));
  }
  return states;
}

at::Tensor bytes_of_digits(const std::string& digits) {
  const at::Tensor bytes = at::empty(static_cast<std::int64_t>(digits.size() / 2), at::TensorOptions(c10::kByte));
  for (std::size_t i = 0; i < digits.size() / 2; ++i) {
    bytes.mutable_data_ptr<std::uint8_t>()[i] =
        static_cast<std::uint8_t>(std::stoul(digits.substr(2 * i, 2), nullptr, 16));
  }
  return bytes;
}

/// Adds each rank's state outside the module and the optimizer.
void add_rests(RankTalk& talk, SavedContents& contents) {
  std::vector<Source> sources;
  const std::vector<std::string> everyones = talk.gather(random_states().dump());
  for (std::size_t rank = 0; rank < everyones.size(); ++rank) {
    Json::Object random;
    const Json states = Json::parse(everyones[rank]);
    for (const auto& [name, digits] : states.object()) {
      sources.push_back({fmt::format("{}/random/{}", rank, name), bytes_of_digits(digits.text())});
      random.emplace_back(name, as_tensor(sources.back().name));
    }
    contents.rests.push_back(Json::Object{{"extra", Json::Object{}}, {"random", std::move(random)}});
  }
  contents.add(files_of("state", sources));
}

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

SavedContents collect(const std::vector<NamedTensor>& module, const torch::optim::Optimizer* optimizer) {
  SavedContents contents;
  std::vector<Source> states;
  contents.add(files_of("model", collect_module(module, contents.aliases)));
  if (optimizer) contents.optimizer = collect_optimizer(module, *optimizer, states);
  contents.add(files_of("optimizer", states));
  return contents;
}

std::filesystem::path place_of(const std::filesystem::path& folder) {
  const auto place = std::filesystem::weakly_canonical(std::filesystem::absolute(folder));
  return place.has_filename() ? place : place.parent_path();
}

void save_all(const std::filesystem::path& folder, const torch::nn::Module& module,
              const torch::optim::Optimizer* optimizer, const SaveOptions& options) {
  const c10::NoGradGuard no_grad;
  const OutsideScopes ordinary;
  const std::vector<NamedTensor> tensors = tensors_of(module);
  RankTalk talk(all_of(tensors, optimizer));
  SavedContents contents;
  talk.together([&] { contents = collect(tensors, optimizer); });
  add_rests(talk, contents);
  std::uint32_t layout = 0;
  for (const FileLayout& file : contents.files) layout = crc32(layout, std::as_bytes(std::span(file.header)));
  const std::vector<std::string> layouts = talk.gather(std::to_string(layout));
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
