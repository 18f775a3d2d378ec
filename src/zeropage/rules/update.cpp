#include "zeropage/rules/update.h"

#include <ATen/Version.h>

#include "zeropage/rules/quantised.h"

namespace zeropage {
namespace {

using Kind = Instruction::Kind;

/// The value of a scalar, a tensor of one element, or a list of one of these.
std::optional<double> number_of(const c10::IValue& value) {
  const OutsideModes unseen;
  if (value.isTensor() && value.toTensor().defined()) return number_of(value.toTensor().item());
  if (value.isScalar() && !value.isComplexDouble()) return value.toScalar().to<double>();
  if (value.isList() && value.toListRef().size() == 1) return number_of(value.toListRef()[0]);
  return std::nullopt;
}

/// Arguments that are no operands, by name. Absent integers and flags are 0.
class Numbers {
 public:
  explicit Numbers(const Instruction& instruction) : instruction_(instruction) {}

  std::optional<double> number(std::string_view name) const {
    const int i = instruction_.argument(name);
    if (i < 0 || instruction_.call.operand_of[i] >= 0) return std::nullopt;
    return number_of(instruction_.call.arguments[i]);
  }
  std::int64_t integer(std::string_view name) const {
    const int i = instruction_.argument(name);
    return i >= 0 && instruction_.call.arguments[i].isInt() ? instruction_.call.arguments[i].toInt() : 0;
  }
  bool flag(std::string_view name) const {
    const int i = instruction_.argument(name);
    return i >= 0 && instruction_.call.arguments[i].isBool() && instruction_.call.arguments[i].toBool();
  }

 private:
  const Instruction& instruction_;
};

/// The number of floats that PyTorch's fused kernels compute at once here; 0 if ours might give other bits. PyTorch
/// builds them for AVX2, and uses these on machines with AVX-512 too.
std::size_t torch_vector() {
  static const bool vectors = [] {
    const std::string capability = at::get_cpu_capability();
    return capability == "AVX512" || capability == "AVX2";
  }();
  return vectors && kernels::instruction_set() != "baseline" ? 8 : 0;
}

/// Adds gradient *= number, or /=, as one more scale. False if it is something else.
bool add_scale(const Instruction& instruction, UpdateProgram& program) {
  if (instruction.kind != Kind::scale) return false;
  const Numbers numbers(instruction);
  auto number = numbers.number("other");
  for (const char* other : {"scalar", "scalars"}) {
    if (!number) number = numbers.number(other);
  }
  if (!number || program.update.scale_count == kernels::kMostScales) return false;
  program.update.scales[program.update.scale_count++] = {static_cast<float>(*number), instruction.divides()};
  if (program.gradient >= 0 && program.gradient != instruction.slots[0]) return false;
  program.update.store_gradient = true;
  program.gradient = instruction.slots[0];
  return true;
}

bool add_rule(const Instruction& instruction, UpdateProgram& program) {
  const Numbers arguments(instruction);
  const kernels::Rule rule = *instruction.rule;
  kernels::Update& u = program.update;
  if (arguments.number("found_inf").value_or(0) != 0) return false;
  const int gradient = instruction.slot("grads");
  if (program.gradient >= 0 && program.gradient != gradient) return false;
  program.gradient = gradient;
  const int parameter = instruction.slot("self");
  if (program.high >= 0 && program.parameter != parameter) return false;
  program.parameter = parameter;
  if (const auto scale = arguments.number("grad_scale")) {
    if (u.scale_count == kernels::kMostScales) return false;
    u.scales[u.scale_count++] = {static_cast<float>(*scale), true};
    u.store_gradient = true;
  }
  u.rule = rule;
  u.lr = arguments.number("lr").value_or(0);
  u.weight_decay = arguments.number("weight_decay").value_or(0);
  u.eps = arguments.number("eps").value_or(0);
  u.beta1 = arguments.number("beta1").value_or(0);
  u.beta2 = arguments.number("beta2").value_or(0);
  u.momentum = arguments.number("momentum").value_or(0);
  u.dampening = arguments.number("dampening").value_or(0);
  u.lr_decay = arguments.number("lr_decay").value_or(0);
  u.step = arguments.number("state_steps").value_or(1);
  u.amsgrad = arguments.flag("amsgrad");
  u.maximize = arguments.flag("maximize");
  u.nesterov = arguments.flag("nesterov");
  u.first_momentum = arguments.flag("is_first_step");
  const char* const states[][3] = {{"exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"},
                                   {"exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"},
                                   {"momentum_buffer_list", "", ""},
                                   {"state_sums", "", ""},
                                   {"exp_avgs", "", ""}};
  for (int i = 0; i < 3; ++i) program.state[i] = instruction.slot(states[static_cast<int>(rule)][i]);
  const bool adam = rule == kernels::Rule::adam || rule == kernels::Rule::adamw;
  const int needed = adam ? 2 + u.amsgrad : rule == kernels::Rule::sgd ? u.momentum != 0 : 1;
  for (int i = 0; i < needed; ++i) {
    if (program.state[i] < 0) return false;
  }
  return program.parameter >= 0 && program.gradient >= 0;
}

/// gradient = widen(narrow).
bool add_widen(const Instruction& instruction, UpdateProgram& program) {
  if (instruction.kind != Kind::widen || program.gradient >= 0) return false;
  program.gradient = instruction.result;
  program.narrow = instruction.slots[0];
  program.update.store_gradient = true;
  return true;
}

/// visible.copy_(parameter).
bool add_visible(const Instruction& instruction, UpdateProgram& program) {
  if (instruction.kind != Kind::copy || program.visible >= 0) return false;
  if (instruction.slots[1] != program.parameter) return false;
  program.visible = instruction.slots[0];
  return true;
}

/// parameter = join_hi_lo(high, low).
bool add_join_hi_lo(const Instruction& instruction, UpdateProgram& program) {
  if (instruction.kind != Kind::join_hi_lo || program.high >= 0) return false;
  program.parameter = instruction.result;
  program.high = instruction.slots[0];
  program.low = instruction.slots[1];
  return true;
}

/// split_hi_lo_(high, low, parameter).
bool ends_in_split_hi_lo(const Instruction& instruction, const UpdateProgram& program) {
  return instruction.kind == Kind::split_hi_lo && instruction.slots[0] == program.high &&
         instruction.slots[1] == program.low && instruction.slots[2] == program.parameter;
}

/// A dequantised state that is not encoded again yet, with the slot of its value.
struct Dequantised {
  int value;
  UpdateProgram::Quantised from;
};

bool add_decode(const Instruction& instruction, std::vector<Dequantised>& dequantised) {
  if (instruction.kind != Kind::decode) return false;
  const Numbers arguments(instruction);
  const int scales = instruction.slot("scales");
  const auto format = format_of_codes(scales >= 0, arguments.flag("is_signed"));
  dequantised.push_back({instruction.result, {instruction.slot("codes"), scales, format, 0}});
  return true;
}

/// Adds the encoding of a dequantised state back to its codes.
bool add_encode(const Instruction& instruction, std::vector<Dequantised>& dequantised, UpdateProgram& program) {
  if (instruction.kind != Kind::encode) return false;
  const Numbers arguments(instruction);
  const int value = instruction.slot("value");
  const auto from = std::find_if(dequantised.begin(), dequantised.end(), [&](const Dequantised& d) {
    return d.value == value && d.from.codes == instruction.slot("codes");
  });
  if (from == dequantised.end()) return false;
  for (int i = 0; i < 3; ++i) {
    if (program.state[i] != value) continue;
    program.quantised[i] = from->from;
    program.quantised[i].seed = static_cast<std::uint32_t>(arguments.integer("seed"));
    dequantised.erase(from);
    return true;
  }
  return false;
}

kernels::Array array_of(const at::Tensor& tensor) {
  const c10::ScalarType dtype = tensor.scalar_type();
  const kernels::Format format = dtype == c10::kFloat      ? kernels::Format::float32
                                 : dtype == c10::kBFloat16 ? kernels::Format::bfloat16
                                                           : kernels::Format::float16;
  return {format, tensor.mutable_data_ptr(), nullptr};
}

}  // namespace

std::optional<UpdateProgram> as_update(c10::ArrayRef<Instruction> instructions,
                                       c10::function_ref<c10::ScalarType(int)> dtype_of) {
  UpdateProgram program;
  program.update.vector = torch_vector();
  if (program.update.vector == 0) return std::nullopt;
  bool updated = false;
  bool stored = true;  // a joined parameter was split again
  std::vector<Dequantised> dequantised;
  for (const Instruction& instruction : instructions) {
    if (!updated && (add_decode(instruction, dequantised) || add_widen(instruction, program))) continue;
    if (updated && add_encode(instruction, dequantised, program)) continue;
    if (!updated && add_join_hi_lo(instruction, program)) {
      stored = false;
      continue;
    }
    if (updated && !stored && ends_in_split_hi_lo(instruction, program)) {
      stored = true;
      continue;
    }
    if (instruction.kind == Kind::update && !updated) {
      if (!add_rule(instruction, program)) return std::nullopt;
      updated = true;
    } else if (!(updated ? add_visible(instruction, program) : add_scale(instruction, program))) {
      return std::nullopt;
    }
  }
  if (!updated || !stored || !dequantised.empty()) return std::nullopt;
  for (const int slot : {program.parameter, program.gradient, program.state[0], program.state[1], program.state[2]}) {
    if (slot >= 0 && dtype_of(slot) != c10::kFloat) return std::nullopt;
  }
  if (program.visible >= 0 && !c10::isReducedFloatingType(dtype_of(program.visible))) return std::nullopt;
  return program;
}

std::size_t run_update(const UpdateProgram& program, c10::ArrayRef<at::Tensor> registers) {
  kernels::Arrays arrays;
  if (program.high >= 0) {
    arrays.parameter = {kernels::Format::hi_lo_float32, registers[program.high].mutable_data_ptr(),
                        registers[program.low].mutable_data_ptr()};
  } else {
    arrays.parameter = array_of(registers[program.parameter]);
  }
  if (registers[program.gradient].defined()) arrays.gradient = array_of(registers[program.gradient]);
  if (program.narrow >= 0) arrays.narrow_gradient = array_of(registers[program.narrow]);
  if (program.visible >= 0 && registers[program.visible].defined()) {
    arrays.visible = array_of(registers[program.visible]);
  }
  for (int i = 0; i < 3; ++i) {
    const UpdateProgram::Quantised& quantised = program.quantised[i];
    if (quantised.codes >= 0) {
      void* const scales = quantised.scales >= 0 ? registers[quantised.scales].mutable_data_ptr() : nullptr;
      arrays.state[i] = {quantised.format, registers[quantised.codes].mutable_data_ptr(), scales, quantised.seed};
    } else if (program.state[i] >= 0) {
      arrays.state[i] = array_of(registers[program.state[i]]);
    }
  }
  return kernels::update(program.update, arrays, 0,
                         registers[program.high >= 0 ? program.high : program.parameter].numel());
}

}  // namespace zeropage
