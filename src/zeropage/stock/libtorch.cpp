// Calls of C++ programs in libtorch that no operator shows: tensor.set_data(), the archives of torch::save() and
// torch::load(), TorchScript's files, and an address that a paged tensor does not have. It has no header: linking the
// library is enough.
//
// [Note: interposition] libtorch has no hook for these calls. It calls the functions below through its table of
// dynamic symbols, where the first library that defines a name wins. A program whose link line names zeropage before
// torch gets ours, which do what torch's do and add what paged tensors need. In Python torch is loaded first, so
// torch's stay; the package has hooks of its own there.
#include <ATen/core/VariableHooksInterface.h>
#include <ATen/ops/from_blob.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/import_read.h>
#include <torch/csrc/jit/serialization/pickler_helper.h>

#include <unordered_set>
#include <vector>

#include "zeropage/base/errors.h"
#include "zeropage/base/units.h"
#include "zeropage/space/frontend.h"
#include "zeropage/space/space.h"
#include "zeropage/stock/of_torch.h"
#include "zeropage/store/file_memory.h"
#include "zeropage/tensor/leaves.h"
#include "zeropage/tensor/paged_tensor.h"
#include "zeropage/train/gradients.h"

namespace zeropage {
namespace {

constexpr std::size_t kChunk = 4 * kMiB;

/// Keeps a paged tensor in its space when the program gives it other data.
class StaysPaged {
 public:
  explicit StaysPaged(const at::TensorBase& tensor) {
    const auto* segment = segment_of(tensor);
    if (!segment) return;
    domain_ = segment->domain();
    role_ = segment->role();
    number_ = segment->number();
  }

  void follow(const at::TensorBase& self, const at::TensorBase& data) {
    if (!domain_ || segment_of(self)) return;
    at::Tensor tensor(self);
    if (domain_->partition.ranks) take_data(tensor);
    page_data(domain_, tensor, at::Tensor(data), role_, number_);
  }

 private:
  std::shared_ptr<Domain> domain_;
  Role role_ = Role::parameter;
  std::uint64_t number_ = 0;
};

/// The paged content of a storage, at an address, for as long as the result lives. Content that no budget can hold
/// whole goes through a file.
at::Tensor bytes_of(const at::Tensor& tensor) {
  auto& segment = *segment_of(tensor);
  const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
  const auto options = at::TensorOptions().dtype(at::kByte).device(tensor.device());
  try {
    auto pin = std::make_shared<RawPin>(tensor, Access::read);
    const void* const at = tensor.storage().data();
    return at::from_blob(const_cast<void*>(at), {bytes}, [pin](void*) {}, options, tensor.device());
  } catch (const BudgetError&) {
    if (segment.domain()->archive_folder.empty() || segment.is_partitioned() || !tensor.is_cpu()) throw;
  }
  auto memory = std::make_shared<FileMemory>(segment.domain()->archive_folder, bytes);
  segment.refresh(Access::read);
  for (std::size_t i = 0, at = 0; at < memory->bytes(); ++i, at += segment.page_bytes()) {
    PagePin page = segment.cache()->pin_page(segment, i, Access::read);
    page.wait();
    memory->write(at, page.data(), std::min(segment.bytes_of(i), memory->bytes() - at));
  }
  void* const at = memory->address();
  return at::from_blob(at, {bytes}, [memory](void*) {}, options);
}

/// Throws Error if an archive would hold only the rounded copy of a parameter that has a master.
void refuse_to_lose_master(const at::Tensor& tensor) {
  const auto& segment = *segment_of(tensor);
  if (!segment.master().defined() || !segment.domain()->saves_masters) return;
  throw Error(std::string("torch::save would write the ") + c10::toString(tensor.scalar_type()) +
              " copy of a parameter and lose its master: use zeropage::save, or set state_dict = \"compute\" to save "
              "such copies");
}

/// Pages loaded tensors, inside a scope.
class Loaded {
 public:
  explicit Loaded(std::shared_ptr<Domain> domain) : domain_(std::move(domain)) {}

  void page(const c10::IValue& loaded) {
    const bool is_optimizer = loaded.isObject() && loaded.toObject()->type()->hasAttribute("param_groups");
    role_ = is_optimizer ? Role::optimizer : Role::parameter;
    loaded.visit([this](const c10::IValue& value) {
      if (!value.isTensor()) return false;
      at::Tensor tensor = value.toTensor();
      if (!tensor.defined() || !seen_.insert(tensor.unsafeGetTensorImpl()).second) return true;
      page_data(domain_, tensor, {}, role_, /*number=*/0);
      return true;
    });
  }

 private:
  std::shared_ptr<Domain> domain_;
  Role role_ = Role::parameter;
  std::unordered_set<const void*> seen_;
};

}  // namespace
}  // namespace zeropage

// --- in place of libtorch's ---

void at::TensorBase::set_data(const at::TensorBase& new_data) const {
  zeropage::StaysPaged paged(*this);
  at::impl::GetVariableHooks()->set_data(*this, new_data);
  paged.follow(*this, new_data);
}

void c10::StorageImpl::throw_data_ptr_access_error() const {
  if (zeropage::segment_of(const_cast<c10::StorageImpl&>(*this))) {
    throw zeropage::AccessError(
        "a paged tensor has no address outside of operators; hold it with zeropage::pin(tensor) while code reads or "
        "writes its memory");
  }
  using Throws = void(const c10::StorageImpl*);
  zeropage::of_torch<Throws>("_ZNK3c1011StorageImpl27throw_data_ptr_access_errorEv")(this);
  std::abort();
}

torch::jit::WriteableTensorData torch::jit::getWriteableTensorData(const at::Tensor& tensor, bool to_cpu) {
  using Gets = torch::jit::WriteableTensorData(const at::Tensor&, bool);
  if (!zeropage::is_paged(tensor)) {
    return zeropage::of_torch<Gets>("_ZN5torch3jit22getWriteableTensorDataERKN2at6TensorEb")(tensor, to_cpu);
  }
  zeropage::refuse_to_lose_master(tensor);
  torch::jit::WriteableTensorData result;
  result.size_ = tensor.storage().nbytes();
  result.tensor_ = zeropage::bytes_of(tensor);
  if (to_cpu && !tensor.is_cpu()) result.tensor_ = result.tensor_.cpu();
  return result;
}

std::tuple<at::DataPtr, std::size_t> caffe2::serialize::PyTorchStreamReader::getRecord(
    const std::string& name, std::optional<at::Allocator*> allocator) {
  using Gets =
      std::tuple<at::DataPtr, std::size_t>(PyTorchStreamReader*, const std::string&, std::optional<at::Allocator*>);
  static auto* const get = zeropage::of_torch<Gets>(
      "_ZN6caffe29serialize19PyTorchStreamReader9getRecordERKNSt7__cxx1112basic_stringIcSt11char_"
      "traitsIcESaIcEEESt8opti"
      "onalIPN3c109AllocatorEE");
  const auto domain = allocator ? nullptr : zeropage::newest_domain();
  if (!domain || domain->archive_folder.empty() || name.ends_with(".debug_pkl")) return get(this, name, allocator);
  const std::size_t bytes = getRecordSize(name);
  if (bytes < std::max<std::size_t>(domain->min_page_bytes, 1)) return get(this, name, allocator);
  std::unique_ptr<zeropage::FileMemory> memory;
  try {
    memory = std::make_unique<zeropage::FileMemory>(domain->archive_folder, bytes);
  } catch (const zeropage::DiskError&) {  // the archive may have nothing to do with that space
    return get(this, name, allocator);
  }
  auto* const begin = static_cast<char*>(memory->address());
  std::vector<char> chunk(std::min(bytes, zeropage::kChunk));
  const auto write = [&](void* to, const void* from, std::size_t length) {
    memory->write(static_cast<std::size_t>(static_cast<char*>(to) - begin), from, length);
  };
  getRecord(name, begin, bytes, chunk.size(), chunk.data(), write);
  return {at::DataPtr(begin, memory.release(), &zeropage::FileMemory::free, at::kCPU), bytes};
}

c10::IValue torch::jit::readArchiveAndTensors(const std::string& archive_name, const std::string& pickle_prefix,
                                              const std::string& tensor_prefix,
                                              std::optional<TypeResolver> type_resolver,
                                              std::optional<ObjLoader> obj_loader, std::optional<at::Device> device,
                                              caffe2::serialize::PyTorchStreamReader& stream_reader,
                                              c10::TypePtr (*type_parser)(const std::string&),
                                              std::shared_ptr<DeserializationStorageContext> storage_context) {
  using Reads = decltype(torch::jit::readArchiveAndTensors);
  static auto* const read = zeropage::of_torch<Reads>(
      "_ZN5torch3jit21readArchiveAndTensorsERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEES8_S8_"
      "St8optionalISt8"
      "functionIFN3c1013StrongTypePtrERKNSB_13QualifiedNameEEEES9_ISA_IFNSB_13intrusive_ptrINSB_6ivalue6ObjectENSB_"
      "6det"
      "ail34intrusive_target_default_null_typeISL_EEEERKSC_NSB_6IValueEEEES9_INSB_"
      "6DeviceEERN6caffe29serialize19PyTorch"
      "StreamReaderEPFNSB_4Type24SingletonOrSharedTypePtrIS12_EES8_ESt10shared_ptrINS0_"
      "29DeserializationStorageContextEE");
  c10::IValue loaded = read(archive_name, pickle_prefix, tensor_prefix, std::move(type_resolver),
                            std::move(obj_loader), device, stream_reader, type_parser, std::move(storage_context));
  if (const auto& domain = zeropage::scope_domain()) zeropage::Loaded(domain).page(loaded);
  return loaded;
}
