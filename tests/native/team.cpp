// team THREADS PHASES: threads that are late, that sleep with an item in hand, or that are more than there are cores. Fails unless every
// item is done once, after all items of the phase before.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "team.h"

constexpr int MAX_ITEMS = 40;

int main(int, char** argv) {
    // A thread that does not come holds up nobody; when it comes after all, nothing is left for it.
    everbatch::Team::Shared pair(2);
    int of[2] = {};
    for (int id : {0, 1}) {
        everbatch::Team team(pair, id, 2);
        for (int phase = 0; phase < 100; phase++) team.for_each(3, [&](int64_t) { of[id]++; });
    }
    if (of[0] != 300 || of[1] != 0) return printf("the first did %d items, the late one %d\n", of[0], of[1]), 1;

    const int threads = atoi(argv[1]), phases = atoi(argv[2]);
    std::vector<int> counts(static_cast<size_t>(phases));
    std::mt19937 random(7);
    for (int& count : counts) count = random() % 4 ? int(random() % MAX_ITEMS) : int(random() % 3);  // often fewer than threads
    std::vector<std::vector<int64_t>> done(2, std::vector<int64_t>(MAX_ITEMS, -1));  // the stage in which an item was done last
    std::vector<int64_t> of_thread(static_cast<size_t>(threads));
    std::atomic<int> wrong{0};
    everbatch::Team::Shared shared(threads);
    std::vector<std::thread> all;
    for (int id = 0; id < threads; id++)
        all.emplace_back([&, id] {
            std::mt19937 own(static_cast<unsigned>(id));
            auto sleep_sometimes = [&](unsigned seldom) {
                if (own() % seldom == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
            };
            everbatch::Team team(shared, id, threads);
            int64_t stage = 0, before = 0;  // phases with items so far; items of the last one
            for (const int count : counts) {
                sleep_sometimes(200);
                team.for_each(count, [&](int64_t item) {
                    sleep_sometimes(2000);
                    for (int64_t i = 0; i < before; i++) wrong += done[size_t((stage + 1) % 2)][size_t(i)] != stage - 1;
                    int64_t& mine = done[size_t(stage % 2)][size_t(item)];
                    wrong += mine == stage;
                    mine = stage, of_thread[size_t(id)]++;
                });
                if (count) before = count, stage++;
            }
        });
    for (std::thread& thread : all) thread.join();
    int64_t expected = 0, total = 0;
    for (int count : counts) expected += count;
    for (int64_t count : of_thread) total += count;
    printf("%d wrong, %lld of %lld items\n", wrong.load(), (long long)total, (long long)expected);
    return wrong || total != expected;
}
