// Links: how ranks that share no memory tell each other what they write (docs/design/ranks.md).
//
// Each rank has a copy of the ranks' memory (ranks.h), and a connection to every other rank. What others are to read of what a rank has written
// it sends to them as frames. At the other end one thread for each connection puts the bytes in the same place of that rank's copy, then
// counts the mark on, as the rank itself does in memory that is shared. So all the rest of a step is the same in both cases.
#pragma once
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

namespace everbatch {

// The head of a frame; the bytes follow.
struct Frame {
    enum Kind : uint32_t { PUT = 0x50555430, BEAT, LOST };

    uint32_t kind;
    int32_t mark;     // PUT, BEAT: index of the mark that counts; -1: none
    uint32_t count;   // PUT: what it counts to; LOST: number of the rank
    uint32_t unused;
    int64_t offset, bytes;  // PUT: where they belong in the memory
};
static_assert(sizeof(Frame) == 32);

class Links {
public:
    static constexpr int NAP_MS = 10;

    explicit Links(int32_t ranks) : links_(size_t(ranks)) {}

    // A connected, blocking socket to the rank of this number. The caller closes it, after all threads that use it have ended.
    void connect(int32_t number, int socket) { links_[size_t(number)].socket = socket; }

    // Sends a frame to a rank. goes_on() is asked after every NAP_MS in which that rank took nothing. Returns false if it said no, or the
    // connection has ended. Any thread may call it.
    template <class GoesOn>
    bool send(int32_t number, const Frame& frame, const void* data, GoesOn goes_on) {
        Link& link = links_[size_t(number)];
        const std::lock_guard<std::mutex> lock(link.sends);
        return link.send(frame, data, goes_on);
    }

    // Sends a frame without data if nothing keeps it waiting.
    void send_at_once(int32_t number, const Frame& frame) {
        Link& link = links_[size_t(number)];
        const std::unique_lock<std::mutex> lock(link.sends, std::try_to_lock);
        if (lock) link.send(frame, nullptr, [] { return false; });
    }

    // Reads so many bytes that a rank has sent. Returns false when the connection has ended. Only one thread may call it for each rank.
    bool read(int32_t number, void* to, int64_t bytes) {
        char* at = static_cast<char*>(to);
        while (bytes > 0) {
            const ssize_t got = recv(links_[size_t(number)].socket, at, size_t(bytes), 0);
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) return false;
            at += got, bytes -= got;
        }
        return true;
    }

    // True for one of the threads that ask within NAP_MS.
    bool is_time_to_beat() {
        const int64_t now = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::milliseconds(1);
        int64_t last = last_beat_.load(std::memory_order_relaxed);
        return now - last >= NAP_MS && last_beat_.compare_exchange_strong(last, now);
    }

private:
    struct Link {
        int socket = -1;
        std::mutex sends;
        bool is_cut_off = false;  // within a frame, so that no other one may follow

        template <class GoesOn>
        bool send(const Frame& frame, const void* data, GoesOn goes_on) {
            const size_t length = sizeof(Frame) + size_t(frame.bytes);
            for (size_t sent = 0; sent < length && !is_cut_off;) {
                const size_t of_head = std::min(sent, sizeof(Frame)), of_data = sent - of_head;
                iovec parts[] = {{const_cast<char*>(reinterpret_cast<const char*>(&frame)) + of_head, sizeof(Frame) - of_head},
                                 {const_cast<char*>(static_cast<const char*>(data)) + of_data, size_t(frame.bytes) - of_data}};
                msghdr message{};
                message.msg_iov = parts, message.msg_iovlen = 2;
                const ssize_t took = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
                if (took >= 0) {
                    sent += size_t(took);
                } else if (errno != EAGAIN && errno != EINTR) {
                    is_cut_off = true;
                } else if (pollfd room{socket, POLLOUT, 0}; poll(&room, 1, NAP_MS) == 0 && !goes_on()) {
                    if (sent == 0) return false;
                    is_cut_off = true;
                }
            }
            return !is_cut_off;
        }
    };

    std::vector<Link> links_;
    std::atomic<int64_t> last_beat_{0};
};

}  // namespace everbatch
