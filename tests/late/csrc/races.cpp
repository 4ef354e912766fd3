// Races, by vector clocks: two accesses to the same bytes, one of them a write, neither after the
// other. They are found whether or not they happened, so one run of any mode shows them.
#include <cstring>
#include <sstream>

#include "runtime.h"

namespace late {

std::string name_of(int agent) {
  if (agent == kHost) return "host";
  int device = agent / kStreamsEach, stream = agent % kStreamsEach;
  return "stream " + std::to_string(stream) + (device ? " of device " + std::to_string(device) : "");
}

Region* Runtime::find(const void* memory) {
  auto next = regions_.upper_bound((char*)memory);
  if (next == regions_.begin()) return nullptr;
  Region* region = std::prev(next)->second;
  return (char*)memory < region->base + region->size ? region : nullptr;
}

void Runtime::say(const char* kind, const std::string& text, const std::string& key) {
  if (said_.insert({kind, key}).second) reports.push_back({kind, text});
}

std::string Runtime::where(uint32_t id) const { return id ? " [" + site_text_[id] + "]" : ""; }

uint32_t Runtime::site_id() {
  if (!sites || late::site.empty()) return 0;
  auto known = site_ids_.find(late::site);
  if (known != site_ids_.end()) return known->second;
  site_text_.push_back(late::site);
  return site_ids_[late::site] = uint32_t(site_text_.size() - 1);
}

void Runtime::note(Region* region, const Span& span, int agent, const Clock& clock,
                   const char* what, uint32_t site) {
  counts.accesses++;
  uint64_t number = clock[agent];
  for (const Access& other : region->seen) {
    bool ordered = clock[other.agent] >= other.number;
    if (ordered || !(span.write || other.span.write) || !span.overlaps(other.span)) continue;
    bool reuse = !strcmp(what, "reuse"), was_reuse = !strcmp(other.what, "reuse");
    std::ostringstream text;
    if (reuse) text << "memory given back may be used again by " << name_of(agent);
    else text << name_of(agent) << (span.write ? " writes" : " reads");
    text << " (" << what << " #" << number << where(site) << ") while " << name_of(other.agent)
         << (other.span.write ? " writes" : " reads") << " it (" << other.what << " #"
         << other.number << where(other.site) << "), with no wait between; bytes "
         << std::max(span.lo, other.span.lo) - region->base << "-"
         << std::min(span.hi, other.span.hi) - region->base << " of " << region->size
         << (region->host ? " in host memory" : "");
    std::ostringstream key;
    key << what << '|' << other.what << '|' << agent << '|' << other.agent << '|' << site << '|'
        << other.site;
    say(reuse || was_reuse ? "reuse" : "race", text.str(), key.str());
  }
  auto& seen = region->seen;
  seen.erase(std::remove_if(seen.begin(), seen.end(),
                            [&](const Access& other) {  // what this access now stands for
                              if (!span.covers(other.span)) return false;
                              return span.write || (!other.span.write && other.agent == agent);
                            }),
             seen.end());
  seen.push_back({span, agent, number, what, site});
  if (region->host && guard_host) guard(region, span.lo, span.hi, span.write, agent, number);
}

}  // namespace late
