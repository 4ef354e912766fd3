#include "launch.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <unordered_map>

#include "python.h"

namespace late {

void add_span(const at::Tensor& t, bool write, std::vector<Span>& spans) {
  if (!t.numel()) return;
  ptrdiff_t item = ptrdiff_t(t.element_size()), last = 0;
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  char* lo = (char*)t.const_data_ptr();
  Span span{lo, lo + (last + 1) * item, write};
  // Rows of a matrix, or what folds to one: a stride, and inner dimensions that are dense.
  int64_t dense = 1, d = t.dim() - 1;
  while (d >= 0 && (t.size(d) == 1 || t.stride(d) == dense)) dense *= t.size(d--);
  if (d >= 0) {
    int64_t rows = t.size(d), stride = t.stride(d);
    bool folds = stride > dense;
    for (int64_t outer = d - 1; outer >= 0; outer--) {
      folds = folds && (t.size(outer) == 1 || t.stride(outer) == rows * stride);
      rows *= t.size(outer);
    }
    if (folds) {
      span.width = size_t(dense * item);
      span.stride = size_t(stride * item);
    }
  }
  spans.push_back(span);
}

void one_thread_each() { at::set_num_threads(1); }

// A plain tensor, whatever mode the program is in: tasks, and gloo's threads, write to it.
at::Tensor task_view(const at::Tensor& t) {
  c10::InferenceMode off(false);
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  at::Tensor view;
  if (t.numel()) {
    char* at = (char*)t.const_data_ptr();
    view = at::from_blob(at + rt().delta_of(at), t.sizes(), t.strides(), options);
  } else {
    view = at::detail::empty_strided_cpu(t.sizes(), t.strides(), options);
  }
  if (t.unsafeGetTensorImpl()->is_wrapped_number())
    view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

namespace {

at::Tensor meta_of(const at::Tensor& t) {
  at::Tensor meta = at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
  if (t.unsafeGetTensorImpl()->is_wrapped_number())
    meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

template <typename Function>
c10::IValue map_tensors(const c10::IValue& value, Function function) {
  if (value.isTensor())
    return value.toTensor().defined() ? c10::IValue(function(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& t : value.toTensorVector()) out.push_back(t.defined() ? function(t) : t);
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const auto& t : value.toOptionalTensorVector())
      out.push_back(t && t->defined() ? std::optional<at::Tensor>(function(*t)) : t);
    return out;
  }
  return value;
}

// What the schema says of an operation. A return is the argument of that number, or:
enum Return { NEW = -1, NOT_A_TENSOR = -2, VIEW = -3 };
struct Facts {
  std::vector<bool> writes, outs;  // by argument
  std::vector<int> returns;
  int generator = -1;  // the argument that is one
  bool makes = false, plain = false, index = false;
  int inner = -1;  // the argument whose last dimension a product sums over
  const char* name = "";
};

int inner_of(const std::string& name) {
  if (name == "aten::mm" || name == "aten::bmm") return 0;
  if (name == "aten::addmm" || name == "aten::baddbmm") return 1;
  return -1;
}

Facts read_schema(const c10::FunctionSchema& schema) {
  Facts facts;
  const auto& args = schema.arguments();
  for (size_t i = 0; i < args.size(); i++) {
    auto* alias = args[i].alias_info();
    facts.writes.push_back(alias && alias->isWrite());
    facts.outs.push_back(alias && alias->isWrite() && args[i].is_out());
    auto kind = args[i].type();
    if (auto optional = kind->cast<c10::OptionalType>()) kind = optional->getElementType();
    if (kind->kind() == c10::TypeKind::GeneratorType) facts.generator = int(i);
  }
  for (const auto& returned : schema.returns()) {
    bool tensors = returned.type()->isSubtypeOf(*c10::TensorType::get()) ||
                   returned.type()->isSubtypeOf(*c10::ListType::ofTensors());
    int place = tensors ? NEW : NOT_A_TENSOR;
    if (auto* alias = returned.alias_info()) {
      place = VIEW;
      if (alias->isWrite())
        for (size_t i = 0; i < args.size(); i++)
          if (args[i].alias_info() && *args[i].alias_info() == *alias) place = int(i);
    }
    facts.makes |= place == NEW;
    facts.plain |= place == NOT_A_TENSOR;
    facts.returns.push_back(place);
  }
  const auto& name = schema.operator_name();
  facts.index = name.name.find("index") != std::string::npos;
  facts.inner = inner_of(name.name);
  std::string shown = name.name.substr(name.name.find("::") + 2);
  if (!name.overload_name.empty()) shown += "." + name.overload_name;
  std::lock_guard<std::mutex> lock(rt().mu);
  facts.name = rt().intern(shown);
  return facts;
}

const Facts& facts_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<const c10::FunctionSchema*, Facts>();
  std::lock_guard<std::mutex> lock(mutex);
  auto found = known->find(&op.schema());
  if (found != known->end()) return found->second;
  return (*known)[&op.schema()] = read_schema(op.schema());
}

struct Call {
  const c10::OperatorHandle& op;
  const Facts& facts;
  std::vector<c10::IValue> args;
  int device = current_device;
  at::Generator drawn_from{};
  torch::jit::Stack meta{}, cpu{};
  std::vector<Span> spans{};
  std::vector<c10::IValue> results{};

  void find_device();
  void choose_generator();
  bool infer();
  void read_arguments();
  void launch();
  void run_now();
  at::Tensor make(const at::Tensor& like);
  Cost cost() const;
};

void Call::find_device() {
  int found = -1;
  auto look = [&](const at::Tensor& t) {
    if (is_late(t) && t.dim() >= 0) {
      int index = t.device().index();
      TORCH_CHECK(found < 0 || found == index || t.dim() == 0,
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  late::device(found < 0 ? index : found), " and ", t.device(), "! (", facts.name,
                  ")");
      if (found < 0) found = index;
    }
    return t;
  };
  for (const auto& arg : args) {
    map_tensors(arg, look);
    if (arg.isDevice() && found < 0 && arg.toDevice().type() == type() &&
        arg.toDevice().has_index())
      found = arg.toDevice().index();
  }
  if (found >= 0) device = found;
}

void Call::choose_generator() {
  if (facts.generator < 0) return;
  auto& given = args[size_t(facts.generator)];
  at::Generator from = given.isNone() ? default_generator(device) : given.toGenerator();
  TORCH_CHECK(from.device().type() == type(), "Expected a '", c10::Device(type()),
              "' generator for ", facts.name, " but found ", from.device());
  drawn_from = from;
  // a launch of its graph draws; what is captured now runs with none of this
  given = rt().captures(current_on(device)) ? c10::IValue() : c10::IValue(next_draw(from));
}

// Shapes and dtypes of what is new, from the meta kernel; false: only the values tell them.
bool Call::infer() {
  if (facts.plain) return false;
  bool resizes = false;
  for (size_t i = 0; i < args.size(); i++)
    resizes |= facts.outs[i] && args[i].isTensor() && args[i].toTensor().numel() == 0;
  if (facts.makes || resizes) {
    for (const auto& arg : args)
      meta.push_back(arg.isDevice() ? c10::IValue(c10::Device(at::kMeta))
                                    : map_tensors(arg, meta_of));
    if (facts.generator >= 0) meta[size_t(facts.generator)] = c10::IValue();
    torch::jit::Stack given = meta;
    try {
      op.callBoxed(&meta);
    } catch (const std::exception&) {
      return false;  // no meta kernel: the host has to wait for the values
    }
    rt().counts.inferred++;
    for (size_t i = 0; resizes && i < args.size(); i++)
      if (facts.outs[i] && args[i].isTensor()) {
        auto sizes = given[i].toTensor().sizes();
        if (args[i].toTensor().sizes() != sizes) args[i].toTensor().resize_(sizes);
      }
  }
  if (!strcmp(facts.name, "native_layer_norm")) {
    // The CPU keeps statistics in the dtype of its weights, the meta kernel in that of a GPU.
    bool has_weight = args[2].isTensor() && args[2].toTensor().defined();
    auto dtype = args[has_weight ? 2 : 0].toTensor().scalar_type();
    for (size_t i : {1, 2}) meta[i] = meta[i].toTensor().to(dtype);
  }
  return true;
}

void Call::read_arguments() {
  for (size_t i = 0; i < args.size(); i++) {
    if (args[i].isDevice()) {
      cpu.push_back(c10::Device(at::kCPU));
      continue;
    }
    cpu.push_back(map_tensors(args[i], [&](const at::Tensor& t) {
      if (is_late(t)) {
        add_span(t, facts.writes[i], spans);
        return task_view(t);
      }
      TORCH_CHECK(t.dim() == 0 || facts.index,
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  late::device(device), " and ", t.device(), "! (", facts.name, ")");
      at::Tensor copy = t.clone();
      if (t.unsafeGetTensorImpl()->is_wrapped_number())
        copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copy;
    }));
  }
}

at::Tensor Call::make(const at::Tensor& like) {
  OnDevice guard(device);
  return at::detail::empty_strided_generic(like.sizes(), like.strides(), device_memory(),
                                           c10::DispatchKeySet(key()), like.scalar_type());
}

Cost Call::cost() const {
  Cost cost;
  for (const Span& span : spans) {
    double rows = span.stride ? double(span.hi - span.lo) / double(span.stride) : 1;
    cost.bytes += span.stride ? rows * double(span.width) : double(span.hi - span.lo);
  }
  if (facts.inner >= 0 && !results.empty()) {
    double inner = double(args[size_t(facts.inner)].toTensor().size(-1));
    cost.flops = 2 * inner * double(results[0].toTensor().numel());
  }
  return cost;
}

void copy_results(const std::vector<c10::IValue>& into, const torch::jit::Stack& from) {
  for (size_t i = 0; i < into.size(); i++) {
    if (into[i].isTensor() && into[i].toTensor().defined()) {
      at::Tensor to = into[i].toTensor(), made = from[i].toTensor();
      TORCH_CHECK(to.sizes() == made.sizes(), "the meta kernel promised ", to.sizes(), ", it is ",
                  made.sizes());
      to.copy_(made);
    } else if (into[i].isTensorList()) {
      auto to = into[i].toTensorVector(), made = from[i].toTensorVector();
      for (size_t j = 0; j < to.size(); j++)
        if (to[j].defined()) to[j].copy_(made[j]);
    }
  }
}

void Call::launch() {
  std::vector<c10::IValue> into;
  for (size_t i = 0; i < facts.returns.size(); i++) {
    TORCH_CHECK(facts.returns[i] != VIEW, "late: ", facts.name, " returns a view: write it");
    if (facts.returns[i] >= 0) {
      results.push_back(args[size_t(facts.returns[i])]);
      into.emplace_back();
      continue;
    }
    results.push_back(map_tensors(meta[i], [&](const at::Tensor& t) {
      at::Tensor made = make(t);
      add_span(made, true, spans);
      return made;
    }));
    into.push_back(map_tensors(results.back(), task_view));
  }
  c10::OperatorHandle handle = op;
  bool makes = facts.makes;
  auto run = [handle, given = cpu, into, makes] {
    c10::InferenceMode off(false);
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    torch::jit::Stack stack = given;
    handle.callBoxed(&stack);
    if (makes) copy_results(into, stack);
  };
  Runtime& runtime = rt();
  if (!drawn_from.defined() || !runtime.captures(current_on(device))) {
    runtime.enqueue(current_on(device), facts.name, spans, run, cost());
    return;
  }
  auto draws = [handle, into, makes](torch::jit::Stack stack) {
    c10::InferenceMode off(false);
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    handle.callBoxed(&stack);
    if (makes) copy_results(into, stack);
  };
  runtime.keep(facts.name, [draws, given = cpu, place = size_t(facts.generator), from = drawn_from,
                            on = device, name = facts.name, reads = spans, time = cost()] {
    torch::jit::Stack stack = given;
    stack[place] = next_draw(from);
    rt().enqueue(current_on(on), name, reads, [draws, stack] { draws(stack); }, time);
  });
}

void Call::run_now() {
  {
    std::lock_guard<std::mutex> lock(rt().mu);
    rt().counts.sync_ops[facts.name]++;
  }
  int stream = current_on(device);
  rt().enqueue(stream, facts.name, spans, nullptr, cost());
  {
    NoGil release;
    rt().implied_wait(stream);
  }
  op.callBoxed(&cpu);
  for (size_t i = 0; i < facts.returns.size(); i++) {
    if (facts.returns[i] >= 0) {
      results.push_back(args[size_t(facts.returns[i])]);
      continue;
    }
    results.push_back(map_tensors(cpu[i], [&](const at::Tensor& from) {
      at::Tensor made = make(from), to = task_view(made);
      std::vector<Span> written;
      add_span(made, true, written);
      rt().enqueue(stream, facts.name, written, [to, from] {
        at::AutoDispatchBelowAutograd below;
        to.copy_(from);
      });
      return made;
    }));
  }
}

}  // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Facts& facts = facts_of(op);
  size_t count = op.schema().arguments().size();
  Call call{op, facts, {stack->end() - ptrdiff_t(count), stack->end()}};
  if (rt().sites) site = python_site();
  rt().counts.ops++;
  at::AutoDispatchBelowAutograd below;
  call.find_device();
  call.choose_generator();
  bool known = call.infer();
  call.read_arguments();
  if (known) call.launch();
  else call.run_now();
  torch::jit::drop(*stack, count);
  for (auto& result : call.results) stack->push_back(std::move(result));
}

}  // namespace late
