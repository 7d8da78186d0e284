// The C interface to sampling: one call for all rows of a step. kernels/cpu/sampling.py mirrors it field by field.
#include "sampling.h"

#include <omp.h>

#include <atomic>

using namespace everbatch::sampling;

namespace {

enum FloatColumn { TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, FLOAT_COLUMNS };
enum IntColumn {
    TOP_K, SEED, COUNTER_BASE, NUM_PROMPT, MODE, MIN_TOKENS, NUM_ENDS, ENDS, NUM_BIAS, BIAS_IDS, BIAS_VALUES, NUM_WORDS,
    WORD_WIDTH, WORDS, WORD_LENGTHS, TOP_LOG_PROBS, NGRAM, INT_COLUMNS
};
enum Mode { GREEDY = 1, FILTERED = 2, PENALTIES = 4, LOG_PROBS = 8 };

constexpr int64_t OUT_OF_MEMORY = -1;

}  // namespace

extern "C" struct everbatch_samples {
    float* logits;  // [num_logits][stride]; changed while a row is processed, then restored
    int64_t num_logits, stride, vocab;
    const double* floats;  // [num_slots][FLOAT_COLUMNS]
    const int64_t* ints;   // [num_slots][INT_COLUMNS]; a column that is named after a list holds its address
    int64_t num_slots;
    const int64_t* token_ids;  // [num_slots][max_seq_len]
    int64_t max_seq_len;
    int64_t count;              // number of samples; the next three arrays have this length
    const int64_t* rows;        // rows of the logits
    const int64_t* slots;
    const int64_t* num_tokens;  // known tokens
    int64_t* chosen;            // [count]
    float* log_probs;           // [count]; written where the slot asks for log-probabilities; may be null if none does
    float* top_log_probs;       // [count][top_width]; the slot's first TOP_LOG_PROBS are written
    int64_t* top_ids;
    int64_t top_width, threads;
};

namespace {

template <class T>
const T* address(int64_t column) {
    return reinterpret_cast<const T*>(column);
}

uint64_t mix64(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

double uniform(uint64_t seed, uint64_t counter) {
    const uint64_t gamma = 0x9E3779B97F4A7C15u;
    const uint64_t word = mix64(mix64(seed + gamma) + (counter + 1) * gamma);
    return (double(word >> 12) + 0.5) * 0x1p-52;
}

// Processes one row after another, and keeps its allocations for the next one.
class RowSampler {
public:
    void run(const everbatch_samples& batch, int64_t i) {
        const int64_t slot = batch.slots[i];
        floats_ = batch.floats + slot * FLOAT_COLUMNS;
        ints_ = batch.ints + slot * INT_COLUMNS;
        logits_ = batch.logits + batch.rows[i] * batch.stride;
        vocab_ = batch.vocab;
        tokens_ = batch.token_ids + slot * batch.max_seq_len;
        known_ = std::min(batch.num_tokens[i], batch.max_seq_len);
        changes_.clear();
        add_sparse();
        if (ints_[MODE] & PENALTIES) penalize();
        const uint64_t counter = uint64_t(ints_[COUNTER_BASE]) + uint64_t(batch.num_tokens[i]);
        const int64_t chosen = choose(counter);
        batch.chosen[i] = chosen;
        for (size_t c = changes_.size(); c-- > 0;) logits_[changes_[c].first] = changes_[c].second;
        if (ints_[MODE] & LOG_PROBS)
            log_probs(chosen, batch.log_probs + i, batch.top_log_probs + i * batch.top_width, batch.top_ids + i * batch.top_width);
    }

private:
    const double* floats_;
    const int64_t *ints_, *tokens_;
    float* logits_;
    int64_t vocab_, known_;
    std::vector<std::pair<int64_t, float>> changes_;  // (token id, logit before); in the order of the changes
    std::vector<float> maxima_;
    std::vector<int32_t> counts_;  // [vocab], zero between rows
    std::vector<int64_t> distinct_;
    std::vector<std::pair<float, int64_t>> best_;
    Weights weights_;

    bool is_token(int64_t id) const { return uint64_t(id) < uint64_t(vocab_); }

    void change(int64_t id, float logit) {
        changes_.push_back({id, logits_[id]});
        logits_[id] = logit;
    }

    // Logit bias, and -infinity for bad words, repeated n-grams and end ids before min_tokens.
    void add_sparse() {
        for (int64_t n = 0; n < ints_[NUM_BIAS]; n++) {
            const int64_t id = address<int64_t>(ints_[BIAS_IDS])[n];
            if (is_token(id)) change(id, logits_[id] + address<float>(ints_[BIAS_VALUES])[n]);
        }
        if (known_ - ints_[NUM_PROMPT] < ints_[MIN_TOKENS])
            for (int64_t n = 0; n < ints_[NUM_ENDS]; n++) forbid(address<int64_t>(ints_[ENDS])[n]);
        const int64_t width = ints_[WORD_WIDTH];
        for (int64_t n = 0; n < ints_[NUM_WORDS]; n++) {
            const int64_t* end = address<int64_t>(ints_[WORDS]) + (n + 1) * width - 1;  // the word's last token
            const int64_t before = address<int64_t>(ints_[WORD_LENGTHS])[n] - 1;
            if (before <= known_ && std::equal(end - before, end, tokens_ + known_ - before)) forbid(*end);
        }
        forbid_repeats();
    }

    // What has followed an earlier occurrence of the newest NGRAM - 1 tokens.
    void forbid_repeats() {
        const int64_t size = ints_[NGRAM];
        if (size <= 0) return;
        for (const int64_t *gram = tokens_, *end = tokens_ + known_; end - gram >= size; gram++)
            if (std::equal(gram, gram + size - 1, end - (size - 1))) forbid(gram[size - 1]);
    }

    void forbid(int64_t id) {
        if (is_token(id)) change(id, -INFINITE);
    }

    void penalize() {
        counts_.resize(size_t(vocab_));
        distinct_.clear();
        distinct_.reserve(size_t(std::min(known_, vocab_)));
        changes_.reserve(changes_.size() + distinct_.capacity());  // from here on nothing throws, so counts_ is always reset to zero
        for (int64_t n = 0; n < known_; n++) {
            const int64_t id = tokens_[n];
            if (!is_token(id)) continue;
            int32_t& count = counts_[size_t(id)];
            if (count == 0) distinct_.push_back(id), count = 1;
            count += n >= ints_[NUM_PROMPT];
        }
        const float repetition = float(floats_[REPETITION]), presence = float(floats_[PRESENCE]);
        const float frequency = float(floats_[FREQUENCY]);
        for (int64_t id : distinct_) {
            const int32_t count = counts_[size_t(id)] - 1;  // in the output
            counts_[size_t(id)] = 0;
            float x = logits_[id];
            x = x > 0.0f ? x / repetition : product(x, repetition);
            if (count > 0) x = x - product(frequency, float(count)) - presence;
            change(id, x);
        }
    }

    int64_t choose(uint64_t counter) {
        const LogitRow row{logits_, vocab_};
        const float greatest = row.maxima(maxima_);
        if (ints_[MODE] & GREEDY) return row.first_of(greatest, maxima_);
        if (!weights_.fill(row, greatest, float(floats_[TEMPERATURE]), maxima_)) return vocab_ - 1;
        const double u = uniform(uint64_t(ints_[SEED]), counter);
        const double total = ints_[MODE] & FILTERED ? filtered_total() : weights_.total;
        const double target = std::min(double(int64_t(u * total)), total - 1.0);
        if (!(ints_[MODE] & FILTERED)) return weights_.at_running_sum(target);
        const Weights::Place place = weights_.find([&](Weights::Prefix p) { return p.mass > target; });
        return weights_.nth_equal(place.weight, int64_t(target - place.above.mass) / int64_t(place.weight));
    }

    // The sum of the weights that top-k, top-p and min-p keep; each keeps a prefix of the falling order.
    double filtered_total() {
        double mass = weights_.total;
        if (ints_[TOP_K] < vocab_) {
            const int64_t k = ints_[TOP_K];
            const Weights::Place place = weights_.find([&](Weights::Prefix p) { return p.count >= k; });
            mass = place.above.mass + double(k - place.above.count) * double(place.weight);
        }
        double total = mass;
        if (floats_[TOP_P] < 1.0) {
            const double limit = floats_[TOP_P] * mass;
            const Weights::Place place = weights_.find([&](Weights::Prefix p) { return p.mass >= limit; });
            const double weight = place.weight;
            double equals = std::floor((limit - place.above.mass) / weight);
            while (place.above.mass + equals * weight < limit) equals++;
            total = std::min(total, place.above.mass + equals * weight);
        }
        if (floats_[MIN_P] > 0.0) {
            const double least = floats_[MIN_P] * double(weights_.heaviest);
            float weight = float(least);
            if (double(weight) < least) weight = std::nextafter(weight, INFINITE);
            if (weight > 1.0f) total = std::min(total, weights_.at_least(weight).mass);
        }
        return std::max(total, double(weights_.heaviest));
    }

    // Natural logarithms of softmax over the row's own logits: the chosen token's, and the greatest ones, equal ones by lower id.
    void log_probs(int64_t chosen, float* own, float* top, int64_t* ids) {
        const LogitRow row{logits_, vocab_};
        const float greatest = row.maxima(maxima_);
        const bool sound = greatest > -INFINITE && greatest < INFINITE;
        const double log_sum = sound ? std::log(exponentials<false>(row, greatest, 1.0f, maxima_, nullptr)) : 0.0;
        const auto value = [&](float x) { return sound && x == x ? float(double(x) - double(greatest) - log_sum) : -INFINITE; };
        *own = value(logits_[chosen]);
        const size_t k = size_t(std::min(ints_[TOP_LOG_PROBS], vocab_));
        if (k == 0) return;
        const auto before = [](std::pair<float, int64_t> a, std::pair<float, int64_t> b) {
            return a.first > b.first || (a.first == b.first && a.second < b.second);
        };
        best_.clear();  // a heap with the worst of the best on top
        for (int64_t b = 0; b < row.blocks(); b++) {
            if (best_.size() == k && !(value(maxima_[size_t(b)]) > best_.front().first)) continue;
            for (int64_t id = b * BLOCK; id < std::min((b + 1) * BLOCK, vocab_); id++) {
                if (best_.size() < k) {
                    best_.push_back({value(logits_[id]), id});
                    if (best_.size() == k) std::make_heap(best_.begin(), best_.end(), before);
                } else if (value(logits_[id]) > best_.front().first) {
                    std::pop_heap(best_.begin(), best_.end(), before);
                    best_.back() = {value(logits_[id]), id};
                    std::push_heap(best_.begin(), best_.end(), before);
                }
            }
        }
        std::sort_heap(best_.begin(), best_.end(), before);
        for (size_t n = 0; n < k; n++) top[n] = best_[n].first, ids[n] = best_[n].second;
    }
};

RowSampler& sampler_of_this_thread() {
    static thread_local RowSampler sampler;
    return sampler;
}

}  // namespace

extern "C" {

// Choose a token for each sample. Returns 0, or OUT_OF_MEMORY, or n > 0 if sample n - 1 names a row or a slot that does not exist,
// or a negative length; nothing has been written then.
int64_t everbatch_sample(const everbatch_samples* batch) {
    const everbatch_samples& b = *batch;
    for (int64_t i = 0; i < b.count; i++)
        if (uint64_t(b.rows[i]) >= uint64_t(b.num_logits) || uint64_t(b.slots[i]) >= uint64_t(b.num_slots) || b.num_tokens[i] < 0)
            return i + 1;
    std::atomic<int64_t> status{0};
    const int threads = int(std::max<int64_t>(1, std::min(b.threads, b.count)));
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < b.count; i++) {
        try {
            sampler_of_this_thread().run(b, i);
        } catch (...) {  // std::bad_alloc: nothing else is thrown
            status = OUT_OF_MEMORY;
        }
    }
    return status;
}

// Computes the weights [vocab] of a row of logits at a temperature, for tests. Returns false if no logit is finite.
int64_t everbatch_sampling_weights(const float* logits, int64_t vocab, float temperature, float* out) {
    const LogitRow row{logits, vocab};
    std::vector<float> maxima;
    Weights weights;
    const float greatest = row.maxima(maxima);
    if (!weights.fill(row, greatest, temperature, maxima)) return 0;
    std::copy(weights.values.begin(), weights.values.begin() + vocab, out);
    return 1;
}

}  // extern "C"
