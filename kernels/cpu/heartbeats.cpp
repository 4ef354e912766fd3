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

#include "signals.h"

namespace hfz {

namespace {

constexpr uint32_t kFormat = 0x687a6231;
constexpr double kInterval = 0.5;      // seconds between heartbeats, at most
constexpr double kPartOfTimeout = 0.1;
constexpr double kLate = 2.5;          // intervals after which a heartbeat is late
constexpr int kSuccessors = 2;         // hosts that watch a host: one of them may be lost with it
constexpr int kRepeats = 3;            // of packets that are sent once; some may be lost
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
    close(socket_);
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
    losses_ = 0;
    int hosts = 0;
    for (const auto& [host, address, port] : members) {
        host_of_.push_back(host);
        at_.push_back(address_of(address, port));
        hosts = std::max(hosts, host + 1);
    }
    host_ = host_of_[rank];
    hosts_.assign(hosts, Host{});
    heard_.assign(ranks, now);  // the first ranks of the hosts begin
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
    for (int rank : ranks)  // a packet that cannot be sent is one that is lost
        (void)!sendto(socket_, &packet, sizeof packet, MSG_DONTWAIT, reinterpret_cast<const sockaddr*>(&at_[rank]), sizeof at_[rank]);
}

void Heartbeats::send_losses() const {
    for (int host : found_) send(others_, Kind::lost, host);
}

void Heartbeats::lose(int host) {
    if (hosts_[host].state == State::lost) return;
    hosts_[host].state = State::lost;
    ++losses_;
}

void Heartbeats::receive(double now) {
    Packet packet;
    for (int left = kPacketsAStep; left > 0; --left) {
        const ssize_t size = recv(socket_, &packet, sizeof packet, MSG_DONTWAIT | MSG_TRUNC);
        if (size < 0 && errno != EINTR && errno != ECONNREFUSED) return;
        if (size != sizeof packet || ntohl(packet.format) != kFormat || packet.token != token_) continue;
        const uint32_t rank = ntohl(packet.rank), subject = ntohl(packet.host);
        if (rank >= host_of_.size() || subject >= hosts_.size()) continue;
        const int host = host_of_[rank];
        const bool lost = hosts_[host].state == State::lost;
        switch (static_cast<Kind>(ntohl(packet.kind))) {
            case Kind::beat:
                heard_[rank] = hosts_[host].heard = now;
                if (!lost) hosts_[host].state = State::heard;
                break;
            case Kind::leave:  // a heartbeat of another of its ranks may follow
                heard_[rank] = -HUGE_VAL;
                if (!lost) hosts_[host].state = State::left;
                break;
            case Kind::lost:
                lose(static_cast<int>(subject));
        }
    }
}

void Heartbeats::judge(double now) {
    // A host that is stopped for nearly the timeout has sent its last heartbeat an interval before.
    for (size_t host = 0; host < hosts_.size(); ++host) {
        const Host& each = hosts_[host];
        if (!each.watched || each.state != State::heard || now - each.heard <= timeout_ + kLate * interval_) continue;
        lose(static_cast<int>(host));
        found_.push_back(static_cast<int>(host));
        if (sends(now)) send_losses();
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
        for (Host& each : hosts_) each.heard += gap;
        for (double& each : heard_) each += gap;
    }
    stepped_ = now;
    receive(now);
    judge(now);
    if (now >= next_) {
        next_ = now + interval_;
        if (sends(now)) {
            send(targets_, Kind::beat);
            send_losses();
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
            send_losses();
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

std::vector<int> Heartbeats::lost() {
    std::vector<int> found;
    if (losses_ == 0 || !in_own_process()) return found;
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t host = 0; host < hosts_.size(); ++host)
        if (hosts_[host].state == State::lost) found.push_back(static_cast<int>(host));
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
        .def("lost", &Heartbeats::lost, unlocked)
        .def("unheard", &Heartbeats::unheard, unlocked);
}
