// Autocast on PrivateUse1, which torch leaves to the backend; CUDA has its own.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "device.h"

using namespace at;
using namespace at::autocast;

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

namespace late {
namespace {

const bool registered = [] {
  if (poses_as_cuda()) return false;
  constexpr auto autocast = c10::DispatchKey::AutocastPrivateUse1;
  static torch::Library all(torch::Library::IMPL, "_", autocast, __FILE__, __LINE__);
  all.fallback(torch::CppFunction::makeFallthrough());
  static torch::Library m(torch::Library::IMPL, "aten", autocast, __FILE__, __LINE__);
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_PROMOTE(PROMOTE)
  return true;
}();

}  // namespace
}  // namespace late
