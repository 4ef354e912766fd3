// Torch's interfaces of a device: guard, allocators, generators, hooks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device.h"
#include "python.h"
#include "storage.h"

namespace late {

bool poses_as_cuda() {
  static const bool poses = [] {
    const char* name = getenv("LATE_AS");
    return name && std::string(name) == "cuda";
  }();
  return poses;
}

namespace {

c10::Stream stream_of(int device, int id) {
  return c10::Stream(c10::Stream::UNSAFE, late::device(device), id);
}

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return late::type(); }
  c10::Device exchangeDevice(c10::Device to) const override {
    int before = current_device;
    setDevice(to);
    return late::device(before);
  }
  c10::Device getDevice() const override { return late::device(current_device); }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(index_of(to) < rt().devices, "invalid device ordinal ", to);
    current_device = index_of(to);
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override { current_device = to.index(); }
  c10::DeviceIndex deviceCount() const noexcept override {
    return c10::DeviceIndex(rt().devices);
  }
  c10::Stream getStream(c10::Device on) const override {
    return stream_of(index_of(on), current_streams[index_of(on)]);
  }
  c10::Stream getDefaultStream(c10::Device on) const override { return stream_of(index_of(on), 0); }
  c10::Stream getNewStream(c10::Device on, int priority) const override {
    return stream_of(index_of(on), rt().new_stream(index_of(on), priority));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device on, bool high) const override {
    return getNewStream(on, high ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    int device = to.device_index(), before = current_streams[device];
    current_streams[device] = int(to.id());
    return stream_of(device, before);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return (void*)(uintptr_t)stream.id();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete (Event*)event;
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    *(Event*)*event = rt().record(slot_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event && !dropped("wait")) rt().wait_event(slot_of(stream), *(Event*)event);
  }
  bool queryEvent(void* event) const override {
    if (event) rt().use_device(current_device, "question for an event");
    return !event || dropped("query") || rt().query(*(Event*)event);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return rt().query(rt().record(slot_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (dropped("synchronize")) return;
    NoGil release;
    rt().host_wait_stream(slot_of(stream));
  }
  void synchronizeEvent(void* event) const override {
    if (!event || dropped("synchronize")) return;
    rt().use_device(current_device, "wait for an event");
    NoGil release;
    rt().host_wait(*(Event*)event);
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    if (dropped("synchronize")) return;
    NoGil release;
    rt().host_wait_device(index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& s) const override {
    if (!dropped("record_stream")) rt().record_stream(memory.get(), slot_of(s));
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return (((Event*)to)->time - ((Event*)from)->time) * 1e3;
  }
};

void give(void* memory) { rt().give(memory); }

struct Memory final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t bytes) override {
    void* memory = rt().take(bytes, current());
    return {memory, memory, &give, late::device(current_device)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "late: the allocator copies nothing");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    if (!dropped("record_stream")) rt().record_stream(memory.get(), slot_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex on) override {
    rt().counts.peak[on] = rt().counts.allocated[on];
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex on) override {
    return {kDeviceBytes - rt().counts.reserved[on], kDeviceBytes};
  }
};

void give_pinned(void* memory) { rt().give_pinned(memory); }

struct Pinned final : at::HostAllocator {
  at::DataPtr allocate(size_t bytes) override {
    void* memory = rt().take_pinned(bytes);
    return {memory, memory, &give_pinned, at::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &give_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
  bool record_event(void* memory, void*, c10::Stream stream) override {
    rt().record_host(memory, slot_of(stream));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

uint64_t mix(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// (seed, number of operations that drew): each draws from a CPU generator of its own, made when it
// is launched, so that what it draws does not depend on when it runs.
struct Draws final : c10::GeneratorImpl {
  uint64_t seed_ = 67280421310721ull, count_ = 0;
  explicit Draws(int device)
      : c10::GeneratorImpl(late::device(device), c10::DispatchKeySet(late::key())) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    count_ = 0;
  }
  void set_offset(uint64_t offset) override { count_ = offset; }
  uint64_t get_offset() const override { return count_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(std::random_device{}());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    auto* values = (const uint64_t*)state.data();
    seed_ = values[0];
    count_ = values[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::detail::empty_cpu({16}, at::kByte);
    auto* values = (uint64_t*)state.mutable_data_ptr();
    values[0] = seed_;
    values[1] = count_;
    return state.getIntrusivePtr();
  }
  Draws* clone_impl() const override {
    auto* copy = new Draws(device().index());
    copy->seed_ = seed_;
    copy->count_ = count_;
    return copy;
  }
  at::Generator next() {
    std::lock_guard<std::mutex> lock(mutex_);
    return at::detail::createCPUGenerator(mix(seed_ ^ mix(count_++)));
  }
};

Memory memory;
Pinned pinned_memory;

template <class Interface>
struct Hooks : Interface {
  using Interface::Interface;
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(rt().devices); }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    int before = current_device;
    current_device = index;
    return c10::DeviceIndex(before);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* at) const override { return rt().pinned(at); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Device getDeviceFromPtr(void* at) const override {
    return late::device(rt().device_of(at));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? current_device : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Draws>(index < 0 ? current_device : int(index));
  }
};

struct PrivateHooks final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_bytes(storage.unsafeGetStorageImpl(), bytes);
  }
};

struct CudaHooks final : Hooks<at::CUDAHooksInterface> {
  explicit CudaHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  c10::DeviceIndex current_device() const override {
    return c10::DeviceIndex(late::current_device);
  }
  int getNumGPUs() const override { return rt().devices; }
  void deviceSynchronize(c10::DeviceIndex index) const override {
    rt().host_wait_device(index);
  }
  at::Allocator* getCUDADeviceAllocator() const override { return &memory; }
};

// When the library is loaded: torch asks for the hooks of CUDA once, and early.
const bool hooks_registered = [] {
  static c10::impl::DeviceGuardImplRegistrar guard(type(), new Guard());
  c10::SetAllocator(type(), &memory);
  at::setHostAllocator(type(), &pinned_memory);
  if (poses_as_cuda())
    at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs args) {
      return std::unique_ptr<at::CUDAHooksInterface>(new CudaHooks(args));
    });
  return true;
}();

}  // namespace

c10::Allocator* device_memory() { return &memory; }

void register_hooks() {
  if (!poses_as_cuda()) at::RegisterPrivateUse1HooksInterface(new PrivateHooks());
}

const at::Generator& default_generator(int device) {
  static std::array<at::Generator, kDevices>* all = [] {
    auto* made = new std::array<at::Generator, kDevices>();
    for (int i = 0; i < kDevices; i++) (*made)[size_t(i)] = at::make_generator<Draws>(i);
    return made;
  }();
  return (*all)[size_t(device)];
}

at::Generator next_draw(const at::Generator& from) {
  return static_cast<Draws*>(from.unsafeGetGeneratorImpl())->next();
}

}  // namespace late
