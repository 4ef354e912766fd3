#include "heartbeats.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "signals.h"

namespace hfz {

namespace {

constexpr uint32_t kFormat = 0x687a6231;
constexpr double kInterval = 0.5;      // seconds between heartbeats, at most
constexpr double kPartOfTimeout = 0.1;
constexpr double kLate = 2.5;          // intervals after which a heartbeat is late
constexpr int kRegular = 10;           // intervals over which heartbeats arrive before a host is judged
constexpr int kSuccessors = 2;         // hosts that watch a host: one of them may fail with it
constexpr int kRepeats = 3;            // of packets that are sent once; the network may drop some
constexpr int kPacketsAStep = 4096;    // others must not keep this thread from its own heartbeat

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

sockaddr_in address_of(const std::string& address, int port) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(static_cast<uint16_t>(port));
    if (inet_pton(AF_INET, address.c_str(), &at.sin_addr) != 1) throw std::invalid_argument(address + " is no IPv4 address");
    return at;
}

}  // namespace

Heartbeats::Heartbeats(const std::string& address) {
    sockaddr_in at = address_of(address, 0);
    socklen_t size = sizeof at;
    socket_ = socket(AF_INET, SOCK_DGRAM, 0);
    if (socket_ < 0 || fcntl(socket_, F_SETFD, FD_CLOEXEC) < 0 || bind(socket_, reinterpret_cast<sockaddr*>(&at), size) < 0 ||
        getsockname(socket_, reinterpret_cast<sockaddr*>(&at), &size) < 0) {
        const int error = errno;
        if (socket_ >= 0) close(socket_);
        throw std::system_error(error, std::generic_category(), "a UDP socket on " + address);
    }
    port_ = ntohs(at.sin_port);
}

Heartbeats::~Heartbeats() {
    stop();
    close_probes();
    close(socket_);
}

void Heartbeats::close_probes() {
    for (int& probe : probes_)
        if (probe >= 0) close(std::exchange(probe, -1));
}

void Heartbeats::join(const Token& token, int rank, const std::vector<Member>& members, double timeout, double now) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int ranks = static_cast<int>(members.size());
    if (rank < 0 || rank >= ranks) throw std::invalid_argument("the rank is not among the members");
    token_ = token;
    rank_ = rank;
    timeout_ = timeout;
    interval_ = std::min(kInterval, timeout * kPartOfTimeout);
    stepped_ = next_ = now;
    host_of_.clear();
    at_.clear();
    targets_.clear();
    others_.clear();
    found_.clear();
    close_probes();
    unreachable_ = exits_ = 0;
    int hosts = 0;
    for (const auto& [host, address, port] : members) {
        host_of_.push_back(host);
        at_.push_back(address_of(address, port));
        hosts = std::max(hosts, host + 1);
    }
    host_ = host_of_[rank];
    hosts_.assign(hosts, Host{});
    heard_.assign(ranks, now);  // the first ranks of the hosts begin
    probes_.assign(ranks, -1);
    exited_.assign(ranks, false);
    for (int step = 1; step <= kSuccessors; ++step) hosts_[(host_ + hosts * kSuccessors - step) % hosts].watched = hosts > step;
    hosts_[host_].watched = false;
    for (int other = 0; other < ranks; ++other) {
        if (other == rank) continue;
        others_.push_back(other);
        const int ahead = (host_of_[other] - host_ + hosts) % hosts;  // 0: this host
        if (ahead <= kSuccessors) targets_.push_back(other);
    }
    joined_ = true;
}

void Heartbeats::send(const std::vector<int>& ranks, Kind kind, int host) const {
    const Packet packet{htonl(kFormat), htonl(static_cast<uint32_t>(kind)), htonl(static_cast<uint32_t>(rank_)),
                        htonl(static_cast<uint32_t>(host)), token_};
    for (int rank : ranks)  // a packet that cannot be sent is like one that the network drops
        (void)!sendto(socket_, &packet, sizeof packet, MSG_DONTWAIT, reinterpret_cast<const sockaddr*>(&at_[rank]), sizeof at_[rank]);
}

void Heartbeats::send_unreachable() const {
    for (int host : found_) send(others_, Kind::unreachable, host);
}

void Heartbeats::mark_unreachable(int host) {
    if (hosts_[host].state == State::unreachable) return;
    hosts_[host].state = State::unreachable;
    ++unreachable_;
}

void Heartbeats::receive(double now) {
    Packet packet;
    for (int left = kPacketsAStep; left > 0; --left) {
        const ssize_t size = recv(socket_, &packet, sizeof packet, MSG_DONTWAIT | MSG_TRUNC);
        if (size < 0 && errno != EINTR && errno != ECONNREFUSED) return;
        if (size != sizeof packet || ntohl(packet.format) != kFormat || packet.token != token_) continue;
        const uint32_t rank = ntohl(packet.rank), subject = ntohl(packet.host);
        if (rank >= host_of_.size() || subject >= hosts_.size()) continue;
        exited_[rank] = false;
        Host& host = hosts_[host_of_[rank]];
        const bool reachable = host.state != State::unreachable;
        switch (static_cast<Kind>(ntohl(packet.kind))) {
            case Kind::beat:
                if (is_missed(host, now)) host.regular_since = now;
                heard_[rank] = host.heard = now;
                if (reachable && now - host.regular_since >= kRegular * interval_) host.state = State::heard;
                break;
            case Kind::leave:  // a heartbeat of another of its ranks may follow
                heard_[rank] = -HUGE_VAL;
                if (reachable) host.state = State::left;
                break;
            case Kind::unreachable:
                mark_unreachable(static_cast<int>(subject));
        }
    }
}

bool Heartbeats::is_missed(const Host& host, double now) const { return now - host.heard > kLate * interval_; }

// A connected socket reports at its next packet that the one before was refused.
void Heartbeats::probe(double now) {
    for (size_t rank = 0; rank < host_of_.size(); ++rank) {
        const Host& host = hosts_[host_of_[rank]];
        if (!host.watched || host.state != State::heard || !is_missed(host, now) || exited_[rank]) continue;
        int& probe = probes_[rank];
        if (probe < 0) {
            probe = socket(AF_INET, SOCK_DGRAM, 0);
            if (probe < 0 || fcntl(probe, F_SETFD, FD_CLOEXEC) < 0) continue;
            (void)!connect(probe, reinterpret_cast<const sockaddr*>(&at_[rank]), sizeof at_[rank]);
        }
        if (::send(probe, "", 0, MSG_DONTWAIT) < 0 && errno == ECONNREFUSED) {
            exited_[rank] = true;
            ++exits_;
            close(std::exchange(probe, -1));
        }
    }
}

void Heartbeats::judge(double now) {
    // A host that is stopped for nearly the timeout has sent its last heartbeat an interval before.
    for (size_t host = 0; host < hosts_.size(); ++host) {
        const Host& each = hosts_[host];
        if (!each.watched || each.state != State::heard || now - each.heard <= timeout_ + kLate * interval_) continue;
        bool runs = false;
        for (size_t rank = 0; rank < host_of_.size(); ++rank) runs |= host_of_[rank] == static_cast<int>(host) && !exited_[rank];
        if (!runs) continue;
        mark_unreachable(static_cast<int>(host));
        found_.push_back(static_cast<int>(host));
        if (sends(now)) send_unreachable();
    }
}

bool Heartbeats::sends(double now) const {
    for (int rank = 0; rank < rank_; ++rank)
        if (host_of_[rank] == host_ && now - heard_[rank] <= kLate * interval_) return false;
    return true;
}

double Heartbeats::step(double now) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!joined_) return kInterval;
    // This process was stopped or had no core: the time proves nothing about the others.
    if (const double gap = now - stepped_; gap > kLate * interval_) {
        for (Host& each : hosts_) {
            each.heard += gap;
            each.regular_since += gap;
        }
        for (double& each : heard_) each += gap;
    }
    stepped_ = now;
    receive(now);
    judge(now);
    if (now >= next_) {
        next_ = now + interval_;
        probe(now);
        if (sends(now)) {
            send(targets_, Kind::beat);
            send_unreachable();
        }
    }
    return next_ - now;
}

void Heartbeats::run() {
    SignalsBlocked blocked;
    ending_ = false;
    thread_ = std::thread([this] {
#ifdef __linux__
        pthread_setname_np(pthread_self(), "hf_zero-hosts");
#endif
        pollfd arrives{socket_, POLLIN, 0};
        while (!ending_) poll(&arrives, 1, static_cast<int>(std::ceil(1000 * std::max(0.0, step(seconds())))));
    });
}

void Heartbeats::stop() {
    if (!in_own_process()) return;
    ending_ = true;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (int repeat = 0; joined_ && repeat < kRepeats; ++repeat) {
            send(targets_, Kind::leave);
            send_unreachable();
        }
        joined_ = false;
    }
    if (!thread_.joinable()) return;
    sockaddr_in own{};
    socklen_t size = sizeof own;
    getsockname(socket_, reinterpret_cast<sockaddr*>(&own), &size);
    (void)!sendto(socket_, "", 0, MSG_DONTWAIT, reinterpret_cast<sockaddr*>(&own), size);  // wakes the thread
    thread_.join();
}

std::vector<int> Heartbeats::unreachable() {
    std::vector<int> found;
    if (unreachable_ == 0 || !in_own_process()) return found;
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t host = 0; host < hosts_.size(); ++host)
        if (hosts_[host].state == State::unreachable) found.push_back(static_cast<int>(host));
    return found;
}

std::vector<int> Heartbeats::unheard() {
    std::vector<int> found;
    if (!in_own_process()) return found;
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t host = 0; host < hosts_.size(); ++host)
        if (hosts_[host].watched && hosts_[host].state == State::unheard) found.push_back(static_cast<int>(host));
    return found;
}

std::vector<int> Heartbeats::exited() {
    std::vector<int> found;
    if (exits_ == 0 || !in_own_process()) return found;
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t rank = 0; rank < exited_.size(); ++rank)
        if (exited_[rank]) found.push_back(static_cast<int>(rank));
    return found;
}

}  // namespace hfz

namespace py = pybind11;
using hfz::Heartbeats;

namespace {

struct OwnProcessOnly {
    void operator()(Heartbeats* heartbeats) const {
        if (heartbeats->in_own_process()) delete heartbeats;
    }
};

void join(Heartbeats& heartbeats, const std::string& token, int rank, const std::vector<Heartbeats::Member>& members,
          double timeout, double now) {
    Heartbeats::Token bytes{};
    if (token.size() != bytes.size()) throw std::invalid_argument("a token has 16 bytes");
    std::copy(token.begin(), token.end(), bytes.begin());
    heartbeats.join(bytes, rank, members, timeout, now);
}

}  // namespace

void bind_heartbeats(py::module_& m) {
    const auto unlocked = py::call_guard<py::gil_scoped_release>();
    py::class_<Heartbeats, std::unique_ptr<Heartbeats, OwnProcessOnly>>(
        m, "Heartbeats", "Heartbeats of a rank's host; see hf_zero.distributed.host_heartbeats, which calls it.")
        .def(py::init<std::string>(), py::arg("address"))
        .def_property_readonly("port", &Heartbeats::port)
        .def("join", &join, py::arg("token"), py::arg("rank"), py::arg("members"), py::arg("timeout"), py::arg("now"), unlocked)
        .def("step", &Heartbeats::step, py::arg("now"), unlocked)
        .def("run", &Heartbeats::run, unlocked)
        .def("stop", &Heartbeats::stop, unlocked)
        .def("unreachable", &Heartbeats::unreachable, unlocked)
        .def("unheard", &Heartbeats::unheard, unlocked)
        .def("exited", &Heartbeats::exited, unlocked);
}
