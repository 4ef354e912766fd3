// Heartbeats between the hosts of a job, by UDP, from a thread that never takes the interpreter's
// lock: a rank that compiles for minutes still answers for its host.
//
// Each rank has a socket and a thread. On each host one rank sends: the first that the others of
// the host have heard recently. Should its process end or be stopped, the next one misses the
// heartbeats and sends. The packets go to all ranks of the next two hosts in a ring, so that each of
// them judges by itself, and the cost does not depend on the number of hosts. The ranks that find a
// host unreachable, without a heartbeat for longer than the timeout, tell all ranks of the job,
// because the store may have been on that host.
//
// A host is judged once its heartbeats have been regular: a network may let the first packets pass
// and drop the rest. A host that runs refuses packets to the port of a process that has exited, so
// the ranks that miss its heartbeats send to its ports, and tell its exit from its loss.
//
// UDP, not TCP: after a short outage TCP sends again only when its growing retransmission time has
// passed, up to as long as the outage itself; a packet that comes tells that the host lives now.
#pragma once

#include <netinet/in.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace hfz {

class Heartbeats {
  public:
    using Token = std::array<char, 16>;
    using Member = std::tuple<int, std::string, int>;  // host, IPv4 address, port

    // Open a socket on `address`. Throws std::system_error.
    explicit Heartbeats(const std::string& address);
    ~Heartbeats();
    Heartbeats(const Heartbeats&) = delete;
    Heartbeats& operator=(const Heartbeats&) = delete;

    int port() const { return port_; }

    // Begin as `rank` of `members`, at time `now`: hosts are numbered from 0, and each is unreachable
    // after `timeout` seconds without a heartbeat. Packets without `token` are ignored.
    void join(const Token& token, int rank, const std::vector<Member>& members, double timeout, double now);

    // Read what has arrived, judge, and send if it is time. Returns the seconds until the next call.
    double step(double now);

    // Call step on a thread from now on, by the monotonic clock.
    void run();

    // Tell the others that this rank leaves, and end the thread. Idempotent.
    void stop();

    // The hosts that are unreachable, those that this one watches and has not heard regularly, and the
    // ranks that have exited without leaving.
    std::vector<int> unreachable();
    std::vector<int> unheard();
    std::vector<int> exited();

    // A child of fork() has the socket, but not the thread, and maybe a lock that nobody releases.
    bool in_own_process() const { return owner_ == getpid(); }

  private:
    enum class State { unheard, heard, left, unreachable };  // heard: regularly
    enum class Kind : uint32_t { beat, leave, unreachable };
    struct Packet {  // in network order
        uint32_t format, kind, rank, host;
        Token token;
    };
    struct Host {
        State state = State::unheard;
        double heard = -HUGE_VAL, regular_since = 0;
        bool watched = false;
    };

    // All are called with mutex_ held.
    void receive(double now);
    void judge(double now);
    bool sends(double now) const;
    void send(const std::vector<int>& ranks, Kind kind, int host = 0) const;
    void send_unreachable() const;
    void mark_unreachable(int host);
    void probe(double now);
    bool is_missed(const Host& host, double now) const;
    void close_probes();

    const pid_t owner_ = getpid();
    int socket_ = -1, port_ = 0;
    std::mutex mutex_;  // guards the members below
    bool joined_ = false;
    Token token_{};
    int rank_ = 0, host_ = 0;
    double timeout_ = 0, interval_ = 0, stepped_ = 0, next_ = 0;
    std::vector<int> host_of_;       // of each rank
    std::vector<sockaddr_in> at_;    // of each rank
    std::vector<double> heard_;      // of each rank, if it is on this host
    std::vector<Host> hosts_;
    std::vector<int> targets_;       // ranks to which heartbeats go
    std::vector<int> others_;        // all ranks but this one
    std::vector<int> found_;         // hosts that this rank itself has found unreachable
    std::vector<int> probes_;        // of each rank: a socket connected to its port, or -1
    std::vector<bool> exited_;       // of each rank: whether its port has refused a packet
    std::atomic<int> unreachable_{0}, exits_{0};
    std::atomic<bool> ending_{false};
    std::thread thread_;
};

}  // namespace hfz
