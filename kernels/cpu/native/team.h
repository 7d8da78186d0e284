// The threads of one parallel region (torch's OpenMP pool), and how they share its work.
//
// Work comes in phases. In each, a thread has a share of neighbouring items, which it takes one by one, so that weights stream from
// memory; a thread that is done takes items of other shares. A phase is over when its items are done, not when all threads have arrived:
// a thread whose core is taken away, or that has not woken up yet, delays the others only if it holds an item, and skips the phases that
// it missed. (A step has some 200 phases. With barriers, another busy process made steps six times as long.)
//
// Waiting threads spin briefly, then sleep. OpenMP's own barrier spins with the PAUSE instruction, which a hypervisor takes for idling: 75
// us per barrier were measured.
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

class Team {
public:
    // The state that the threads of a team share: the open phase, and how many of its items are taken and done.
    class Shared {
    public:
        explicit Shared(int size) : next_(static_cast<size_t>(size)) {}

        // Take an item of the share of `thread`, which has `count` of them: its number, or -1 when none is left or the phase is over.
        int64_t take(uint32_t phase, int thread, int64_t count) {
            std::atomic<uint64_t>& next = next_[size_t(thread)].value;
            uint64_t at = next.load(std::memory_order_relaxed);
            while (at >> 32 == phase && int64_t(uint32_t(at)) < count)
                if (next.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) return int64_t(uint32_t(at));
            return -1;
        }

        // Count `done` items as done. The thread that completes `count` opens the next phase; the others return once it is open.
        void finish(uint32_t phase, int64_t done, int64_t count) {
            if (done && done_.fetch_add(done, std::memory_order_acq_rel) + done == count) {
                done_.store(0, std::memory_order_relaxed);
                for (Counter& next : next_) next.value.store(uint64_t(phase + 1) << 32, std::memory_order_relaxed);
                phase_.store(phase + 1);
                if (asleep_.load()) syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
                return;
            }
            for (int i = 0; i < SPINS; i++)
                if (is_over(phase)) return;
            asleep_.fetch_add(1);
            while (!is_over(phase)) syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0);
            asleep_.fetch_sub(1);
        }

    private:
        static constexpr int SPINS = 100000;  // some 50 us
        struct alignas(64) Counter {
            std::atomic<uint64_t> value{0};  // upper half: the phase; lower half: items taken
        };

        bool is_over(uint32_t phase) const { return phase_.load() != phase; }  // phases are over in order

        std::vector<Counter> next_;  // one for each thread's share
        alignas(64) std::atomic<int64_t> done_{0};
        alignas(64) std::atomic<uint32_t> phase_{0};
        alignas(64) std::atomic<int> asleep_{0};
    };

    Team(Shared& shared, int id, int size) : id(id), size(size), shared_(shared) {}

    const int id, size;

    // The items of 0 .. count-1 that thread `thread` begins with: [first, second).
    std::pair<int64_t, int64_t> share(int64_t count, int thread) const { return {count * thread / size, count * (thread + 1) / size}; }

    // Calls f(item) once for every item of 0 .. count-1. Each thread takes its own share in order, then items left in other shares.
    // Returns when all items are done, by whichever threads.
    template <class F>
    void for_each(int64_t count, F f) {
        if (count == 0) return;
        int64_t done = 0;
        for (int i = 0; i < size; i++) {
            const int thread = (id + i) % size;
            const auto [first, end] = share(count, thread);
            for (int64_t at; (at = shared_.take(phase_, thread, end - first)) >= 0; done++) f(first + at);
        }
        shared_.finish(phase_++, done, count);
    }

private:
    Shared& shared_;
    uint32_t phase_ = 0;  // the next phase of this thread; others may be ahead
};

// How many threads are worth waking up for so many multiplications: one for what takes it less time than waking others.
inline int32_t threads_for(int64_t multiplications, int32_t threads) { return multiplications < (1 << 17) ? 1 : threads; }

// Runs body(team) on each of `threads` threads. All threads must make the same calls of the team, and write shared memory only inside them.
template <class F>
void run_team(int threads, F body) {
    threads = std::max(1, std::min(threads, omp_get_thread_limit()));
    Team::Shared shared(threads);
#pragma omp parallel num_threads(threads)
    {
        // If OpenMP grants fewer threads than asked for, one thread does all the work.
        const bool alone = omp_get_num_threads() != threads;
        if (!alone || omp_get_thread_num() == 0) {
            Team team(shared, omp_get_thread_num(), alone ? 1 : threads);
            body(team);
        }
    }
}

}  // namespace everbatch
