#include "io_module.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <mutex>
#include <vector>

#include "zeropage/base/errors.h"
#include "zeropage/base/process.h"
#include "zeropage/io/arena.h"
#include "zeropage/io/direct_file.h"
#include "zeropage/space/space.h"

namespace py = pybind11;

namespace zeropage {
namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;

IoEngine engine_of(const std::string& name) {
  if (name == "auto") return IoEngine::automatic;
  if (name == "uring") return IoEngine::uring;
  if (name == "threads") return IoEngine::threads;
  throw ConfigError(fmt::format("\"{}\" is not an I/O engine; write \"uring\", \"threads\" or \"auto\"", name));
}

/// The memory of a transfer. It holds the storage, because `tensor.data = other` takes that away from a tensor. It
/// pins the pages of a paged tensor.
struct Memory {
  c10::Storage storage;
  std::optional<RawPin> pin;
};

/// A ticket that keeps alive all that its transfer uses. The interpreter's lock guards its members.
class TensorTicket {
 public:
  TensorTicket(std::shared_ptr<Io> io, std::shared_ptr<const DirectFile> file, Memory memory, Ticket ticket)
      : io_(std::move(io)), file_(std::move(file)), memory_(std::move(memory)), ticket_(std::move(ticket)) {}
  TensorTicket(TensorTicket&&) = default;
  TensorTicket& operator=(TensorTicket&&) = delete;  // it would free the memory of a transfer under way
  ~TensorTicket() {
    try {
      wait(std::nullopt);
    } catch (...) {  // a ticket's destructor discards its error
    }
  }

  /// False if `seconds` pass first.
  bool wait(std::optional<double> seconds) {
    if (seconds && !(*seconds >= 0)) throw ConfigError(fmt::format("timeout = {} is no number of seconds", *seconds));
    bool has_ended = false;
    try {
      // Keeps the interpreter's lock unless it blocks: handing the lock over among threads costs more than a
      // transfer.
      std::optional<py::gil_scoped_release> released;
      if (!ticket_.done()) released.emplace();
      has_ended = wait_until(seconds);
    } catch (...) {
      unpin(/*succeeded=*/false);
      throw;
    }
    if (has_ended) unpin(/*succeeded=*/true);
    return has_ended;
  }
  bool done() const { return ticket_.done(); }

 private:
  bool wait_until(std::optional<double> seconds) const {
    if (!seconds) {
      ticket_.wait();
      return true;
    }
    constexpr double kLongest = 1e9;
    const std::chrono::duration<double> longest(std::min(*seconds, kLongest));
    return ticket_.wait_until(std::chrono::steady_clock::now() +
                              std::chrono::duration_cast<std::chrono::steady_clock::duration>(longest));
  }
  void unpin(bool succeeded) {
    if (!memory_.pin) return;
    std::optional<RawPin> pin = std::exchange(memory_.pin, std::nullopt);
    const py::gil_scoped_release released;
    succeeded ? pin->release() : pin->drop();
  }

  std::shared_ptr<Io> io_;
  std::shared_ptr<const DirectFile> file_;
  Memory memory_;
  Ticket ticket_;
};

TensorTicket start(const std::shared_ptr<DirectFile>& file, const std::shared_ptr<Io>& io, bool reads,
                   const at::Tensor& tensor, std::uint64_t offset) {
  if (!tensor.is_cpu() || !tensor.is_contiguous() || tensor.layout() != c10::kStrided) {
    throw ConfigError(
        fmt::format("\"{}\": a transfer needs a contiguous tensor in the host's memory, and this one is on {}{}",
                    file->name(), tensor.device().str(), tensor.is_contiguous() ? "" : ", with gaps"));
  }
  if (tensor.is_conj() || tensor.is_neg()) {
    throw ConfigError(
        fmt::format("\"{}\": the tensor is a view of numbers that are {}, and its memory holds others; give {}",
                    file->name(), tensor.is_conj() ? "conjugated" : "negated",
                    tensor.is_conj() ? "tensor.resolve_conj()" : "tensor.resolve_neg()"));
  }
  Memory memory{tensor.storage(), std::nullopt};
  if (is_paged(tensor)) {
    const py::gil_scoped_release released;
    memory.pin = pin(tensor, reads ? Access::write : Access::read);
  }
  const auto* data = static_cast<const std::byte*>(reads ? tensor.mutable_data_ptr() : tensor.const_data_ptr());
  if (reads && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  Ticket ticket = file->start(*io, reads ? Direction::read : Direction::write, offset, const_cast<std::byte*>(data),
                              tensor.nbytes());
  return {io, file, std::move(memory), std::move(ticket)};
}

/// [Note: copies of devices] Torch knows which device copies use its pinned memory, and keeps that memory until they
/// end. It does not know of blocks that an arena cut from it. This class therefore keeps dead blocks of pinned
/// memory, and everything they hold. When a request for memory needs them, it waits for the devices. It does not wait
/// when blocks die, because a thread that captures a graph may drop one and must not wait for its device.
class Retired {
 public:
  void add(std::shared_ptr<void> memory) {
    if (process_ != process_generation()) {  // a thread that the child lacks may hold the lock
      new auto(std::move(memory));
      return;
    }
    const std::lock_guard lock(mutex_);
    kept_.push_back({next_++, std::move(memory)});
  }

  /// Returns when the devices have done all their work, and frees the blocks that died before. False if there were
  /// none.
  bool free() {
    std::uint64_t end = 0;
    {
      const std::lock_guard lock(mutex_);
      if (kept_.empty()) return false;
      end = next_;
    }
    synchronize();
    std::vector<Kept> past;  // freed without the lock
    const std::lock_guard lock(mutex_);
    std::ranges::partition_copy(std::exchange(kept_, {}), std::back_inserter(past), std::back_inserter(kept_),
                                [&](const Kept& kept) { return kept.number < end; });
    return true;
  }

 private:
  struct Kept {
    std::uint64_t number;
    std::shared_ptr<void> memory;
  };
  static void synchronize() {
    const auto type = at::accelerator::getAccelerator();
    if (!type) return;
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(*type);
    for (c10::DeviceIndex device = 0; device < at::accelerator::deviceCount(); ++device) {
      if (hooks.hasPrimaryContext(device)) at::accelerator::synchronizeDevice(device);
    }
  }

  std::mutex mutex_;
  std::uint64_t next_ = 0;
  std::vector<Kept> kept_;
  const std::uint64_t process_ = process_generation();
};

Retired& retired() {
  static auto* const made = new Retired;  // never destroyed: tensors also die when the process ends
  return *made;
}

/// Aligned memory for tensors.
class TensorArena {
 public:
  explicit TensorArena(std::size_t bytes, bool is_pinned) : is_pinned_(is_pinned) {
    if (!is_pinned) {
      arena_ = std::make_shared<Arena>(bytes);
      return;
    }
    retired().free();
    const std::size_t whole = round_up(bytes, kBlockBytes);
    const auto options = at::TensorOptions().dtype(c10::kByte).pinned_memory(true);
    const at::Tensor region = at::empty({static_cast<std::int64_t>(whole + kBlockBytes)}, options);
    const auto address = reinterpret_cast<std::uintptr_t>(region.mutable_data_ptr());
    const std::span<std::byte> memory(reinterpret_cast<std::byte*>(round_up(address, kBlockBytes)), whole);
    arena_ = {new Arena(memory), [region](Arena* arena) { delete arena; }};
  }

  at::Tensor empty(const std::vector<std::int64_t>& sizes, at::ScalarType dtype) const {
    const auto options = at::TensorOptions().dtype(dtype);
    std::size_t bytes = c10::elementSize(dtype);
    for (const std::int64_t size : sizes) bytes *= static_cast<std::size_t>(std::max<std::int64_t>(size, 0));
    if (bytes == 0) return at::empty(sizes, options);
    std::optional<Block> block = arena_->try_allocate(bytes);
    if (!block && is_pinned_ && retired().free()) block = arena_->try_allocate(bytes);
    if (!block) {
      throw BudgetError(fmt::format("an arena of {} has no {} free: make it larger, or let go of buffers",
                                    format_bytes(arena_->capacity()), format_bytes(bytes)));
    }
    auto held = std::make_shared<std::pair<std::shared_ptr<Arena>, Block>>(arena_, std::move(*block));
    void* const data = held->second.data();
    auto let_go = [held = std::move(held), is_pinned = is_pinned_](void*) mutable {
      is_pinned ? retired().add(std::move(held)) : held.reset();
    };
    return at::from_blob(data, sizes, std::move(let_go), options);
  }
  std::size_t capacity() const { return arena_->capacity(); }

 private:
  std::shared_ptr<Arena> arena_;
  bool is_pinned_;
};

}  // namespace

void bind_io(py::module_& module) {
  py::class_<Io, std::shared_ptr<Io>>(module, "Io")
      .def(py::init([](const std::string& engine, std::size_t block_bytes, std::size_t depth) {
             return std::shared_ptr<Io>(make_io({engine_of(engine), block_bytes, depth}));
           }),
           py::arg("engine") = "auto", py::arg("block_bytes") = kMiB, py::arg("depth") = 0, ReleaseGil())
      .def("wait_all", &Io::wait_all, ReleaseGil())
      .def_property_readonly("name", &Io::name);

  py::class_<TensorTicket>(module, "TensorTicket")
      .def("wait", &TensorTicket::wait, py::arg("seconds"))
      .def("done", &TensorTicket::done);

  py::class_<DirectFile, std::shared_ptr<DirectFile>>(module, "DirectFile")
      .def_static(
          "open",
          [](const std::string& path, bool writable) {
            return std::make_shared<DirectFile>(
                DirectFile::open(path, writable ? DirectFile::Mode::update : DirectFile::Mode::read));
          },
          py::arg("path"), py::arg("writable"), ReleaseGil())
      .def_static(
          "create",
          [](const std::string& path, std::uint64_t bytes) {
            return std::make_shared<DirectFile>(DirectFile::create(path, bytes));
          },
          py::arg("path"), py::arg("bytes"), ReleaseGil())
      .def("start", &start, py::arg("io"), py::arg("reads"), py::arg("tensor"), py::arg("offset"))
      .def("sync", &DirectFile::sync, ReleaseGil())
      .def_property_readonly("size", &DirectFile::size)
      .def_property_readonly("is_direct", &DirectFile::is_direct);

  py::class_<TensorArena>(module, "TensorArena")
      .def(py::init<std::size_t, bool>(), py::arg("bytes"), py::arg("pin_memory"), ReleaseGil())
      .def("empty", &TensorArena::empty, py::arg("sizes"), py::arg("dtype"), ReleaseGil())
      .def_property_readonly("capacity", &TensorArena::capacity);
}

}  // namespace zeropage
