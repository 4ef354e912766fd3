// The device as torch sees it: its type and key, its streams, its memory, its random numbers.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/Stream.h>

#include "runtime.h"

namespace late {

bool poses_as_cuda();  // LATE_AS=cuda when the library was loaded
inline c10::DeviceType type() {
  return poses_as_cuda() ? c10::DeviceType::CUDA : c10::DeviceType::PrivateUse1;
}
inline c10::DispatchKey key() {
  return poses_as_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1;
}
inline c10::Device device(int index) { return {type(), c10::DeviceIndex(index)}; }

inline int slot_of(const c10::Stream& stream) {
  return int(stream.device_index()) * kStreamsEach + int(stream.id());
}
inline int current_on(int device) { return device * kStreamsEach + current_streams[device]; }
inline int current() { return current_on(current_device); }

c10::Allocator* device_memory();
void register_hooks();  // of PrivateUse1; those of CUDA are registered when the library is loaded
const at::Generator& default_generator(int device);
at::Generator next_draw(const at::Generator& from);  // a CPU generator for one operation

struct OnDevice {  // as c10::DeviceGuard
  explicit OnDevice(int device) : before(current_device) { current_device = device; }
  ~OnDevice() { current_device = before; }
  int before;
};

}  // namespace late
