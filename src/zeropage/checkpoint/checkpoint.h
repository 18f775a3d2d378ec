// Checkpoints of a module and its optimizer. The folders are those of Python's zeropage.save() and zeropage.load():
// either language loads what the other saved, equal to the bit. docs/checkpoints.md lists promises and files.
//
//   zeropage::save("runs/a/step-1000", model, optimizer);
//   zeropage::load("runs/a", model, optimizer);  // the latest checkpoint there
//
// A checkpoint holds parameters, buffers, the optimizer's options and states, and the state of torch's default random
// number generators: the CPU's, and the current CUDA device's. In mixed precision it holds the masters. load()
// ignores a scheduler, `extra`, and the generators of Python and NumPy, which a checkpoint from Python may also hold.
//
// Optimizers are torch::optim's AdamW, Adam, SGD, RMSprop and Adagrad. Settings that C++ lacks, such as `fused`, are
// ignored, and save() does not write them. load() throws Error for `maximize=True`, because C++ cannot act on it.
//
// Over ranks, all ranks of the module's space call save() and load() together, with the same folder. The number of
// ranks may change in between. Both write and read page by page, so budgets hold.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
}  // namespace torch::nn
namespace torch::optim {
class Optimizer;
}

namespace zeropage {

/// Called with the bytes done on this rank, and those of the whole checkpoint.
using CheckpointProgress = std::function<void(std::uint64_t done, std::uint64_t all)>;

struct SaveOptions {
  CheckpointProgress progress = nullptr;
};

struct LoadOptions {
  bool restore_rng = true;  // restore the states of random number generators
  CheckpointProgress progress = nullptr;
};

/// Writes a checkpoint to `folder`. It appears complete or not at all. A checkpoint at `folder` is replaced, except
/// for files that others added. Anything else there is an error and stays. After an error the earlier checkpoint is
/// intact. Throws DiskError if the disk is full, RankError if another rank failed, and Error for an optimizer that a
/// checkpoint cannot hold.
void save(const std::filesystem::path& folder, const torch::nn::Module& module, const SaveOptions& options = {});
void save(const std::filesystem::path& folder, const torch::nn::Module& module,
          const torch::optim::Optimizer& optimizer, const SaveOptions& options = {});

/// Loads the checkpoint `folder`, or the latest one in it, into objects that were built as at the save. Paged tensors
/// stay paged. Floating dtypes may differ and are converted. Throws Error, naming each difference, if names, shapes
/// or kinds of dtypes do not fit; nothing was changed then. Throws DiskError for bytes that are not those of the
/// save, and names the tensor; the tensors before it are loaded.
void load(const std::filesystem::path& folder, torch::nn::Module& module, const LoadOptions& options = {});
void load(const std::filesystem::path& folder, torch::nn::Module& module, torch::optim::Optimizer& optimizer,
          const LoadOptions& options = {});

// The same for the holders that TORCH_MODULE makes, such as torch::nn::Sequential.
template <class Contained>
void save(const std::filesystem::path& folder, const torch::nn::ModuleHolder<Contained>& module,
          const SaveOptions& options = {}) {
  save(folder, *module.ptr(), options);
}
template <class Contained>
void save(const std::filesystem::path& folder, const torch::nn::ModuleHolder<Contained>& module,
          const torch::optim::Optimizer& optimizer, const SaveOptions& options = {}) {
  save(folder, *module.ptr(), optimizer, options);
}
template <class Contained>
void load(const std::filesystem::path& folder, const torch::nn::ModuleHolder<Contained>& module,
          const LoadOptions& options = {}) {
  load(folder, *module.ptr(), options);
}
template <class Contained>
void load(const std::filesystem::path& folder, const torch::nn::ModuleHolder<Contained>& module,
          torch::optim::Optimizer& optimizer, const LoadOptions& options = {}) {
  load(folder, *module.ptr(), optimizer, options);
}

}  // namespace zeropage
