// From an operation on tensors of the device to a task of a stream.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <vector>

#include "device.h"

namespace late {

inline bool is_late(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == type();
}

// The memory that an access to `tensor` may touch.
void add_span(const at::Tensor& tensor, bool write, std::vector<Span>& spans);

// A CPU tensor on the mapping that tasks use. It owns nothing.
at::Tensor task_view(const at::Tensor& tensor);

void one_thread_each();  // torch's kernels in this thread use no other

// Any operation without a kernel of its own here: shapes and dtypes from the meta kernel, the
// result allocated now, the CPU's kernel launched. What has no meta kernel makes the host wait.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace late
