// What the host itself reads and writes: pages that it must not touch are protected, and a fault
// becomes a report with its place; the page is opened and the program goes on.
//
// Device memory is never readable at its visible address. Pinned memory is closed while a copy
// fills it, and read-only while a copy reads it, until the host has waited for that copy.
#include <csignal>
#include <dlfcn.h>
#include <sstream>
#include <sys/mman.h>
#include <ucontext.h>

#include "runtime.h"

namespace late {

namespace {

char* page_of(const void* at) { return (char*)(uintptr_t(at) & ~(kPage - 1)); }

struct sigaction before;

// The library and function that touched the page, as far as its symbols tell.
std::string native_place(void* instruction) {
  Dl_info info{};
  if (!dladdr(instruction, &info) || !info.dli_fname) return "native code";
  std::string file = info.dli_fname;
  file = file.substr(file.rfind('/') + 1);
  return info.dli_sname ? file + " " + info.dli_sname : file;
}

void on_signal(int, siginfo_t* info, void* context) {
  auto& registers = ((ucontext_t*)context)->uc_mcontext;
#if defined(__x86_64__)
  bool write = registers.gregs[REG_ERR] & 2;
  void* instruction = (void*)registers.gregs[REG_RIP];
#else
  bool write = true;  // not told: the stricter reading
  void* instruction = (void*)registers.pc;
#endif
  std::string from = native_place(instruction);
  if (rt().find_site) {
    std::string python = rt().find_site();
    from = python.empty() ? from + ", a thread without Python" : python + ", in " + from;
  }
  if (rt().on_fault((char*)info->si_addr, write, from)) return;
  sigaction(SIGSEGV, &before, nullptr);  // not ours: it comes again, as before
}

}  // namespace

void catch_faults() {
  struct sigaction action {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &before);
}

bool Runtime::on_fault(char* at, bool write, const std::string& from) {
  std::lock_guard<std::mutex> lock(mu);
  const char* verb = write ? "writes" : "reads";
  if (is_device_memory(at)) {
    counts.faults++;
    say("host", std::string("host ") + verb + " device memory at its address [" + from + "]",
        std::string(verb) + from);
    mprotect(page_of(at), kPage, PROT_READ | PROT_WRITE);
    opened_.push_back(page_of(at));
    return true;
  }
  Region* region = find(at);
  if (!region || !region->host) return false;
  bool exact = false;
  for (const Guarded& guarded : guarded_) {
    if (at < guarded.lo || at >= guarded.hi || !(guarded.write || write)) continue;
    exact = true;
    const char* what = "a copy";
    uint32_t site = 0;
    for (const Access& access : region->seen)
      if (access.agent == guarded.agent && access.number == guarded.number) {
        what = access.what;
        site = access.site;
      }
    std::ostringstream text;
    text << "host " << verb << " host memory [" << from << "] while " << name_of(guarded.agent)
         << (guarded.write ? " writes" : " reads") << " it (" << what << " #" << guarded.number
         << where(site) << "), with no wait between; byte " << at - region->base << " of "
         << region->size;
    say("host", text.str(), std::string(what) + verb + from + std::to_string(guarded.agent));
    break;
  }
  (exact ? counts.faults : counts.false_shares)++;  // another's bytes on the same page
  mprotect(page_of(at), kPage, PROT_READ | PROT_WRITE);
  return true;
}

void Runtime::guard(Region* region, char* lo, char* hi, bool write, int agent, uint64_t number) {
  if (lo == hi) return;
  guarded_.push_back({lo, hi, write, agent, number, region});
  protect(lo, hi);
}

void Runtime::protect(char* lo, char* hi) {
  char* end = page_of(hi + kPage - 1);
  for (char* page = page_of(lo); page < end;) {
    // The pages from here on that have the same protection go in one call.
    auto protection = [&](char* at) {
      int found = PROT_READ | PROT_WRITE;
      for (const Guarded& guarded : guarded_)
        if (guarded.lo < at + kPage && at < guarded.hi)
          found = guarded.write ? PROT_NONE : std::min(found, PROT_READ);
      return found;
    };
    int wanted = protection(page);
    char* stop = page + kPage;
    while (stop < end && protection(stop) == wanted) stop += kPage;
    mprotect(page, size_t(stop - page), wanted);
    page = stop;
  }
}

void Runtime::unguard() {
  std::vector<Guarded> over;
  guarded_.erase(std::remove_if(guarded_.begin(), guarded_.end(),
                                [&](const Guarded& guarded) {
                                  if (host_[guarded.agent] < guarded.number) return false;
                                  over.push_back(guarded);
                                  return true;
                                }),
                 guarded_.end());
  for (const Guarded& guarded : over) protect(guarded.lo, guarded.hi);
}

void Runtime::close_opened() {
  for (char* page : opened_) mprotect(page, kPage, PROT_NONE);
  opened_.clear();
}

}  // namespace late
