// Simulated time: what a task costs, by rates that the test chooses. No clock of the machine is read.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

namespace late {

// What a task moves or computes. The longer of the two decides; copies and messages have rates of
// their own.
enum class Way { kernel, to_device, to_host, network };
struct Cost {
  double bytes = 0, flops = 0;
  Way way = Way::kernel;
};

struct Rates {  // a second of simulated time
  double flops = 100e12, memory = 2e12, to_device = 25e9, to_host = 25e9, network = 100e9;
  double launch = 5e-6;    // that the host needs to launch a task
  double shortest = 2e-6;  // that any task runs

  double seconds(const Cost& cost) const {
    switch (cost.way) {
      case Way::to_device: return std::max(shortest, cost.bytes / to_device);
      case Way::to_host: return std::max(shortest, cost.bytes / to_host);
      case Way::network: return std::max(shortest, cost.bytes / network);
      default: return std::max({shortest, cost.bytes / memory, cost.flops / flops});
    }
  }
};

struct Traced {  // a task, in simulated time
  int stream;    // kHost + n: the host's lane n
  std::string what, site;
  double start, end, bytes;
};

constexpr int kLanes = 8;  // of the host: threads that work beside each other
inline thread_local int lane = 0;

}  // namespace late
