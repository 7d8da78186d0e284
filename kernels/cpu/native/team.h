// The threads of one parallel region (torch's OpenMP pool), how they share work, and how they wait for each other.
//
// Work: each thread takes the next few items until none is left, so that a thread whose core is taken away for a moment does not
// hold up the others by its whole share. Waiting: spin briefly, then sleep; OpenMP's own barrier spins with the PAUSE
// instruction, which a hypervisor takes for idling (75 us a barrier were seen; there are some 200 of them in a step).
#pragma once
#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
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
    struct Shared {
        explicit Shared(int size) : barrier(size) {}
        Barrier barrier;
        std::atomic<int64_t> next[3] = {};
    };

    Team(Shared& shared, int id, int size) : id(id), size(size), shared_(shared) {}

    const int id, size;

    // f(item) for every item of 0 .. count-1, each on one thread. Returns when all are done.
    template <class F>
    void for_each(int64_t count, int64_t at_once, F f) {
        std::atomic<int64_t>& next = shared_.next[phase_];
        phase_ = (phase_ + 1) % 3;
        shared_.next[phase_].store(0, std::memory_order_relaxed);  // the coming one's: its last users are a barrier behind
        if (size == 1) {
            for (int64_t i = 0; i < count; i++) f(i);
            return;
        }
        for (int64_t i; (i = next.fetch_add(at_once, std::memory_order_relaxed)) < count;)
            for (int64_t j = i, end = std::min(count, i + at_once); j < end; j++) f(j);
        shared_.barrier.wait();
    }

    // f() on one thread. Returns when it is done.
    template <class F>
    void once(F f) {
        if (id == 0) f();
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
