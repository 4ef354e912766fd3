// Streams: a thread and a queue each. Events, waits of streams and of the host, simulated time.
#include <chrono>

#include "runtime.h"

namespace late {

Runtime& rt() {
  static Runtime* runtime = new Runtime();  // threads of streams outlive main
  return *runtime;
}

const char* Runtime::intern(const std::string& name) { return names_.insert(name).first->c_str(); }

void Runtime::enqueue(int stream, const char* what, const std::vector<Span>& spans,
                      std::function<void()> run, const Cost& cost) {
  use_device(stream / kStreamsEach, what);
  if (captures(stream)) {
    int device = stream / kStreamsEach;
    keep(what, [this, device, what, spans, run, cost] {
      enqueue(current_stream_of(device), what, spans, run, cost);
    });
    return;
  }
  if (capture && std::this_thread::get_id() == capture->thread)
    tell("capture", std::string(what) + " runs beside the capture under way: its stream has not joined it", what);
  bool now = mode == Mode::inline_;
  {
    std::lock_guard<std::mutex> lock(mu);
    enqueue_locked(stream, what, spans, now ? nullptr : std::move(run), cost);
  }
  if (!now || !run) return;
  try {
    run();
  } catch (const std::exception& error) {
    std::lock_guard<std::mutex> lock(mu);
    fail(what, error.what());
  }
}

void Runtime::enqueue_locked(int id, const char* what, const std::vector<Span>& spans,
                             std::function<void()> run, const Cost& cost, const Clock* after) {
  Stream& stream = streams_[id];
  uint64_t number = ++stream.issued;
  counts.tasks++;
  stream.clock[id] = number;
  join(stream.clock, host_);  // the host launches it after all that it has waited for
  if (after) join(stream.clock, *after);

  double& host = host_time[lane];
  host += rates.launch;
  double start = std::max(stream.time, host);
  stream.time = start + rates.seconds(cost);
  if (tracing) trace.push_back({id, what, late::site, start, stream.time, cost.bytes});

  if (detect) {
    uint32_t from = spans.empty() ? 0 : site_id();
    for (bool write : {false, true})  // reads first: an operation does not race with itself
      for (const Span& span : spans)
        if (span.write == write && !span.empty())
          if (Region* region = find(span.lo)) note(region, span, id, stream.clock, what, from);
  }
  if (mode == Mode::inline_) {
    stream.done = stream.released = number;
    if (run) run();
    return;
  }
  push(stream, id, {number, what, std::move(run)});
}

void Runtime::push(Stream& stream, int id, Task task) {
  stream.queue.push_back(std::move(task));
  if (mode != Mode::lazy) stream.released = stream.issued;
  if (!stream.started) {
    stream.started = true;
    std::thread([this, id] { work(id); }).detach();
  }
  changed_.notify_all();
}

void Runtime::wait_event(int id, const Event& event) {
  if (event.stream < 0) return;
  use_device(id / kStreamsEach, "wait");
  if (event.graph) {
    if (!capture || event.graph != capture.get()) refuse("a wait for an event of another capture");
    std::lock_guard<std::mutex> lock(mu);
    capture->streams.insert(id);
    return;
  }
  if (captures(id) && event.number) refuse("a wait for an event from outside");
  std::lock_guard<std::mutex> lock(mu);
  Stream& stream = streams_[id];
  join(stream.clock, event.clock);
  stream.time = std::max(stream.time, event.time);
  if (event.stream == id || streams_[event.stream].done >= event.number) return;
  uint64_t number = ++stream.issued;
  stream.clock[id] = number;
  push(stream, id, {number, "wait", nullptr, event.stream, event.number});
}

void Runtime::release(int stream, uint64_t number) {
  if (streams_[stream].released >= number) return;
  streams_[stream].released = number;
  changed_.notify_all();
}

void Runtime::fail(const char* what, const char* why) {
  if (failure_.empty()) failure_ = std::string(what) + ": " + why;
}

void Runtime::work(int id) {
  if (on_thread) on_thread();
  Stream& stream = streams_[id];
  std::unique_lock<std::mutex> lock(mu);
  for (;;) {
    changed_.wait(lock, [&] {
      return !stream.queue.empty() && stream.queue.front().number <= stream.released;
    });
    Task task = std::move(stream.queue.front());
    stream.queue.pop_front();
    if (task.wait_stream >= 0) {
      release(task.wait_stream, task.wait_number);
      changed_.wait(lock, [&] { return streams_[task.wait_stream].done >= task.wait_number; });
    } else {
      bool pauses = mode == Mode::random && std::uniform_real_distribution<>()(rng) < nap;
      int us = pauses ? int(rng() % uint64_t(max_us + 1)) : 0;
      lock.unlock();
      if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
      std::string why;
      if (task.run) {
        try {
          task.run();
        } catch (const std::exception& error) {
          why = error.what();
        }
        task.run = nullptr;  // without the lock: it gives tensors back
      }
      lock.lock();
      if (!why.empty()) fail(task.what, why.c_str());
    }
    stream.done = task.number;
    changed_.notify_all();
  }
}

Event Runtime::record(int id) {
  use_device(id / kStreamsEach, "event");
  std::lock_guard<std::mutex> lock(mu);
  const Stream& stream = streams_[id];
  const void* graph = captures(id) ? capture.get() : nullptr;
  return {id, stream.issued, stream.clock, stream.time, graph};
}

bool Runtime::is_done(const std::vector<Event>& events) const {
  return std::all_of(events.begin(), events.end(), [&](const Event& event) {
    return streams_[event.stream].done >= event.number;
  });
}

void Runtime::host_joins(const Event& event) {
  join(host_, event.clock);
  host_time[lane] = std::max(host_time[lane], event.time);
  unguard();
}

bool Runtime::query(const Event& event) {
  check_capture(&event, "a question for an event");
  if (event.stream < 0) return true;
  queries++;
  std::lock_guard<std::mutex> lock(mu);
  release(event.stream, event.number);
  if (streams_[event.stream].done < event.number) return false;
  host_joins(event);
  return true;
}

void Runtime::want(const Event& event) {
  std::lock_guard<std::mutex> lock(mu);
  release(event.stream, event.number);
}

void Runtime::host_wait(const Event& event) {
  check_capture(&event, "a wait of the host");
  if (event.stream < 0) return;
  {
    std::unique_lock<std::mutex> lock(mu);
    counts.syncs++;
    release(event.stream, event.number);
    changed_.wait(lock, [&] { return streams_[event.stream].done >= event.number; });
    host_joins(event);
  }
  raise_failure();
}

void Runtime::tell(const char* kind, const std::string& text, const std::string& key) {
  std::lock_guard<std::mutex> lock(mu);
  say(kind, text, key);
}

void Runtime::raise_failure() {
  std::string text;
  {
    std::lock_guard<std::mutex> lock(mu);
    if (failure_.empty()) return;
    text.swap(failure_);
    for (const Report& report : reports) text += "\n" + report.kind + ": " + report.text;
  }
  throw std::runtime_error("late: a task failed: " + text);
}

void Runtime::implied_wait(int stream) {
  if (sync_error) throw std::runtime_error("called a synchronizing operation");
  host_wait_stream(stream);
}

void Runtime::host_wait_device(int device) {
  for (int id = device * kStreamsEach; id < (device + 1) * kStreamsEach; id++)
    if (streams_[id].issued) host_wait_stream(id);
}

int Runtime::new_stream(int device, int priority) {
  use_device(device, "stream");
  std::lock_guard<std::mutex> lock(mu);
  int pool = std::clamp(-priority, 0, kPriorities - 1);
  int turn = next_stream_[device][pool]++ % kPool;
  bool communicators = pool == 0 || pool == kPriorities - 1;  // which take the highest one, if any
  return 1 + pool * kPool + (aliased && communicators ? 0 : turn);
}

void Runtime::forget() {
  std::lock_guard<std::mutex> lock(mu);
  reports.clear();
  said_.clear();
  failure_.clear();
  trace.clear();
  close_opened();
}

}  // namespace late
