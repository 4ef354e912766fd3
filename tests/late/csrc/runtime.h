// The device: streams that run tasks late, memory that is mapped twice, and checks of every access.
//
// One lock guards everything. Nothing that holds it takes Python's, or touches memory that may be
// protected: see guards.cpp.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "clocks.h"
#include "costs.h"

namespace late {

constexpr size_t kDeviceBytes = size_t(16) << 30;  // of address space, for each device
constexpr size_t kPinnedBytes = size_t(16) << 30;
constexpr size_t kPage = 4096;

// inline: at once, in the caller's thread. eager: on a thread a stream, as soon as it may. random:
// as eager, with pauses by a seed. lazy: not before somebody waits for it, on the host or a stream.
enum class Mode { inline_, eager, random, lazy };

struct Task {
  uint64_t number;
  const char* what;
  std::function<void()> run;
  int wait_stream = -1;  // instead of running: until that stream has done `wait_number`
  uint64_t wait_number = 0;
};

struct Stream {
  std::deque<Task> queue;
  uint64_t issued = 0, done = 0;
  uint64_t released = 0;  // what may run; in mode lazy, what somebody waits for
  Clock clock{};
  double time = 0;  // the end of its last task
  bool started = false;
};

// What is remembered of a piece of memory.
struct Access {
  Span span;
  int agent;
  uint64_t number;
  const char* what;
  uint32_t site;
};

struct GraphMemory;

struct Region {  // a block of device memory, or of host memory that devices reach
  char* base;
  size_t size;
  bool host;
  ptrdiff_t delta;  // visible address + delta: the mapping that tasks use
  int stream = 0;   // whose memory it is: its next user comes after what that stream has then
  bool free = false;
  std::shared_ptr<GraphMemory> memory{};  // of graphs, whose it stays
  size_t asked = 0;
  std::vector<Access> seen{};
  std::set<int> recorded{};      // other streams that have used it, by record_stream
  std::vector<Event> pending{};  // of those, when it was freed
};

struct Guarded {  // host memory under a copy that the host has not waited for
  char *lo, *hi;
  bool write;
  int agent;
  uint64_t number;
  Region* region;
};

struct GraphMemory {  // of graphs that share it; nobody else gets any of it
  std::multimap<size_t, Region*> free;
};

// Launches a piece of captured work once more, on the stream that is current then.
using Prepare = std::function<void()>;

struct Graph {
  struct Step {
    const char* what;
    Prepare prepare;
  };
  std::vector<Step> steps;
  std::set<int> streams;  // that have joined its capture
  int origin = 0;
  std::thread::id thread;
  std::shared_ptr<GraphMemory> memory;
};

struct Report {
  std::string kind, text;
};

struct Counts {
  uint64_t ops = 0, tasks = 0, accesses = 0, syncs = 0, inferred = 0, faults = 0, false_shares = 0;
  std::array<size_t, kDevices> allocated{}, peak{}, reserved{};
  size_t pinned = 0;
  uint64_t graph_launches = 0;
  std::map<std::string, uint64_t> sync_ops;  // operations that made the host wait
};

inline thread_local std::string site;  // of the call under way, for reports
inline thread_local int current_device = 0;
inline thread_local uint64_t allocations = 0, queries = 0;  // by this thread
inline thread_local std::array<int, kDevices> current_streams{};  // by device, 0..kStreamsEach
inline int current_stream_of(int device) { return device * kStreamsEach + current_streams[device]; }

class Runtime {
 public:
  Runtime();

  std::mutex mu;
  Mode mode = Mode::inline_;
  int max_us = 500;   // of a pause, in mode random
  double nap = 0.3;   // the share of tasks with a pause
  bool aliased = false;  // the pools of communicators give one stream to all who ask
  bool detect = true, poison = true, guard_host = true, sites = false, sync_error = false;
  int devices = 1;
  uint32_t allowed = ~0u;  // devices on which this process may have a context, as bits
  std::mt19937_64 rng{0};
  Counts counts;
  std::vector<Report> reports;
  std::function<void()> on_thread;  // run at the start of each stream's thread
  std::function<std::string()> find_site;  // the Python call that this thread is in
  Rates rates;
  std::array<double, kLanes> host_time{};
  bool tracing = false;
  std::vector<Traced> trace;

  // streams.cpp
  void enqueue(int stream, const char* what, const std::vector<Span>& spans,
               std::function<void()> run, const Cost& cost = {});
  void wait_event(int stream, const Event& event);
  Event record(int stream);
  bool query(const Event& event);      // a yes orders the host as a wait does
  void host_wait(const Event& event);  // not with Python's lock
  void host_wait_stream(int stream) { host_wait(record(stream)); }
  void implied_wait(int stream);  // of .item() and of a copy that blocks
  void host_wait_device(int device);
  int new_stream(int device, int priority = 0);  // as CUDA counts: -1 before 0
  void forget();
  void want(const Event& event);  // some other rank waits for it
  void tell(const char* kind, const std::string& text, const std::string& key);

  // captures.cpp
  std::shared_ptr<Graph> capture;  // under way
  bool captures(int stream) const;
  std::shared_ptr<Graph> begin_capture(int stream, std::shared_ptr<GraphMemory> memory);
  void end_capture();
  void keep(const char* what, Prepare prepare);
  void launch(const std::shared_ptr<Graph>& graph);
  void check_capture(const Event* event, const char* what);  // refuses it in a capture
  [[noreturn]] void refuse(const char* what);

  // memory.cpp
  void* take(size_t bytes, int stream);
  void give(void* memory);
  void record_stream(void* memory, int stream);
  void* take_pinned(size_t bytes);
  void give_pinned(void* memory);
  bool pinned(const void* memory);
  void record_host(void* memory, int stream);
  int host_register(char* base, size_t size);
  int host_unregister(char* base);
  ptrdiff_t delta_of(const void* memory);
  bool is_device_memory(const void* memory) const;
  int device_of(const void* memory) const;
  void use_device(int device, const char* what);  // reports a context that should not be

  // guards.cpp
  bool on_fault(char* at, bool write, const std::string& from);

  const char* intern(const std::string& name);
  void raise_failure();

 private:
  std::condition_variable changed_;
  std::array<Stream, kStreams> streams_;
  std::array<std::array<int, kPriorities>, kDevices> next_stream_{};
  Clock host_{};
  std::map<char*, Region*> regions_;
  std::unordered_set<std::string> names_;
  std::vector<std::string> site_text_{""};
  std::unordered_map<std::string, uint32_t> site_ids_;
  std::set<std::pair<std::string, std::string>> said_;
  std::string failure_;
  char *arena_ = nullptr, *arena_alias_ = nullptr, *pinned_ = nullptr, *pinned_alias_ = nullptr;
  std::array<size_t, kDevices> arena_used_{};
  size_t pinned_used_ = 0;
  std::map<int, std::multimap<size_t, Region*>> pool_;  // free, by stream and size
  std::map<int, std::vector<Region*>> freed_;           // since the stream's last allocation
  std::vector<Region*> waiting_;                        // freed, but recorded streams go on
  std::multimap<size_t, Region*> pinned_pool_;
  std::vector<Region*> pinned_waiting_;
  std::vector<Guarded> guarded_;
  std::vector<char*> opened_;  // pages of device memory that a fault has opened

  // All below with `mu` held.
  void enqueue_locked(int stream, const char* what, const std::vector<Span>& spans,
                      std::function<void()> run, const Cost& cost, const Clock* after = nullptr);
  void push(Stream& stream, int id, Task task);
  void release(int stream, uint64_t number);
  void work(int id);
  void fail(const char* what, const char* why);
  bool is_done(const std::vector<Event>& events) const;
  void host_joins(const Event& event);

  // races.cpp
  void note(Region* region, const Span& span, int agent, const Clock& clock, const char* what,
            uint32_t site);
  void say(const char* kind, const std::string& text, const std::string& key);
  uint32_t site_id();
  std::string where(uint32_t site) const;
  Region* find(const void* memory);

  // memory.cpp
  void collect(int stream);
  void overwrite(Region* region, const Clock* after);

  // guards.cpp
  void guard(Region* region, char* lo, char* hi, bool write, int agent, uint64_t number);
  void unguard();
  void protect(char* lo, char* hi);
  void close_opened();
};

std::string name_of(int agent);
Runtime& rt();
void catch_faults();

}  // namespace late
