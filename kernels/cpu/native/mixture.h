// A mixture of experts in the place of an MLP: of many MLPs each token takes a few, which its router lists, and all tokens a shared one.
//
// The phases (team.h): rows in the order of their experts | operands | gate and up products of all experts | activation to operand | down products of
// all experts | each token's sum. The panels of all experts are one list of work, so that the threads' shares are even however rows fall on experts.
//
// A row's products do not depend on the rows beside it (linear.h), and a token's results are added in the order of its list, the shared one last: so a
// token's sum does not depend on other tokens.
#pragma once
#include "layer.h"

namespace everbatch {

// How a router's logits become a token's list of experts and their weights (backend/architectures/description.py, Experts).
enum Scores : int32_t { SOFTMAX, SIGMOID };

// Chooses experts for one token. logits [experts] are overwritten by scores.
class Router {
public:
    explicit Router(const everbatch_routing& r) : r_(r) {}

    // Writes `places` experts and their weights, those of the greatest scores first; the lowest index among equals.
    void choose(float* logits, int64_t experts, int64_t places, int64_t* chosen, float* weights) const {
        static thread_local Buffer<float> memory;
        memory.grow(size_t(2 * experts));
        float *scores = logits, *ranked = memory.data();
        if (r_.scores == SOFTMAX)
            softmax(scores, experts);
        else
            for (int64_t e = 0; e < experts; e++) scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
        for (int64_t e = 0; e < experts; e++) ranked[e] = r_.choice_bias ? scores[e] + r_.choice_bias[e] : scores[e];
        if (r_.kept_groups < r_.groups) drop_groups(ranked, experts);
        float sum = 0;
        for (int64_t p = 0; p < places; p++) {
            const int64_t best = std::max_element(ranked, ranked + experts) - ranked;
            chosen[p] = best, weights[p] = scores[best], sum += scores[best];
            ranked[best] = -INFINITY;
        }
        for (int64_t p = 0; p < places; p++) {
            if (r_.is_normalised) weights[p] /= std::max(sum, 1e-20f);
            weights[p] *= r_.scale;
        }
    }

private:
    static void softmax(float* x, int64_t n) {
        const float most = *std::max_element(x, x + n);
        float sum = 0;
        for (int64_t i = 0; i < n; i++) x[i] = std::exp(x[i] - most), sum += x[i];
        for (int64_t i = 0; i < n; i++) x[i] /= sum;
    }

    // Only experts of the best groups stay: a group is as good as its best expert, or as its two best together.
    void drop_groups(float* ranked, int64_t experts) const {
        const int64_t size = experts / r_.groups;
        float* const of_group = ranked + experts;
        for (int64_t g = 0; g < r_.groups; g++) {
            float best = -INFINITY, second = -INFINITY;
            for (int64_t e = g * size; e < (g + 1) * size; e++) {
                if (ranked[e] > best) second = best, best = ranked[e];
                else second = std::max(second, ranked[e]);
            }
            of_group[g] = r_.adds_two_best ? best + second : best;
        }
        for (int64_t dropped = r_.kept_groups; dropped < r_.groups; dropped++) {  // the last among equals goes first
            int64_t least = -1;
            for (int64_t g = 0; g < r_.groups; g++)
                if (!std::isnan(of_group[g]) && (least < 0 || of_group[g] <= of_group[least])) least = g;
            if (least < 0) return;
            of_group[least] = NAN;
            std::fill(ranked + least * size, ranked + (least + 1) * size, -INFINITY);
        }
    }

    const everbatch_routing& r_;
};

template <class T>
class Mixture {
public:
    // counts: this layer's, which a thread that comes late still reads when others are in the next layer.
    Mixture(const everbatch_mixture& m, MixtureMemory& memory, MixtureCounts& counts, std::vector<Buffer<float>>& rows, int threads)
        : m_(m), w_(memory), counts_(counts), rows_(rows), threads_(threads), y_ld_(longest(&everbatch_mlp::gate_up)),
          part_ld_(longest(&everbatch_mlp::down)) {}

    // Floats that each thread's row needs.
    static int64_t widest(const everbatch_mixture& m) {
        const everbatch_mlp& first = m.experts[0];
        const int64_t n = std::max({first.gate_up.depth(), first.down.depth(), first.down.panels() * PANEL});
        return m.shared ? std::max({n, m.shared->gate_up.depth(), m.shared->down.depth()}) : n;
    }

    // put(token, sum [hidden]) gets the sum of the results of each token's experts times their weights. read(token, row) writes a token's input.
    // chosen, weights [tokens][places]: an expert that does not exist counts as none; null: every token has the first one, times 1.
    // shared [tokens], `shared_ld` numbers apart: what the shared one's result is multiplied with; null: 1.
    template <class Read, class Put>
    void run(Team& team, int64_t tokens, const int64_t* chosen, const float* weights, const float* shared, int64_t shared_ld, Read read, Put put) {
        team.for_each(1, [&](int64_t) { order(tokens, chosen); });
        float* row = rows_[size_t(team.id)].data();
        team.for_each(counts_.pairs, [&](int64_t at) {
            const bool is_shared = at >= w_.routed;
            read(is_shared ? at - w_.routed : w_.order[size_t(at)] / m_.places, row);
            is_shared ? w_.shared_input.put(at - w_.routed, row) : w_.input.put(at, row);
        });
        products(team, w_.up, counts_.up_items, [&](const Run& run, int64_t r, int64_t column, const float* sums) {
            memcpy(w_.y.data() + (run.base + r) * y_ld_ + column, sums, PANEL * sizeof(float));
        });
        team.for_each(counts_.stored, [&](int64_t i) {
            const int64_t at = w_.stored[size_t(i)];
            const bool is_shared = at >= w_.routed;
            const int64_t inner = (is_shared ? *m_.shared : m_.experts[0]).down.k;
            const float* y = w_.y.data() + at * y_ld_;
            activate(Activation(m_.activation), y, m_.is_gated ? y + inner : nullptr, inner, row);
            is_shared ? w_.shared_activated.put(at - w_.routed, row) : w_.activated.put(at, row);
        });
        products(team, w_.down, counts_.down_items, [&](const Run& run, int64_t r, int64_t column, const float* sums) {
            memcpy(w_.parts.data() + (run.base + r) * part_ld_ + column, sums, PANEL * sizeof(float));
        });
        team.for_each(tokens, [&](int64_t token) {
            const int64_t n = m_.experts[0].down.n;
            bool is_first = true;
            const auto add = [&](const float* part, float weight) {
                const Vec by = splat(weight);
                for (int64_t i = 0; i < n; i += LANES)  // rows have room up to whole panels
                    store(row + i, is_first ? load<Vec>(part + i) * by : fma(load<Vec>(part + i), by, load<Vec>(row + i)));
                is_first = false;
            };
            for (int64_t pair = token * m_.places; pair < (token + 1) * m_.places; pair++)
                if (const int64_t at = w_.at[size_t(pair)]; at >= 0) add(w_.parts.data() + at * part_ld_, weights ? weights[pair] : 1.0f);
            if (m_.shared) add(w_.parts.data() + (w_.routed + token) * part_ld_, shared ? shared[token * shared_ld] : 1.0f);
            if (is_first) std::fill(row, row + n, 0.0f);
            put(token, row);
        });
    }

private:
    using Run = MixtureMemory::Run;

    int64_t longest(Linear everbatch_mlp::*linear) const {
        const int64_t n = (m_.experts[0].*linear).n;
        return row_length(m_.shared ? std::max(n, (m_.shared->*linear).n) : n);
    }

    // Sorts the pairs of a token and a place of its list by their experts, and lists the products.
    void order(int64_t tokens, const int64_t* chosen) {
        const int64_t all = tokens * m_.places;
        const auto expert_of = [&](int64_t pair) {
            const int64_t expert = chosen ? chosen[pair] : 0;
            return expert >= 0 && expert < m_.num_experts ? expert : -1;  // -1: a place that the router left empty, or another rank's expert
        };
        w_.first.assign(size_t(m_.num_experts + 1), 0);
        w_.at.assign(size_t(all), -1), w_.order.resize(size_t(all));
        for (int64_t pair = 0; pair < all; pair++)
            if (const int64_t e = expert_of(pair); e >= 0) w_.first[size_t(e) + 1]++;
        for (int64_t e = 0; e < m_.num_experts; e++) w_.first[size_t(e) + 1] += w_.first[size_t(e)];
        w_.routed = w_.first[size_t(m_.num_experts)], counts_.pairs = w_.routed + (m_.shared ? tokens : 0);
        w_.up.clear(), w_.down.clear(), w_.stored.clear();
        const everbatch_mlp& first = m_.experts[0];
        w_.input.shape(first.gate_up, w_.routed, sizeof(T)), w_.activated.shape(first.down, w_.routed, sizeof(T));
        for (int64_t e = 0; e < m_.num_experts; e++) {
            const int64_t rows = w_.first[size_t(e) + 1] - w_.first[size_t(e)];
            list(m_.experts[e], w_.input, w_.activated, 0, w_.first[size_t(e)], rows);
        }
        for (int64_t pair = 0; pair < all; pair++)
            if (const int64_t e = expert_of(pair); e >= 0) w_.order[size_t(w_.at[size_t(pair)] = w_.first[size_t(e)]++)] = pair;
        if (m_.shared) {
            w_.shared_input.shape(m_.shared->gate_up, tokens, sizeof(T)), w_.shared_activated.shape(m_.shared->down, tokens, sizeof(T));
            list(*m_.shared, w_.shared_input, w_.shared_activated, w_.routed, 0, tokens);
        }
        w_.y.grow(size_t(counts_.pairs * y_ld_)), w_.parts.grow(size_t(counts_.pairs * part_ld_));
        counts_.up_items = end_of(w_.up), counts_.stored = int64_t(w_.stored.size()), counts_.down_items = end_of(w_.down);
    }

    // Adds the products of an MLP with `rows` rows of its operands, from `first` on. base: the pair of the operands' first row.
    void list(const everbatch_mlp& mlp, const OperandBuffer& input, OperandBuffer& activated, int64_t base, int64_t first, int64_t rows) {
        const bool at_once = m_.is_gated && takes_many_rows(rows, activated);
        for (int64_t done = 0; done < rows; done += MAX_ROWS) {
            const int count = int(std::min<int64_t>(MAX_ROWS, rows - done));
            append(w_.up, {&mlp.gate_up, &input.view(), base, first + done, count, 0, at_once ? &activated : nullptr});
            append(w_.down, {&mlp.down, &activated.view(), base, first + done, count, 0, nullptr});
        }
        for (int64_t row = 0; row < rows && !at_once; row++) w_.stored.push_back(base + first + row);
    }
    void append(std::vector<Run>& runs, Run run) const {
        run.first_item = end_of(runs);
        runs.push_back(run);
    }
    int64_t end_of(const std::vector<Run>& runs) const { return runs.empty() ? 0 : runs.back().first_item + items(runs.back()); }
    int64_t items(const Run& run) const {
        int64_t count = 0;
        with_pass(run, [](auto...) {}, [&](const auto& pass) { count = pass.items(); });
        return count;
    }
    // Calls f(the product of a run), which hands its sums to `put`, or activates them.
    template <class Put, class F>
    void with_pass(const Run& run, Put put, F f) const {
        const Linear& l = *run.linear;
        const int64_t panels = l.panels(), half = panels / 2;
        if (!run.activated) {
            const auto in_order = [](int64_t i) { return i; };
            return f(Pass<T, 1, decltype(in_order), Put>(l, *run.operand, run.row0, run.rows, panels, in_order, put, threads_));
        }
        const auto in_pairs = [half](int64_t i) { return i / 2 + i % 2 * half; };
        const auto activates = [&](int64_t r, int64_t column, float* gate, const float* up) {
            activate(Activation(m_.activation), gate, up, PANEL, gate);
            run.activated->put_panel(r, column, gate);
        };
        f(Pass<T, 2, decltype(in_pairs), decltype(activates)>(l, *run.operand, run.row0, run.rows, panels, in_pairs, activates, threads_));
    }

    // put(run, row of its operand, column, sums) gets the results of all products.
    template <class Put>
    void products(Team& team, const std::vector<Run>& runs, int64_t count, Put put) {
        static thread_local Buffer<float> scratch;
        team.for_each(count, [&](int64_t item) {
            const Run& run = *std::prev(std::upper_bound(runs.begin(), runs.end(), item, [](int64_t i, const Run& r) { return i < r.first_item; }));
            const auto of_run = [&](int64_t r, int64_t column, const float* sums) { put(run, r, column, sums); };
            with_pass(run, of_run, [&](const auto& pass) {
                scratch.grow(pass.scratch_size());
                pass.run(item - run.first_item, scratch.data());
            });
        });
    }

    const everbatch_mixture& m_;
    MixtureMemory& w_;
    MixtureCounts& counts_;
    std::vector<Buffer<float>>& rows_;
    const int threads_;
    const int64_t y_ld_, part_ld_;
};

}  // namespace everbatch
