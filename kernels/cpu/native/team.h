// The threads of one parallel region (torch's OpenMP pool) and how they share work: each takes the next few items until none is left,
// so that a thread whose core is taken away for a moment does not hold up the others by its whole share.
#pragma once
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace everbatch {

class Team {
public:
    using Counters = std::atomic<int64_t>[3];

    Team(Counters& next, int size) : size(size), next_(next) {}

    const int size;

    // f(item) for every item of 0 .. count-1, each on one thread. Returns when all are done.
    template <class F>
    void for_each(int64_t count, int64_t at_once, F f) {
        std::atomic<int64_t>& next = next_[phase_];
        phase_ = (phase_ + 1) % 3;
        next_[phase_].store(0, std::memory_order_relaxed);  // the coming one's: its last users are a barrier behind
        if (size == 1) {
            for (int64_t i = 0; i < count; i++) f(i);
            return;
        }
        for (int64_t i; (i = next.fetch_add(at_once, std::memory_order_relaxed)) < count;)
            for (int64_t j = i, end = std::min(count, i + at_once); j < end; j++) f(j);
#pragma omp barrier
    }

private:
    Counters& next_;
    int phase_ = 0;
};

// body(team) on every one of `threads` threads; each must make the same calls of for_each.
template <class F>
void run_team(int threads, F body) {
    Team::Counters next = {};
#pragma omp parallel num_threads(threads)
    {
        Team team(next, omp_get_num_threads());
        body(team);
    }
}

}  // namespace everbatch
