// Operations that are written here: memory, views, copies, dropout.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include "launch.h"
#include "python.h"
#include "storage.h"

namespace late {

void resize_bytes(c10::StorageImpl* storage, size_t bytes) {
  int device = storage->device().index();
  OnDevice guard(device);
  at::DataPtr fresh = device_memory()->allocate(bytes);
  char *from = (char*)storage->mutable_data(), *to = (char*)fresh.get();
  size_t keep = std::min(storage->nbytes(), bytes);
  if (keep) {
    if (rt().sites) site = python_site();
    ptrdiff_t delta = rt().delta_of(from);
    rt().enqueue(current_on(device), "resize", {{from, from + keep, false}, {to, to + keep, true}},
                 [=] { memcpy(to + delta, from + delta, keep); }, {2.0 * double(keep)});
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

namespace {

// Between devices: on the source's stream, ordered with that of the target both ways, as CUDA does.
void order(int stream, int after) {
  if (stream != after) rt().wait_event(stream, rt().record(after));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& given, bool non_blocking) {
  if (self.is_same(given) || !self.numel()) return self;
  Runtime& runtime = rt();
  if (runtime.sites) site = python_site();
  at::AutoDispatchBelowAutograd below;
  at::Tensor source = given.sizes() == self.sizes() ? given : given.expand(self.sizes());
  std::vector<Span> spans;
  bool from_device = is_late(source), to_device = is_late(self), wait = false;
  Cost cost{double(source.numel() * source.element_size()), 0};
  const char* what = "copy";
  at::Tensor from, to;
  int stream = current_on((from_device ? source : self).device().index());
  int target = to_device ? current_on(self.device().index()) : stream;
  if (to_device) {
    add_span(self, true, spans);
    to = task_view(self);
  }
  if (from_device) {
    add_span(source, false, spans);
    from = task_view(source);
    cost.bytes *= 2;
  }
  if (!to_device) {
    bool pinned = runtime.pinned(self.const_data_ptr());
    wait = !non_blocking || !pinned;
    what = wait ? "copy to host" : "copy to host, not waited for";
    cost = {cost.bytes / 2, 0, Way::to_host};
    to = pinned ? task_view(self) : self;
    if (pinned) add_span(self, true, spans);
    if (pinned && !wait) runtime.record_host(self.storage().mutable_data(), stream);
  } else if (!from_device) {
    bool pinned = runtime.pinned(source.const_data_ptr());
    what = pinned && non_blocking ? "copy from host, not waited for" : "copy from host";
    wait = !non_blocking;
    cost.way = Way::to_device;
    if (pinned) {
      add_span(source, false, spans);
      from = task_view(source);
      runtime.record_host(source.storage().mutable_data(), stream);
    } else {
      from = source.clone();  // staged: the caller may write over it at once
    }
  }
  if (from_device != to_device && runtime.captures(stream))
    runtime.tell("capture", std::string(what) + " in a capture [" + site + "]", site);
  order(stream, target);
  runtime.enqueue(stream, what, spans,
                  [to, from]() mutable {
                    at::NoGradGuard no_grad;
                    at::AutoDispatchBelowADInplaceOrView inner;
                    to.copy_(from);
                  },
                  cost);
  order(target, stream);
  if (wait) {
    {
      std::lock_guard<std::mutex> lock(runtime.mu);
      runtime.counts.sync_ops[runtime.intern(what)]++;
    }
    NoGil release;
    runtime.implied_wait(stream);
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  at::Tensor target = to;
  copy_(target, self, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  at::Tensor target = to;
  target.resize_(self.sizes());
  copy_(target, self, false);
  return to;
}

int index_of(const std::optional<at::Device>& device) {
  return device && device->has_index() ? device->index() : current_device;
}

using Ints = c10::SymIntArrayRef;

at::Tensor empty(Ints size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  OnDevice guard(index_of(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_memory(),
                                   c10::DispatchKeySet(key()), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(Ints size, Ints stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device,
                         std::optional<bool>) {
  OnDevice guard(index_of(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), device_memory(),
                                           c10::DispatchKeySet(key()), c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, Ints size_,
                          std::optional<at::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(size_);
  if (self.sizes() == size) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t elements = size_t(impl->storage_offset() + c10::multiply_integers(size));
  size_t bytes = elements * self.element_size();
  if (bytes > self.storage().nbytes()) resize_bytes(self.storage().unsafeGetStorageImpl(), bytes);
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor view_of(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                   int64_t offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return view;
}

at::Tensor as_strided(const at::Tensor& self, Ints size, Ints stride,
                      std::optional<c10::SymInt> offset) {
  return view_of(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                 offset ? offset->expect_int() : self.storage_offset());
}

at::Tensor view(const at::Tensor& self, Ints size_) {
  auto size = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(size_), self.numel());
  auto stride = at::detail::computeStride(self.sizes(), self.strides(), size);
  TORCH_CHECK(stride.has_value(),
              "view size is not compatible with input tensor's size and stride");
  return view_of(self, size, *stride, self.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& self, Ints size, Ints stride) {
  return as_strided(self, size, stride, std::nullopt);
}

at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  dim = c10::maybe_wrap_dim(dim, self.dim());
  auto sizes = self.sizes().vec(), strides = self.strides().vec();
  sizes.push_back(size);
  strides.push_back(self.dim() ? strides[size_t(dim)] : 1);
  if (self.dim()) {
    sizes[size_t(dim)] = (sizes[size_t(dim)] - size) / step + 1;
    strides[size_t(dim)] *= step;
  }
  return self.as_strided(sizes, strides);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, Ints size,
                        Ints stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.empty()) impl->set_sizes_contiguous(sizes);
  else impl->set_sizes_and_strides(sizes, strides);
  return self;
}

at::Tensor& set_flat(at::Tensor& self, at::Storage source, int64_t numel) {
  std::vector<c10::SymInt> size{numel}, stride{1};
  return set_storage(self, std::move(source), 0, size, stride);
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  int64_t numel = int64_t(source.nbytes() / self.element_size());
  return set_flat(self, std::move(source), numel);
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(),
                     source.sym_strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  OnDevice guard(self.device().index());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_memory()->allocate(0),
                    device_memory(), true);
  return set_flat(self, none, 0);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (!dropped("record_stream")) rt().record_stream(self.storage().mutable_data(), slot_of(stream));
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p,
                                                  std::optional<bool> train) {
  auto kept = x.options().dtype(at::kBool);
  if (!train.value_or(true)) return {x.clone(), at::ones_like(x, kept)};
  at::Tensor mask = at::empty_like(x, kept).bernoulli_(1 - p);
  return {x.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1.0 - p)), mask};
}

// CUDA alone has it: factors of 16 bits whose products are added in a wider type.
at::Tensor& addmm_wider(const at::Tensor& self, const at::Tensor& left, const at::Tensor& right,
                        at::ScalarType dtype, const at::Scalar& beta, const at::Scalar& alpha,
                        at::Tensor& out) {
  return out.copy_(at::addmm(self.to(dtype), left.to(dtype), right.to(dtype), beta, alpha));
}

void add_kernels(torch::Library& library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", unfold);
  library.impl("resize_", resize_);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("record_stream", record_stream);
  library.impl("native_dropout", native_dropout);
  library.impl("addmm.dtype_out", addmm_wider);
  // These are composite where a backend has no kernel, and then ask for another by its name.
  for (auto* name : {"convolution", "convolution_backward", "native_layer_norm",
                     "native_layer_norm_backward", "native_group_norm", "native_batch_norm",
                     "_fused_rms_norm"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

const bool kernels_registered = [] {
  static torch::Library aten(torch::Library::IMPL, "aten", key(), __FILE__, __LINE__);
  add_kernels(aten);
  static torch::Library all(torch::Library::IMPL, "_", key(), __FILE__, __LINE__);
  all.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  return true;
}();

}  // namespace
}  // namespace late
