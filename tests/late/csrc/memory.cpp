// Device memory as torch's caching allocator gives it out, pinned memory, registered memory.
//
// All of it is mapped twice: the visible address is what Python sees and what is protected, the
// other is what tasks use. What is freed is overwritten in the order of its stream before it is
// given out again: whoever still reads it is reported, and reads NaN.
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <linux/memfd.h>
#include <pthread.h>
#include <unistd.h>

#include "runtime.h"

namespace late {

namespace {

int memory_file(size_t size) {
  int file = int(syscall(SYS_memfd_create, "late", MFD_CLOEXEC));
  if (file < 0 || ftruncate(file, off_t(size))) throw std::runtime_error("late: no memory file");
  return file;
}

// Where there is an address already, it is kept.
void map_twice(size_t size, int protection, char*& visible, char*& alias) {
  int file = memory_file(size);
  int flags = MAP_SHARED | MAP_NORESERVE | (visible ? MAP_FIXED : 0);
  visible = (char*)mmap(visible, size, protection, flags, file, 0);
  alias = (char*)mmap(alias, size, PROT_READ | PROT_WRITE, flags, file, 0);
  close(file);
  if (visible == MAP_FAILED || alias == MAP_FAILED)
    throw std::runtime_error("late: no address space");
}

}  // namespace

Runtime::Runtime() {
  static Runtime* self = this;
  static auto map = [] {
    map_twice(kDeviceBytes * kDevices, PROT_NONE, self->arena_, self->arena_alias_);
    map_twice(kPinnedBytes, PROT_READ | PROT_WRITE, self->pinned_, self->pinned_alias_);
  };
  map();
  // processes forked from one that has loaded the device, and has not used it, have memory of their
  // own: without this they would share it
  pthread_atfork(nullptr, nullptr, [] {
    size_t used = self->pinned_used_;
    for (size_t each : self->arena_used_) used += each;
    if (!used) map();
  });
}

bool Runtime::is_device_memory(const void* memory) const {
  return memory >= arena_ && memory < arena_ + kDeviceBytes * kDevices;
}

int Runtime::device_of(const void* memory) const {
  return is_device_memory(memory) ? int(size_t((char*)memory - arena_) / kDeviceBytes) : 0;
}

ptrdiff_t Runtime::delta_of(const void* memory) {
  if (is_device_memory(memory)) return arena_alias_ - arena_;
  std::lock_guard<std::mutex> lock(mu);
  Region* region = find(memory);
  return region ? region->delta : 0;
}

void Runtime::use_device(int device, const char* what) {
  if (allowed >> device & 1) return;
  std::string from = find_site && sites ? find_site() : "";
  std::lock_guard<std::mutex> lock(mu);
  std::ostringstream text;
  text << "a context on device " << device << " (" << what << (from.empty() ? "" : " [" + from + "]")
       << "), which is not this process's: a thread that has not set its device";
  say("context", text.str(), std::to_string(device) + what + from);
}

void* Runtime::take(size_t bytes, int stream) {
  if (!bytes) return nullptr;
  int device = stream / kStreamsEach;
  use_device(device, "allocation");
  bool captured = captures(stream);
  std::unique_lock<std::mutex> lock(mu);
  allocations++;
  if (!captured) collect(stream);
  size_t size = (bytes + 511) & ~size_t(511);
  auto& pool = captured ? capture->memory->free : pool_[stream];
  auto fitting = pool.lower_bound(size);
  Region* region;
  if (fitting != pool.end() && fitting->first <= size + std::max<size_t>(size, 1 << 20)) {
    region = fitting->second;
    pool.erase(fitting);
  } else {
    size_t at = kDeviceBytes * size_t(device) + arena_used_[device];
    if (arena_used_[device] + size > kDeviceBytes)
      throw std::runtime_error("late: out of device memory");
    region = new Region{arena_ + at, size, false, arena_alias_ - arena_, stream};
    if (poison) memset(arena_alias_ + at, 0xFF, size);
    arena_used_[device] += size;
    counts.reserved[device] += size;
    regions_[region->base] = region;
  }
  region->free = false;
  region->asked = size;
  counts.allocated[device] += size;
  counts.peak[device] = std::max(counts.peak[device], counts.allocated[device]);
  if (captured) {
    region->memory = capture->memory;
    char *base = region->base, *memory = base + region->delta;
    lock.unlock();
    std::function<void()> run;
    if (poison) run = [memory, size] { memset(memory, 0xFF, size); };
    enqueue(stream, "reuse", {{base, base + size, true}}, std::move(run));  // in each launch
    return base;
  }
  return region->base;
}

// What was given back could be used again by this very allocation: it is overwritten now, in the
// order of the stream, whether or not this allocation takes it.
void Runtime::collect(int stream) {
  for (size_t i = 0; i < waiting_.size();) {
    Region* region = waiting_[i];
    if (region->stream != stream || !is_done(region->pending)) {
      i++;
      continue;
    }
    Clock after{};
    for (const Event& event : region->pending) join(after, event.clock);
    region->pending.clear();
    waiting_.erase(waiting_.begin() + ptrdiff_t(i));
    overwrite(region, &after);
  }
  for (Region* region : freed_[stream]) overwrite(region, nullptr);
  freed_[stream].clear();
}

void Runtime::overwrite(Region* region, const Clock* after) {
  char* memory = region->base + region->delta;
  size_t size = region->size;
  std::function<void()> run;
  if (poison) run = [memory, size] { memset(memory, 0xFF, size); };
  double time = streams_[region->stream].time, host = host_time[lane];
  bool traced = tracing;
  tracing = false;
  enqueue_locked(region->stream, "reuse", {{region->base, region->base + size, true}},
                 std::move(run), {}, after);
  tracing = traced;  // no allocator does this: it takes no time
  streams_[region->stream].time = time;
  host_time[lane] = host;
  pool_[region->stream].insert({size, region});
}

void Runtime::give(void* memory) {
  if (!memory) return;
  std::lock_guard<std::mutex> lock(mu);
  Region* region = find(memory);
  if (!region || region->free) return;
  region->free = true;
  counts.allocated[region->stream / kStreamsEach] -= region->asked;
  if (region->memory) {
    region->recorded.clear();
    auto memory = std::move(region->memory);
    region->memory.reset();
    memory->free.insert({region->size, region});
    return;
  }
  for (int id : region->recorded)
    region->pending.push_back({id, streams_[id].issued, streams_[id].clock, streams_[id].time});
  region->recorded.clear();
  if (region->pending.empty()) freed_[region->stream].push_back(region);
  else waiting_.push_back(region);
}

void Runtime::record_stream(void* memory, int stream) {
  std::lock_guard<std::mutex> lock(mu);
  Region* region = find(memory);
  if (region && !region->host && region->stream != stream) region->recorded.insert(stream);
}

void* Runtime::take_pinned(size_t bytes) {
  use_device(current_device, "pinned memory");
  std::lock_guard<std::mutex> lock(mu);
  for (size_t i = 0; i < pinned_waiting_.size();) {
    Region* region = pinned_waiting_[i];
    if (!is_done(region->pending)) {
      i++;
      continue;
    }
    for (const Event& event : region->pending) join(host_, event.clock);
    unguard();
    region->pending.clear();
    pinned_pool_.insert({region->size, region});
    pinned_waiting_.erase(pinned_waiting_.begin() + ptrdiff_t(i));
  }
  size_t size = (std::max<size_t>(bytes, 1) + kPage - 1) & ~(kPage - 1);
  auto fitting = pinned_pool_.lower_bound(size);
  Region* region;
  if (fitting != pinned_pool_.end() && fitting->first <= 2 * size) {
    region = fitting->second;
    pinned_pool_.erase(fitting);
  } else {
    if (pinned_used_ + size > kPinnedBytes)
      throw std::runtime_error("late: out of pinned memory");
    region = new Region{pinned_ + pinned_used_, size, true, pinned_alias_ - pinned_};
    pinned_used_ += size;
    counts.pinned = pinned_used_;
    regions_[region->base] = region;
  }
  if (poison) memset(region->base + region->delta, 0xFF, region->size);
  region->free = false;
  return region->base;
}

void Runtime::give_pinned(void* memory) {
  std::lock_guard<std::mutex> lock(mu);
  Region* region = find(memory);
  if (!region || region->free) return;
  region->free = true;
  for (int id : region->recorded)
    region->pending.push_back({id, streams_[id].issued, streams_[id].clock, streams_[id].time});
  region->recorded.clear();
  if (region->pending.empty()) pinned_pool_.insert({region->size, region});
  else pinned_waiting_.push_back(region);
}

bool Runtime::pinned(const void* memory) {
  std::lock_guard<std::mutex> lock(mu);
  Region* region = find(memory);
  return region && region->host;
}

// As torch's host allocator: only of memory that it has given out.
void Runtime::record_host(void* memory, int stream) {
  std::lock_guard<std::mutex> lock(mu);
  Region* region = find(memory);
  if (region && region->base >= pinned_ && region->base < pinned_ + kPinnedBytes)
    region->recorded.insert(stream);
}

// Whole pages of private memory become shared ones that the device sees, too; those of a file are.
int Runtime::host_register(char* base, size_t size) {
  use_device(current_device, "registered memory");
  size = (size + kPage - 1) & ~(kPage - 1);
  {
    std::lock_guard<std::mutex> lock(mu);
    auto next = regions_.lower_bound(base);
    if (find(base) || (next != regions_.end() && next->first < base + size))
      return 712;  // cudaErrorHostMemoryAlreadyRegistered
  }
  char* alias = (char*)mremap(base, 0, size, MREMAP_MAYMOVE);  // shared pages, of a file: once more
  if (alias == MAP_FAILED) {
    int file = memory_file(size);
    alias = (char*)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    memcpy(alias, base, size);
    void* got = mmap(base, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
    close(file);
    if (got == MAP_FAILED) return 2;  // cudaErrorMemoryAllocation
  }
  std::lock_guard<std::mutex> lock(mu);
  regions_[base] = new Region{base, size, true, alias - base};
  return 0;
}

int Runtime::host_unregister(char* base) {
  std::lock_guard<std::mutex> lock(mu);
  auto found = regions_.find(base);
  if (found == regions_.end()) return 713;  // cudaErrorHostMemoryNotRegistered
  Region* region = found->second;
  for (const Access& access : region->seen)
    if (host_[access.agent] < access.number) {
      std::ostringstream text;
      text << "host memory is unregistered while " << name_of(access.agent)
           << (access.span.write ? " writes" : " reads") << " it (" << access.what << " #"
           << access.number << where(access.site) << "), with no wait between";
      say("unregistered", text.str(), std::string(access.what) + std::to_string(access.agent));
      break;
    }
  guarded_.erase(std::remove_if(guarded_.begin(), guarded_.end(),
                                [&](const Guarded& guarded) { return guarded.region == region; }),
                 guarded_.end());
  mprotect(region->base, region->size, PROT_READ | PROT_WRITE);
  regions_.erase(found);  // the other mapping stays: copies under way must not crash
  return 0;
}

}  // namespace late
