// The threads of one parallel region (torch's OpenMP pool), how they share work, and how they wait for each other.
//
// Work: each thread has a share of neighbouring items, which it takes one by one, so that weights stream from memory; who is done
// takes from the others' shares, so that a thread whose core is taken away for a moment does not hold up all. Waiting: spin briefly, then sleep; OpenMP's own barrier spins with the PAUSE
// instruction, which a hypervisor takes for idling (75 us a barrier were seen; there are some 200 of them in a step).
#pragma once
#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

namespace everbatch {

class Barrier {
public:
    explicit Barrier(int size) : size_(size) {}

    void wait() {
        const uint32_t round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.fetch_add(1);
            if (asleep_.load()) syscall(SYS_futex, &round_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
            return;
        }
        for (int i = 0; i < SPINS; i++)
            if (round_.load(std::memory_order_acquire) != round) return;
        asleep_.fetch_add(1);
        while (round_.load() == round) syscall(SYS_futex, &round_, FUTEX_WAIT_PRIVATE, round, nullptr, nullptr, 0);
        asleep_.fetch_sub(1);
    }

private:
    static constexpr int SPINS = 100000;  // some 50 us
    const int size_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int> asleep_{0};
};

class Team {
public:
    // What the threads of a team share.
    class Shared {
    public:
        explicit Shared(int size) : barrier(size), next_(size_t(3 * size)) {}

        Barrier barrier;

        std::atomic<int64_t>& next(int phase, int thread) { return next_[size_t(phase) + 3 * size_t(thread)].value; }

    private:
        struct alignas(64) Counter {
            std::atomic<int64_t> value{0};
        };
        std::vector<Counter> next_;
    };

    Team(Shared& shared, int id, int size) : id(id), size(size), shared_(shared) {}

    const int id, size;

    // The items of 0 .. count-1 that thread `thread` begins with: [first, second).
    std::pair<int64_t, int64_t> share(int64_t count, int thread) const { return {count * thread / size, count * (thread + 1) / size}; }

    // f(item) for every item of 0 .. count-1, each on one thread: its own share in order, then what others have left. Returns when
    // all are done.
    template <class F>
    void for_each(int64_t count, F f) {
        const int phase = phase_;
        phase_ = (phase_ + 1) % 3;
        shared_.next(phase_, id).store(0, std::memory_order_relaxed);  // the coming one's: its last users are a barrier behind
        for (int i = 0; i < size; i++) {
            const int thread = (id + i) % size;
            const auto [first, end] = share(count, thread);
            for (int64_t at; (at = first + shared_.next(phase, thread).fetch_add(1, std::memory_order_relaxed)) < end;) f(at);
        }
        wait();
    }

    void wait() {
        if (size > 1) shared_.barrier.wait();
    }

private:
    Shared& shared_;
    int phase_ = 0;
};

// body(team) on every one of `threads` threads; each must make the same calls of the team.
template <class F>
void run_team(int threads, F body) {
    threads = std::max(1, std::min(threads, omp_get_thread_limit()));
    Team::Shared shared(threads);
#pragma omp parallel num_threads(threads)
    {
        // Should OpenMP grant fewer threads than asked for, one does it all.
        const bool alone = omp_get_num_threads() != threads;
        if (!alone || omp_get_thread_num() == 0) {
            Team team(shared, omp_get_thread_num(), alone ? 1 : threads);
            body(team);
        }
    }
}

}  // namespace everbatch
