// Captures: what is launched on the streams of a capture is kept, and runs when its graph is
// launched, each time anew on the same memory. The rules are CUDA's: a capture waits for no event from outside,
// and the host neither asks nor waits for what is in it.
#include <stdexcept>

#include "runtime.h"

namespace late {

bool Runtime::captures(int stream) const { return capture && capture->streams.count(stream); }

std::shared_ptr<Graph> Runtime::begin_capture(int stream, std::shared_ptr<GraphMemory> memory) {
  std::lock_guard<std::mutex> lock(mu);
  if (capture) throw std::runtime_error("late: a capture begins in a capture");
  auto graph = std::make_shared<Graph>();
  graph->memory = memory ? std::move(memory) : std::make_shared<GraphMemory>();
  graph->origin = stream;
  graph->streams.insert(stream);
  graph->thread = std::this_thread::get_id();
  capture = graph;
  return graph;
}

void Runtime::end_capture() {
  std::lock_guard<std::mutex> lock(mu);
  capture.reset();
}

void Runtime::keep(const char* what, Prepare prepare) {
  std::lock_guard<std::mutex> lock(mu);
  capture->steps.push_back({what, std::move(prepare)});
}

void Runtime::launch(const std::shared_ptr<Graph>& graph) {
  if (capture) throw std::runtime_error("late: a graph is launched in a capture");
  counts.graph_launches++;
  for (const auto& step : graph->steps) step.prepare();
}

void Runtime::refuse(const char* what) {
  std::string from = find_site && sites ? find_site() : "";
  {
    std::lock_guard<std::mutex> lock(mu);
    std::string text = std::string(what) + " in a capture" + (from.empty() ? "" : " [" + from + "]");
    say("capture", text, text);
  }
  throw std::runtime_error(std::string("late: operation not permitted when stream is capturing: ") + what);
}

void Runtime::check_capture(const Event* event, const char* what) {
  bool inside = capture && std::this_thread::get_id() == capture->thread;
  bool of_capture = event && event->graph;
  if (inside || of_capture) refuse(what);
}

}  // namespace late
