// Bindings without logic: each line calls the C++ function of the same name.
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <cstring>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "io_module.h"
#include "zeropage/base/booked_time.h"
#include "zeropage/base/memory_limits.h"
#include "zeropage/base/trace.h"
#include "zeropage/base/waits.h"
#include "zeropage/fault/fallback.h"
#include "zeropage/plan/machine.h"
#include "zeropage/rules/mixed.h"
#include "zeropage/rules/placement.h"
#include "zeropage/rules/quantised.h"
#include "zeropage/rules/speculation.h"
#include "zeropage/space/cpu_allocator.h"
#include "zeropage/space/frontend.h"
#include "zeropage/train/activations.h"
#include "zeropage/train/gradients.h"
#include "zeropage/zeropage.h"

namespace py = pybind11;

namespace {

using namespace zeropage;

struct Exceptions {
  PyObject *error, *setting, *budget, *disk, *access, *rank;
} exceptions;

PyObject* type_of(const Error& error) {
  if (dynamic_cast<const ConfigError*>(&error)) return exceptions.setting;
  if (dynamic_cast<const BudgetError*>(&error)) return exceptions.budget;
  if (dynamic_cast<const DiskError*>(&error)) return exceptions.disk;
  if (dynamic_cast<const AccessError*>(&error)) return exceptions.access;
  if (dynamic_cast<const RankError*>(&error)) return exceptions.rank;
  return exceptions.error;
}

/// Lets an operator throw a Python exception without the interpreter's lock.
struct OperatorError final : torch::PyTorchError {
  explicit OperatorError(const Error& error) : PyTorchError(error.what()), type(type_of(error)) {}
  PyObject* python_type() override { return type; }
  PyObject* type;
};

/// A DiskError for Python: an OSError with errno and file, whose text is only `message`.
py::object make_disk_error(const std::string& message, int code, const std::string& path) {
  py::object error = py::reinterpret_borrow<py::object>(exceptions.disk)(message);
  if (code != 0) error.attr("errno") = code, error.attr("strerror") = std::strerror(code);
  if (!path.empty()) error.attr("filename") = path;
  return error;
}

void set_error(const Error& error) {
  if (const auto* disk = dynamic_cast<const DiskError*>(&error)) {
    PyErr_SetObject(exceptions.disk, make_disk_error(disk->what(), disk->code(), disk->path()).ptr());
  } else {
    PyErr_SetString(type_of(error), error.what());
  }
}

/// Throws `error` out of an operator.
void throw_from_operator(const Error& error) {
  if (!dynamic_cast<const DiskError*>(&error)) throw OperatorError(error);
  const py::gil_scoped_acquire gil;
  set_error(error);
  python_error pending;
  pending.persist();
  throw pending;
}

PyObject* make_exception(py::module_& module, const char* name, py::tuple bases, py::dict members = {}) {
  const std::string qualified = std::string("zeropage.") + name;
  PyObject* type = PyErr_NewException(qualified.c_str(), bases.ptr(), members.ptr());
  module.attr(name) = py::reinterpret_borrow<py::object>(type);
  return type;
}

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing();
#else
  return _Py_IsFinalizing();
#endif
}

void bind_exceptions(py::module_& module) {
  const auto runtime_error = py::reinterpret_borrow<py::object>(PyExc_RuntimeError);
  exceptions.error = make_exception(module, "ZeropageError", py::make_tuple(runtime_error));
  const auto base = py::reinterpret_borrow<py::object>(exceptions.error);
  const auto with = [&](PyObject* builtin) {
    return py::make_tuple(base, py::reinterpret_borrow<py::object>(builtin));
  };
  exceptions.setting = make_exception(module, "ConfigError", with(PyExc_ValueError));
  exceptions.budget = make_exception(module, "BudgetError", with(PyExc_MemoryError));
  // OSError would print errno and file once more.
  py::dict members;
  members["__str__"] = py::cpp_function(
      [](const py::object& self) {
        const auto args = self.attr("args").cast<py::tuple>();
        return args.empty() ? py::str() : py::str(args[0]);
      },
      py::is_method(py::none()), py::name("__str__"));
  exceptions.disk = make_exception(module, "DiskError", with(PyExc_OSError), members);
  module.def("make_disk_error", &make_disk_error, py::arg("message"), py::arg("code"), py::arg("path"));
  exceptions.access = make_exception(module, "AccessError", py::make_tuple(base));
  exceptions.rank = make_exception(module, "RankError", py::make_tuple(base));
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      std::rethrow_exception(pending);
    } catch (python_error& error) {
      error.restore();
    } catch (OperatorError& error) {
      PyErr_SetString(error.type, error.what());
    } catch (const Error& error) {
      set_error(error);
    }
  });
  set_error_translator(&throw_from_operator);
  set_around_faults([]() -> std::shared_ptr<void> {
    return Py_IsInitialized() && !is_finalizing() && PyGILState_Check() ? std::make_shared<py::gil_scoped_release>()
                                                                        : nullptr;
  });
}

/// An init scope that Python enters and leaves, possibly several times.
class PythonScope {
 public:
  explicit PythonScope(std::shared_ptr<Space> space) : space_(std::move(space)) {}
  ~PythonScope() {
    if (scope_) scope_->abandon();  // nobody has left it: the program ends, or its __enter__ failed
  }
  PythonScope(PythonScope&&) = default;
  PythonScope& operator=(PythonScope&&) = default;
  void enter() { scope_ = std::unique_ptr<InitScope>(new InitScope(space_->enter())); }
  void leave(bool failed) {
    const auto scope = std::exchange(scope_, nullptr);
    failed ? scope->abandon() : scope->leave();
  }

 private:
  std::shared_ptr<Space> space_;
  std::unique_ptr<InitScope> scope_;
};

void bind_report(py::module_& module) {
  py::class_<Report::Home>(module, "Home")
      .def_readonly("role", &Report::Home::role)
      .def_readonly("tier", &Report::Home::tier)
      .def_readonly("now", &Report::Home::now)
      .def_readonly("peak", &Report::Home::peak);
  py::class_<Report::Memory>(module, "Memory")
      .def_readonly("name", &Report::Memory::name)
      .def_readonly("now", &Report::Memory::now)
      .def_readonly("peak", &Report::Memory::peak)
      .def_readonly("limit", &Report::Memory::limit);
  py::class_<Report>(module, "Report")
      .def_readonly("homes", &Report::homes)
      .def_readonly("budgets", &Report::budgets)
      .def_readonly("faults", &Report::faults)
      .def_readonly("evictions", &Report::evictions)
      .def_readonly("read_bytes", &Report::read_bytes)
      .def_readonly("written_bytes", &Report::written_bytes)
      .def_readonly("uploaded_bytes", &Report::uploaded_bytes)
      .def_readonly("downloaded_bytes", &Report::downloaded_bytes)
      .def_readonly("swap_bytes", &Report::swap_bytes)
      .def_readonly("file_bytes", &Report::file_bytes)
      .def_readonly("waited_total", &Report::waited_total)
      .def_readonly("waited_for_disk", &Report::waited_for_disk)
      .def_readonly("waited_for_upload", &Report::waited_for_upload)
      .def_readonly("waited_for_gather", &Report::waited_for_gather)
      .def_readonly("waited_for_memory", &Report::waited_for_memory)
      .def_readonly("waited_for_device", &Report::waited_for_device)
      .def_readonly("waited_for_ranks", &Report::waited_for_ranks)
      .def_readonly("waited_for_threads", &Report::waited_for_threads)
      .def_readonly("waited_for_checkpoint", &Report::waited_for_checkpoint)
      .def_readonly("update_seconds", &Report::update_seconds)
      .def_readonly("copy_seconds", &Report::copy_seconds)
      .def_readonly("overhead_seconds", &Report::overhead_seconds)
      .def_readonly("ranks", &Report::ranks)
      .def_readonly("peers", &Report::peers)
      .def_readonly("gathered_bytes", &Report::gathered_bytes)
      .def_readonly("sent_inside_nodes", &Report::sent_inside_nodes)
      .def_readonly("reduced_bytes", &Report::reduced_bytes)
      .def_readonly("broadcast_bytes", &Report::broadcast_bytes)
      .def_readonly("control_bytes", &Report::control_bytes)
      .def_readonly("nonfinite_grads", &Report::nonfinite_grads)
      .def_readonly("updated_in_host", &Report::updated_in_host)
      .def_readonly("updated_on_device", &Report::updated_on_device)
      .def_readonly("early_updates", &Report::early_updates)
      .def_readonly("updates_committed", &Report::updates_committed)
      .def_readonly("previews", &Report::previews)
      .def_readonly("wasted_bytes", &Report::wasted_bytes)
      .def_readonly("collectives", &Report::collectives)
      .def_readonly("read_by_peers", &Report::read_by_peers)
      .def_readonly("network_seconds", &Report::network_seconds)
      .def_readonly("waited_for_network", &Report::waited_for_network)
      .def_readonly("io", &Report::io)
      .def_readonly("unpaged_operators", &Report::unpaged_operators);
}

/// Books the time of a `with` block to checkpoints.
class CheckpointTime {
 public:
  void enter() { booking_.emplace(&BookedTime::of_no_space(), Spent::checkpoint); }
  void leave() { booking_.reset(); }

 private:
  std::optional<Booking> booking_;
};

using PieceTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint32_t>;  // like Piece

std::vector<PieceTuple> tuples_of(const std::vector<Piece>& pieces) {
  std::vector<PieceTuple> tuples;
  for (const Piece& piece : pieces) tuples.emplace_back(piece.begin, piece.bytes, piece.crc);
  return tuples;
}

void bind_tensor_files(py::module_& module) {
  py::class_<CheckpointTime>(module, "CheckpointTime")
      .def(py::init<>())
      .def("__enter__", &CheckpointTime::enter)
      .def("__exit__", [](CheckpointTime& time, const py::args&) { time.leave(); });
  py::class_<TensorFileWriter>(module, "TensorFileWriter")
      .def(py::init<const std::string&, std::uint64_t>(), py::arg("path"), py::arg("bytes"))
      .def(
          "write_bytes",
          [](TensorFileWriter& file, std::uint64_t offset, const py::bytes& data) {
            const std::string_view view = data;
            file.write_bytes(offset, std::as_bytes(std::span(view)));
          },
          py::arg("offset"), py::arg("data"))
      .def(
          "write",
          [](TensorFileWriter& file, const std::vector<std::pair<at::Tensor, std::uint64_t>>& tensors) {
            std::vector<Placed> placed;
            for (const auto& [tensor, offset] : tensors) placed.push_back({tensor, offset});
            std::vector<std::vector<PieceTuple>> pieces;
            for (const auto& of_tensor : file.write(placed)) pieces.push_back(tuples_of(of_tensor));
            return pieces;
          },
          py::arg("tensors"), py::call_guard<py::gil_scoped_release>())
      .def(
          "write_whole",
          [](TensorFileWriter& file, const at::Tensor& tensor, std::uint64_t offset) {
            return tuples_of(file.write_whole(tensor, offset));
          },
          py::arg("tensor"), py::arg("offset"), py::call_guard<py::gil_scoped_release>())
      .def("flush", &TensorFileWriter::flush, py::call_guard<py::gil_scoped_release>())
      .def("finish", &TensorFileWriter::finish, py::call_guard<py::gil_scoped_release>());
  py::class_<Snapshot, std::shared_ptr<Snapshot>>(module, "Snapshot")
      .def(py::init([](const std::vector<std::tuple<at::Tensor, std::size_t, std::uint64_t>>& items) {
             std::vector<Snapshot::Item> taken;
             for (const auto& [tensor, file, offset] : items) taken.push_back({tensor, file, offset});
             return Snapshot::take(taken);
           }),
           py::arg("items"), py::call_guard<py::gil_scoped_release>())
      .def(
          "write",
          [](Snapshot& snapshot, const std::vector<std::string>& paths) {
            std::vector<std::vector<PieceTuple>> pieces;
            for (const auto& of_item : snapshot.write(paths)) pieces.push_back(tuples_of(of_item));
            return pieces;
          },
          py::arg("paths"), py::call_guard<py::gil_scoped_release>())
      .def(
          "complete", [](Snapshot& snapshot) { snapshot.complete(); }, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("written", &Snapshot::written);
  py::class_<TensorFolderReader>(module, "TensorFolderReader")
      .def(py::init<std::string>(), py::arg("folder"))
      .def(
          "read",
          [](TensorFolderReader& folder, const std::string& file, const at::Tensor& tensor, std::uint64_t offset,
             at::ScalarType dtype, const std::vector<PieceTuple>& tuples, const std::string& name) {
            std::vector<Piece> pieces;
            for (const auto& [begin, bytes, crc] : tuples) pieces.push_back({begin, bytes, crc});
            folder.read(file, tensor, offset, dtype, pieces, name);
          },
          py::arg("file"), py::arg("tensor"), py::arg("offset"), py::arg("dtype"), py::arg("pieces"), py::arg("name"),
          py::call_guard<py::gil_scoped_release>());
}

/// On a thread that has entered it, time is the machine's.
class PlannedMachine final : public Machine {
 public:
  using Machine::Machine;
  void enter() { entered_.emplace(clock); }
  void leave() { entered_.reset(); }
  double now() const { return std::chrono::duration<double>(clock.now().time_since_epoch()).count(); }

 private:
  std::optional<VirtualClock::Entered> entered_;
};

void bind_machine(py::module_& module) {
  py::class_<MachineSpeeds>(module, "MachineSpeeds")
      .def(py::init<>())
      .def_readwrite("disk_read", &MachineSpeeds::disk_read)
      .def_readwrite("disk_write", &MachineSpeeds::disk_write)
      .def_readwrite("disk_latency", &MachineSpeeds::disk_latency)
      .def_readwrite("disk_bytes", &MachineSpeeds::disk_bytes)
      .def_readwrite("disk_beside", &MachineSpeeds::disk_beside)
      .def_readwrite("upload", &MachineSpeeds::upload)
      .def_readwrite("download", &MachineSpeeds::download)
      .def_readwrite("link_latency", &MachineSpeeds::link_latency)
      .def_readwrite("memory", &MachineSpeeds::memory)
      .def_readwrite("update", &MachineSpeeds::update)
      .def_readwrite("copy", &MachineSpeeds::copy)
      .def_readwrite("device_memory", &MachineSpeeds::device_memory)
      .def_readwrite("network", &MachineSpeeds::network)
      .def_readwrite("network_latency", &MachineSpeeds::network_latency)
      .def_readwrite("is_unified", &MachineSpeeds::is_unified)
      .def_readwrite("launch", &MachineSpeeds::launch)
      .def_readwrite("device_bytes", &MachineSpeeds::device_bytes)
      .def_readwrite("host_bytes", &MachineSpeeds::host_bytes);
  py::class_<Machine, std::shared_ptr<Machine>>(module, "_Machine");
  py::class_<PlannedMachine, Machine, std::shared_ptr<PlannedMachine>>(module, "Machine")
      .def(py::init<const MachineSpeeds&>(), py::arg("speeds"))
      .def("enter", &PlannedMachine::enter)
      .def("leave", &PlannedMachine::leave)
      .def("compute", &Machine::compute, py::arg("seconds"))
      .def("synchronize", &Machine::synchronize)
      .def_property_readonly("now", &PlannedMachine::now)
      .def_readonly("computed_seconds", &Machine::computed_seconds)
      .def_readonly("updated_seconds", &Machine::updated_seconds)
      .def_readonly("idle_for_link", &Machine::idle_for_link)
      .def_readonly("idle_for_network", &Machine::idle_for_network)
      .def_property_readonly("disk_seconds", [](const Machine& m) { return m.disk.busy_seconds(); })
      .def_property_readonly("upload_seconds", [](const Machine& m) { return m.uploads.busy_seconds(); })
      .def_property_readonly("download_seconds", [](const Machine& m) { return m.downloads.busy_seconds(); })
      .def_property_readonly("network_seconds", [](const Machine& m) { return m.network.busy_seconds(); });
}

/// A parameter whose gradient Python reads and sets.
class PythonOuter final : public Outer {
 public:
  PythonOuter(py::function get, py::function set) : get_(std::move(get)), set_(std::move(set)) {}
  ~PythonOuter() override {
    if (!Py_IsInitialized() || is_finalizing()) {
      get_.release(), set_.release();
      return;
    }
    const py::gil_scoped_acquire gil;
    py::object(std::move(get_)), py::object(std::move(set_));
  }
  at::Tensor gradient() const override {
    const py::gil_scoped_acquire gil;
    const py::object found = get_();
    return found.is_none() ? at::Tensor() : found.cast<at::Tensor>();
  }
  void set_gradient(const at::Tensor& gradient) const override {
    const py::gil_scoped_acquire gil;
    gradient.defined() ? set_(gradient) : set_(py::none());
  }

 private:
  py::function get_, set_;
};

void bind_spaces(py::module_& module) {
  py::class_<Config>(module, "Config").def(py::init<>()).def("set", &Config::set).def("items", &Config::items);

  py::class_<PythonScope>(module, "Scope")
      .def("enter", &PythonScope::enter, py::call_guard<py::gil_scoped_release>())
      .def("leave", &PythonScope::leave, py::arg("failed"), py::call_guard<py::gil_scoped_release>());

  py::class_<SavedTensor, std::shared_ptr<SavedTensor>>(module, "SavedTensor")
      .def("open", &SavedTensor::open, py::call_guard<py::gil_scoped_release>());
  py::class_<Activations, std::shared_ptr<Activations>>(module, "Activations")
      .def("save", &Activations::save, py::arg("tensor"), py::call_guard<py::gil_scoped_release>())
      .def("close", &Activations::close)
      .def_property_readonly("is_open", &Activations::is_open);
  py::class_<Space::Lifetime>(module, "Lifetime").def_property_readonly("is_over", &Space::Lifetime::is_over);
  py::class_<Space, std::shared_ptr<Space>>(module, "Space")
      .def("lifetime", &Space::lifetime)
      .def(py::init([](const Config& config, const std::string& shard, const std::string& replica,
                       const std::string& node) {
             const auto group = [](const std::string& name) {
               return name.empty() ? nullptr : c10d::resolve_process_group(name);
             };
             return Space::make(config, {group(shard), group(replica), group(node), /*keep=*/false},
                                Frontend::python);
           }),
           py::arg("config"), py::arg("shard_group") = "", py::arg("replica_group") = "", py::arg("node_group") = "",
           py::call_guard<py::gil_scoped_release>())
      .def_static("planned", &Space::make_planned, py::arg("config"), py::arg("machine"), py::arg("ranks") = 1)
      .def("scope", [](const std::shared_ptr<Space>& space) { return PythonScope(space); })
      .def(
          "page", [](Space& space, at::Tensor tensor) { return space.page(tensor); }, py::arg("tensor"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "page_inner",
          [](Space& space, at::Tensor tensor, py::function get, py::function set) {
            auto outer = std::make_shared<const PythonOuter>(std::move(get), std::move(set));
            const py::gil_scoped_release no_gil;
            return space.page_inner(tensor, std::move(outer));
          },
          py::arg("tensor"), py::arg("get"), py::arg("set"))
      .def(
          "keep_whole", [](Space& space, at::Tensor tensor) { space.keep_whole(tensor); }, py::arg("tensor"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "mix", [](Space& space, at::Tensor parameter) { return space.mix(parameter); }, py::arg("parameter"),
          py::call_guard<py::gil_scoped_release>())
      .def("unpaged_operators", &Space::unpaged_operators, py::call_guard<py::gil_scoped_release>())
      .def(
          "set_groups",
          [](Space& space, const std::string& gathers, const std::string& sums, const std::string& checks) {
            space.set_groups(c10d::resolve_process_group(gathers), c10d::resolve_process_group(sums),
                             c10d::resolve_process_group(checks));
          },
          py::arg("gathers"), py::arg("sums"), py::arg("checks"), py::call_guard<py::gil_scoped_release>())
      .def("start_equal", &Space::start_equal, py::call_guard<py::gil_scoped_release>())
      .def("activations", &Space::activations)
      .def("synchronize", &Space::synchronize, py::call_guard<py::gil_scoped_release>())
      .def("close", &Space::close, py::call_guard<py::gil_scoped_release>())
      .def("report", &Space::report)
      .def("holds", &Space::holds, py::arg("tensor"))
      .def_property_readonly("config", &Space::config);
}

void bind_pins(py::module_& module) {
  py::class_<TensorPin>(module, "TensorPin")
      .def("release", &TensorPin::release, py::call_guard<py::gil_scoped_release>());
  py::class_<RawPin>(module, "RawPin").def("release", &RawPin::release, py::call_guard<py::gil_scoped_release>());
  py::class_<RegionPin>(module, "RegionPin")
      .def("release", &RegionPin::release, py::call_guard<py::gil_scoped_release>())
      .def("drop", &RegionPin::drop, py::call_guard<py::gil_scoped_release>());
  module.def(
      "hold_for_region",
      [](const std::vector<at::Tensor>& tensors, const std::vector<bool>& writes) {
        return std::make_unique<RegionPin>(tensors, writes);
      },
      py::arg("tensors"), py::arg("writes"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "pin",
      [](const at::Tensor& tensor, bool write) {
        return std::make_unique<RawPin>(tensor, write ? Access::write : Access::read);
      },
      py::arg("tensor"), py::arg("write") = true, py::call_guard<py::gil_scoped_release>());
  module.def(
      "hold", [](const std::vector<at::Tensor>& tensors) { return std::make_unique<TensorPin>(hold(tensors)); },
      py::call_guard<py::gil_scoped_release>());
}

void bind_steps(py::module_& module) {
  module.def("keep_same", [](const at::Tensor& parameter) {
    if (auto* segment = segment_of(parameter); segment && !segment->is_own()) segment->set_keeps_same(true);
  });
  module.def("forget_leaf", &forget_leaf);
  module.def("take_data", &take_data, py::call_guard<py::gil_scoped_release>());
  module.def("inner_gradient", &inner_gradient, py::arg("leaf"), py::arg("gradient"),
             py::call_guard<py::gil_scoped_release>());
  module.def("take_gradient", &take_gradient, py::call_guard<py::gil_scoped_release>());
  module.def(
      "accumulate_here",
      [](const std::vector<at::Tensor>& parameters, bool here) { return accumulate_here(parameters, here); },
      py::arg("parameters"), py::arg("here"), py::call_guard<py::gil_scoped_release>());
  module.def("announce_steps", &announce_steps);
  py::class_<StepScope>(module, "StepScope").def(py::init<>());
  py::class_<SameValues>(module, "SameValues").def(py::init<bool>(), py::arg("all_ranks") = true);
  py::class_<OutsideSteps>(module, "OutsideSteps").def(py::init<>());
  module.def(
      "before_step",
      [](const std::vector<at::Tensor>& parameters, bool has_closure) {
        return before_step(parameters, has_closure);
      },
      py::arg("parameters"), py::arg("has_closure") = false, py::call_guard<py::gil_scoped_release>());
  module.def(
      "note_states", [](const std::vector<at::Tensor>& states) { note_states(states); },
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "step_ended", [](const std::vector<at::Tensor>& parameters) { step_ended(parameters); },
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "note_step",
      [](const std::vector<at::Tensor>& parameters, std::int64_t optimizer, StepNumbers numbers) {
        note_step(parameters, optimizer, std::move(numbers));
      },
      py::call_guard<py::gil_scoped_release>());
  module.def("set_next_numbers", [](py::function next) {
    // Never destroyed: autograd's threads may call it until the process ends.
    auto* const kept = new py::function(std::move(next));
    set_next_numbers([kept](std::int64_t optimizer) {
      const py::gil_scoped_acquire gil;
      return (*kept)(optimizer).cast<StepNumbers>();
    });
  });
  py::class_<WidenedGradients>(module, "WidenedGradients")
      .def(py::init([](const std::vector<at::Tensor>& parameters) {
             return std::make_unique<WidenedGradients>(parameters);
           }),
           py::arg("parameters"), py::call_guard<py::gil_scoped_release>())
      .def("narrow", &WidenedGradients::narrow, py::call_guard<py::gil_scoped_release>());
  module.def("settle_gradients", &settle_gradients, py::call_guard<py::gil_scoped_release>());
  module.def("expect_end_of_backward", &expect_end_of_backward, py::call_guard<py::gil_scoped_release>());
}

void bind_watching(py::module_& module) {
  module.def("tensor_heap_bytes", &tensor_heap_bytes);
  module.def("available_memory", [] { return available_memory(); });
  py::class_<LongWait>(module, "LongWait")
      .def_readonly("number", &LongWait::number)
      .def_readonly("what", &LongWait::what)
      .def_readonly("details", &LongWait::details)
      .def_readonly("activity", &LongWait::activity)
      .def_readonly("seconds", &LongWait::seconds);
  module.def("long_waits",
             &LongWait::under_way);  // keeps the interpreter's lock: a daemon thread must not have to take it again
  module.def("start_trace", &Trace::start);
  module.def("stop_trace", &Trace::stop, py::call_guard<py::gil_scoped_release>());
  module.def("trace_span", [](const std::string& category, const std::string& name, const std::string& args) {
    const auto now = Trace::Clock::now();
    Trace::span(category, name, now, now, args);
  });
}

void bind_tensors(py::module_& module) {
  py::class_<Kept>(module, "Kept")
      .def_readonly("role", &Kept::role)
      .def_readonly("tier", &Kept::tier)
      .def_readonly("is_partitioned", &Kept::is_partitioned)
      .def_readonly("visible", &Kept::visible)
      .def_readonly("master", &Kept::master)
      .def_readonly("run", &Kept::run);
  module.def("kept", &kept, py::call_guard<py::gil_scoped_release>());
  module.def("is_paged", &is_paged);
  module.def("exchange_paths", &exchange_paths);
  module.def(
      "own_ranges",
      [](const at::Tensor& tensor) {
        std::optional<std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>> tuples;
        const auto ranges = own_ranges(tensor);
        if (ranges) tuples.emplace();
        for (std::size_t i = 0; ranges && i < ranges->size(); ++i) {
          tuples->emplace_back((*ranges)[i].begin, (*ranges)[i].end, (*ranges)[i].at);
        }
        return tuples;
      },
      py::call_guard<py::gil_scoped_release>());
  module.def("own_share", &own_share, py::arg("tensor"), py::arg("write"), py::call_guard<py::gil_scoped_release>());
  module.def("number_of", &number_of);
  module.def("in_one_space", &in_one_space);
  module.def("is_quantised", &is_quantised);
  module.def("dtype_of_states", &dtype_of_states);
  module.def("most_precise", &most_precise, py::call_guard<py::gil_scoped_release>());
  module.def("quantise_moment", &quantise_moment, py::call_guard<py::gil_scoped_release>());
  module.def("saved", &saved, py::call_guard<py::gil_scoped_release>());
  module.def(
      "page_like", [](at::Tensor tensor, const at::Tensor& other) { return page_like(tensor, other); },
      py::call_guard<py::gil_scoped_release>());
  module.def("ranks_of", &ranks_of);
  module.def("evict", &evict, py::call_guard<py::gil_scoped_release>());
  module.def("plain_copy", &plain_copy, py::call_guard<py::gil_scoped_release>());
  module.def("virtual_address", &virtual_address);
  module.def("storage_address", [](const at::Storage& storage) {
    const auto* segment = segment_of(*storage.unsafeGetStorageImpl());
    return segment ? segment->virtual_address() : 0;
  });
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  bind_exceptions(module);
  bind_report(module);
  bind_tensor_files(module);
  bind_io(module);
  bind_machine(module);
  bind_spaces(module);
  bind_pins(module);
  bind_steps(module);
  bind_watching(module);
  bind_tensors(module);
  module.attr("built_for_torch") = TORCH_VERSION;
}
