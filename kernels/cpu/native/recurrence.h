// A recurrent mixer in the place of attention: a short convolution over the tokens' inputs, and heads whose states take one token after the other.
//
// The phases (team.h), behind the products of a layer's inputs and gates: convolution, normalised heads and gates of all tokens | heads' states and
// results, windows. A head's state is cut into columns, which do not depend on each other: an item keeps those of one row in the first-level cache
// while all its tokens run. Each number is computed in one fixed order, token by token, whatever runs beside it and in how many steps it runs.
//
// A state is the window of the convolution [taps - 1][channels], its inputs before the next token, the oldest first; then the heads' states
// [value_heads][key_dim][value_dim]. All is float32. With a token's key k, query q and value v, a head's decay and its strength:
//     S *= decay,  S += k e,  result = S q       e = (v - S k) * strength (DELTA), v * strength (SUM)
#pragma once
#include "layer.h"

namespace everbatch {

enum RecurrenceKind : int32_t { DELTA, SUM, CONVOLUTION };

constexpr int64_t UNIT_CHANNELS = 256;   // of an item of work that has no heads
constexpr int64_t STATE_COLUMNS = 32;    // of a head's state in an item: 128 rows of them are half a first-level cache
constexpr int STATE_VECS = STATE_COLUMNS / LANES;
constexpr int64_t ROWS_AHEAD = 16;       // of a state that are fetched in advance
constexpr int64_t TOKENS_AHEAD = 8;      // whose inputs and results are fetched in advance
constexpr int64_t LINE = 16;             // floats of a cache line

// What a row of the step does with states.
struct StateRow {
    int64_t first, tokens;  // first: index in the flat batch
    int32_t from, to, count;
    const int32_t *saves, *saves_end;  // [row, count, state]
};

inline std::vector<StateRow> state_rows(const everbatch_batch& b) {
    std::vector<StateRow> rows;
    int64_t first = 0;
    const int32_t *save = b.saves, *end = b.saves + 3 * b.num_saves;
    for (int64_t r = 0; r < b.num_rows; r++) {
        const int32_t *of_row = b.state_rows + 3 * r, *saves = save;
        while (save != end && save[0] == r) save += 3;
        rows.push_back({first, b.rows[r].num_tokens, of_row[0], of_row[1], of_row[2], saves, save});
        first += b.rows[r].num_tokens;
    }
    return rows;
}

// The first row that names a state that does not exist, or a number of tokens that it does not have; or -1.
inline int64_t first_bad_state(const everbatch_batch& b) {
    if (!b.states || !b.state_rows) return 0;
    const auto is_state = [&](int32_t state) { return state >= 0 && state < b.num_states; };
    const auto has = [&](int64_t row, int32_t count) { return count >= 1 && count <= b.rows[row].num_tokens; };
    for (int64_t r = 0; r < b.num_rows; r++) {
        const int32_t from = b.state_rows[3 * r], to = b.state_rows[3 * r + 1], count = b.state_rows[3 * r + 2];
        if (from != -1 && !is_state(from)) return r;
        if (to != -1 && !(is_state(to) && has(r, count))) return r;
    }
    for (int64_t i = 0; i < b.num_saves; i++) {
        const int32_t *save = b.saves + 3 * i, row = save[0];
        if (row < 0 || row >= b.num_rows) return 0;
        const bool is_sorted = !i || save[-3] < row || (save[-3] == row && save[-2] <= save[1]);
        if (!is_sorted || !has(row, save[1]) || !is_state(save[2])) return row;
    }
    return -1;
}

// Vectors of n numbers: f(i, access) for each of them, where access.load(p) and access.store(p, v) take as many as there are at i. The
// last ones go through a vector too, so that each number is computed by the same instructions.
struct WholeVec {
    Vec load(const float* p) const { return everbatch::load<Vec>(p); }
    void store(float* p, Vec v) const { everbatch::store(p, v); }
};
struct PartOfVec {
    size_t count;
    Vec load(const float* p) const {
        Vec v{};
        memcpy(&v, p, count * sizeof(float));
        return v;
    }
    void store(float* p, Vec v) const { memcpy(p, &v, count * sizeof(float)); }
};
template <class F>
ALWAYS_INLINE void for_vectors(int64_t n, F f) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) f(i, WholeVec());
    if (i < n) f(i, PartOfVec{size_t(n - i)});
}

// What a pass over some columns of a head's state adds up: the products of the state with a key and a query.
struct StateProducts {
    Vec key[STATE_VECS], query[STATE_VECS];
};

// target = source * decay + k e, for some columns of a head's state [n][STATE_COLUMNS], where IS_CHANGED; else target = source. With that the
// products with a key and a query are added up, in the order of rows, where those are wanted. Distances of rows are `from_ld` and `to_ld`.
template <bool IS_CHANGED, bool HAS_KEY, bool HAS_QUERY, bool TO_MEMORY>
ALWAYS_INLINE void pass_state(const float* source, int64_t from_ld, float* target, int64_t to_ld, int64_t n, float decay, const float* k,
                              const Vec* e, const float* key, const float* query, StateProducts& products) {
    Vec strengths[STATE_VECS] = {}, of_key[STATE_VECS] = {}, of_query[STATE_VECS] = {};
    if (IS_CHANGED)
        for (int j = 0; j < STATE_VECS; j++) strengths[j] = e[j];
    for (int64_t i = 0; i < n; i++, source += from_ld, target += to_ld) {
        if (from_ld != STATE_COLUMNS)
            for (int64_t j = 0; j < STATE_COLUMNS; j += 16) __builtin_prefetch(source + ROWS_AHEAD * from_ld + j);
        const Vec by_k = IS_CHANGED ? splat(k[i]) : Vec{}, by_key = HAS_KEY ? splat(key[i]) : Vec{}, by_query = HAS_QUERY ? splat(query[i]) : Vec{};
#pragma GCC unroll 8
        for (int j = 0; j < STATE_VECS; j++) {
            Vec s = load<Vec>(source + j * LANES);
            if (IS_CHANGED) s = fma(by_k, strengths[j], s * decay);
            if (HAS_KEY) of_key[j] = fma(s, by_key, of_key[j]);
            if (HAS_QUERY) of_query[j] = fma(s, by_query, of_query[j]);
            TO_MEMORY ? store_to_memory(target + j * LANES, s) : store(target + j * LANES, s);
        }
    }
    for (int j = 0; j < STATE_VECS; j++) products.key[j] = of_key[j], products.query[j] = of_query[j];
}

class Recurrence {
public:
    // What the tokens of a step bring and yield: y is the product of their inputs.
    struct Flat {
        const float* y;
        int64_t y_ld;
        float* results;
        int64_t results_ld, tokens;
    };

    // states: the layer's. pieces: the rows' tokens.
    Recurrence(const everbatch_recurrence& r, const std::vector<StateRow>& rows, const std::vector<Piece>& pieces, float* states, const Flat& flat,
               float eps, RecurrenceMemory& memory)
        : r_(r), rows_(rows), pieces_(pieces), states_(states), flat_(flat), eps_(eps), memory_(memory) {}

    static int64_t num_results(const everbatch_recurrence& r) { return r.kind == CONVOLUTION ? r.channels : r.value_heads * r.value_dim; }
    static int64_t gates_ld(const everbatch_recurrence& r) { return row_length(2 * r.value_heads + r.key_heads); }

    static void make_room(const everbatch_recurrence& r, int64_t tokens, RecurrenceMemory& memory) {
        memory.gates.grow(size_t(tokens * gates_ld(r)));
        memory.keys.grow(size_t(r.key_heads * tokens * keys_ld(r))), memory.values.grow(size_t(r.value_heads * tokens * values_ld(r)));
        memory.zeros.grow(size_t(std::max({UNIT_CHANNELS, r.key_dim, r.value_dim})));
    }

    void run(Team& team) const {
        convolve_all(team);
        recur_all(team);
    }

    // out [num_results] = a token's result, normalised and gated.
    void finish(int64_t token, float* out) const {
        const float *result = flat_.results + token * flat_.results_ld, *gate = flat_.y + token * flat_.y_ld + r_.channels;
        const int64_t n = num_results(r_);
        if (r_.kind == CONVOLUTION) return void(memcpy(out, result, size_t(n) * sizeof(float)));
        if (!r_.norm.weight) return activate_with(Silu(), gate, result, n, out);
        if (r_.gates_first) activate_with(Silu(), gate, result, n, out), result = out;
        for (int64_t i = 0; i < n; i += r_.norm_size)
            rms_norm(result + i, r_.norm.weight + (r_.kind == SUM ? i : 0), r_.norm_size, eps_, out + i);
        if (!r_.gates_first) activate_with(Silu(), gate, out, n, out);
    }

private:
    static int64_t padded(int64_t n) { return (n + STATE_COLUMNS - 1) / STATE_COLUMNS * STATE_COLUMNS; }
    static int64_t keys_ld(const everbatch_recurrence& r) { return 2 * padded(r.key_dim); }
    static int64_t values_ld(const everbatch_recurrence& r) { return padded(r.value_dim); }

    float* gates_of(int64_t token) const { return memory_.gates.data() + token * gates_ld(r_); }
    // A token's query; its key follows.
    float* query_of(int64_t head, int64_t token) const { return memory_.keys.data() + (head * flat_.tokens + token) * keys_ld(r_); }
    float* value_of(int64_t head, int64_t token) const { return memory_.values.data() + (head * flat_.tokens + token) * values_ld(r_); }
    float* window_of(int32_t state) const { return states_ + state * (window_floats() + r_.value_heads * r_.key_dim * r_.value_dim); }
    float* head_of(int32_t state, int64_t head) const { return window_of(state) + window_floats() + head * r_.key_dim * r_.value_dim; }
    int64_t window_floats() const { return (r_.taps - 1) * r_.channels; }

    // ------------------------------------------------------------------------------------------------- convolution, heads and gates

    void convolve_all(Team& team) const {
        const int64_t units = r_.kind == CONVOLUTION ? (r_.channels + UNIT_CHANNELS - 1) / UNIT_CHANNELS : r_.key_heads + r_.value_heads + 1;
        team.for_each(int64_t(pieces_.size()) * units, [&](int64_t item) {
            const Piece& piece = pieces_[size_t(item / units)];
            const int64_t unit = item % units;
            if (r_.kind == CONVOLUTION)
                gate_convolution(piece, unit * UNIT_CHANNELS);
            else if (unit < r_.key_heads)
                make_keys(piece, unit);
            else if (unit < r_.key_heads + r_.value_heads)
                make_values(piece, unit - r_.key_heads);
            else
                make_gates(piece);
        });
    }

    // Where the convolution reads a token's channels. A layer of the kind CONVOLUTION convolves x * factor; its window holds these products,
    // so that `factor` is null there, as it is for the other kinds.
    struct Input {
        const float *x, *factor;
    };
    // token: of the row; before 0 are those of its window.
    Input input(const StateRow& row, int64_t token, int64_t channel) const {
        if (token >= 0) {
            const float* y = flat_.y + (row.first + token) * flat_.y_ld + channel;
            return {y, r_.kind == CONVOLUTION ? y + 2 * r_.channels : nullptr};
        }
        if (row.from < 0) return {memory_.zeros.data(), nullptr};
        return {window_of(row.from) + (r_.taps - 1 + token) * r_.channels + channel, nullptr};
    }
    template <class Access>
    static Vec read(const Input& input, int64_t i, Access access) {
        const Vec x = access.load(input.x + i);
        return input.factor ? x * access.load(input.factor + i) : x;
    }

    // put(token of the piece, i, access, sums) gets the convolution's channels channel + i.
    template <class Put>
    void convolve(const Piece& piece, int64_t channel, int64_t n, Put put) const {
        switch (r_.taps) {
            case 1: return convolve_with<1>(piece, channel, n, put);
            case 2: return convolve_with<2>(piece, channel, n, put);
            case 3: return convolve_with<3>(piece, channel, n, put);
            case 4: return convolve_with<4>(piece, channel, n, put);
        }
    }

    template <int TAPS, class Put>
    void convolve_with(const Piece& piece, int64_t channel, int64_t n, Put put) const {
        const StateRow& row = rows_[size_t(piece.row)];
        const int64_t at = piece.first - row.first, count = piece.count, next = flat_.y_ld;
        Input before[TAPS];
        for (int j = 0; j < TAPS - 1; j++) before[j] = input(row, at - (TAPS - 1) + j, channel);
        const Input first = input(row, at, channel);
        for_vectors(n, [&](int64_t i, auto access) {
            const Vec bias = r_.bias ? access.load(r_.bias + channel + i) : Vec{};
            Vec weights[TAPS], x[TAPS];
            for (int j = 0; j < TAPS; j++) weights[j] = access.load(r_.weights + j * r_.channels + channel + i);
            for (int j = 0; j < TAPS - 1; j++) x[j] = read(before[j], i, access);
            for (int64_t t = 0; t < count; t++) {
                const Input own{first.x + t * next, first.factor ? first.factor + t * next : nullptr};
                __builtin_prefetch(own.x + i + LINE), __builtin_prefetch(own.x + TOKENS_AHEAD * next + i);
                x[TAPS - 1] = read(own, i, access);
                Vec sum = bias;
                for (int j = 0; j < TAPS; j++) sum = fma(weights[j], x[j], sum);
                put(t, i, access, sum);
                for (int j = 0; j < TAPS - 1; j++) x[j] = x[j + 1];
            }
        });
    }

    // Of heads, with zeros behind their dimensions: out [tokens of the piece][n], `ld` apart.
    void convolve_head(const Piece& piece, int64_t channel, int64_t n, float* out, int64_t ld) const {
        convolve(piece, channel, n, [&](int64_t t, int64_t i, auto access, Vec sum) {
            __builtin_prefetch(out + t * ld + i + LINE, 1), __builtin_prefetch(out + (t + TOKENS_AHEAD) * ld + i, 1);
            access.store(out + t * ld + i, silu(sum));
        });
        for (int64_t t = 0; t < piece.count; t++) std::fill(out + t * ld + n, out + t * ld + padded(n), 0.0f);
    }

    void make_keys(const Piece& piece, int64_t head) const {
        const int64_t n = r_.key_dim, ld = keys_ld(r_);
        float *queries = query_of(head, piece.first), *keys = queries + ld / 2;
        convolve_head(piece, r_.query_at + head * n, n, queries, ld), convolve_head(piece, r_.key_at + head * n, n, keys, ld);
        if (r_.kind != DELTA) return;
        for (int64_t t = 0; t < piece.count; t++) {
            float *query = queries + t * ld, *key = keys + t * ld;
            scale_to_one(query, n, r_.query_scale), scale_to_one(key, n, 1.0f);
            Vec sum{};
            for (int64_t i = 0; i < ld / 2; i += LANES) sum = fma(load<Vec>(query + i), load<Vec>(key + i), sum);
            gates_of(piece.first + t)[2 * r_.value_heads + head] = reduce_add(sum);
        }
    }

    // x *= scale / |x|. There is room up to the next vector, of zeros.
    static void scale_to_one(float* x, int64_t n, float scale) {
        Vec squares{};
        for (int64_t i = 0; i < n; i += LANES) squares = add_square(squares, load<Vec>(x + i));
        const Vec factor = splat(scale / std::sqrt(reduce_add(squares) + 1e-6f));
        for (int64_t i = 0; i < n; i += LANES) store(x + i, load<Vec>(x + i) * factor);
    }

    void make_values(const Piece& piece, int64_t head) const {
        convolve_head(piece, r_.value_at + head * r_.value_dim, r_.value_dim, value_of(head, piece.first), values_ld(r_));
    }

    // Decays and strengths, in the place of what they are made from.
    void make_gates(const Piece& piece) const {
        for (int64_t t = 0; t < piece.count; t++) {
            float *decay = gates_of(piece.first + t), *strength = decay + r_.value_heads;
            for (int64_t h = 0; h < r_.value_heads; h++) {
                const float x = decay[h] + r_.dt_bias[h];
                float dt = x > 20.0f ? x : std::log1p(std::exp(x));
                if (r_.kind == SUM) dt = std::min(std::max(dt, r_.dt_min), r_.dt_max);
                decay[h] = std::exp(-r_.rate[h] * dt);
                strength[h] = r_.kind == SUM ? dt : 1.0f / (1.0f + std::exp(-strength[h]));
            }
        }
    }

    void gate_convolution(const Piece& piece, int64_t channel) const {
        convolve(piece, channel, std::min(UNIT_CHANNELS, r_.channels - channel), [&](int64_t t, int64_t i, auto access, Vec sum) {
            const float* y = flat_.y + (piece.first + t) * flat_.y_ld + r_.channels + channel;
            access.store(flat_.results + (piece.first + t) * flat_.results_ld + channel + i, access.load(y + i) * sum);
        });
    }

    // ----------------------------------------------------------------------------------------------------------------------- states

    void recur_all(Team& team) const {
        const int64_t slices = values_ld(r_) / STATE_COLUMNS, of_row = r_.value_heads * slices, of_heads = int64_t(rows_.size()) * of_row;
        const int64_t units = (r_.channels + UNIT_CHANNELS - 1) / UNIT_CHANNELS;
        team.for_each(of_heads + int64_t(rows_.size()) * units, [&](int64_t item) {
            if (item >= of_heads) return keep_windows(rows_[size_t((item - of_heads) / units)], (item - of_heads) % units * UNIT_CHANNELS);
            const StateRow& row = rows_[size_t(item / of_row)];
            const int64_t head = item % of_row / slices, column = item % slices * STATE_COLUMNS;
            r_.kind == DELTA ? recur<true>(row, head, column) : recur<false>(row, head, column);
        });
    }

    // The inputs of the convolution of some channels before the token `count`, for all states that are kept.
    void keep_windows(const StateRow& row, int64_t channel) const {
        const int64_t n = std::min(UNIT_CHANNELS, r_.channels - channel);
        const auto keep = [&](int64_t count, int32_t state) {
            for (int64_t j = 0; j < r_.taps - 1; j++) {  // where this is the window that is read, later inputs are still there
                const Input from = input(row, count - (r_.taps - 1) + j, channel);
                float* to = window_of(state) + j * r_.channels + channel;
                for_vectors(n, [&](int64_t i, auto access) { access.store(to + i, read(from, i, access)); });
            }
        };
        for (const int32_t* save = row.saves; save != row.saves_end; save += 3) keep(save[1], save[2]);
        if (row.to >= 0) keep(row.count, row.to);
    }

    // Some columns of a head's state, which all tokens of a row change.
    template <bool IS_DELTA>
    void recur(const StateRow& row, int64_t head, int64_t column) const {
        static thread_local Buffer<float> memory;
        memory.grow(size_t(r_.key_dim * STATE_COLUMNS));
        const int64_t n = r_.key_dim, ld = r_.value_dim, width = std::min(STATE_COLUMNS, ld - column);
        const int64_t key_head = head / (r_.value_heads / r_.key_heads);
        const bool is_whole = width == STATE_COLUMNS;
        float* const own = memory.data();  // [key_dim][STATE_COLUMNS]
        const float* source = own;         // where the state lies
        int64_t source_ld = STATE_COLUMNS;
        if (row.from < 0 || !is_whole) memset(own, 0, size_t(n * STATE_COLUMNS) * sizeof(float));
        if (row.from >= 0 && is_whole)
            source = head_of(row.from, head) + column, source_ld = ld;
        else if (row.from >= 0)
            copy_columns(head_of(row.from, head) + column, ld, width, own, STATE_COLUMNS);
        StateProducts products;
        const float* query = query_of(key_head, row.first);
        if (IS_DELTA) {
            pass_state<false, true, true, false>(source, source_ld, own, STATE_COLUMNS, n, 1, nullptr, nullptr, query + padded(n), query, products);
            source = own, source_ld = STATE_COLUMNS;
        }
        const int32_t* save = row.saves;
        for (int64_t t = 0; t < row.tokens; t++, query += keys_ld(r_)) {
            const int64_t token = row.first + t;
            const float *gates = gates_of(token), *value = value_of(head, token) + column, *key = query + padded(n), *next = query + keys_ld(r_);
            const float decay = gates[head], strength = gates[r_.value_heads + head], dot = gates[2 * r_.value_heads + key_head];
            const bool is_last = t + 1 == row.tokens, is_to = row.to >= 0 && row.count == t + 1;
            Vec e[STATE_VECS], result[STATE_VECS];
            for (int j = 0; j < STATE_VECS; j++) {
                const Vec v = load<Vec>(value + j * LANES);
                e[j] = (IS_DELTA ? fma(splat(-decay), products.key[j], v) : v) * strength;
                if (IS_DELTA) result[j] = fma(splat(dot), e[j], products.query[j] * decay);  // as the changed state has it
            }
            const bool is_saved = save != row.saves_end && save[1] == t + 1;
            // The last pass over a state that is kept in one place writes it there.
            float* const target = is_last && is_to && is_whole && !is_saved ? head_of(row.to, head) + column : own;
            const int64_t target_ld = target == own ? STATE_COLUMNS : ld;
            const auto pass = [&](auto has_key, auto has_query, auto to_memory, const float* with) {
                pass_state<true, has_key(), has_query(), to_memory()>(source, source_ld, target, target_ld, n, decay, key, e, with + padded(n), with,
                                                                      products);
            };
            using Yes = std::true_type;
            using No = std::false_type;
            const bool to_memory = target != own && row.to != row.from && ld % 16 == 0 && reinterpret_cast<uintptr_t>(target) % 64 == 0;
            if (!IS_DELTA)
                to_memory ? pass(No(), Yes(), Yes(), query) : pass(No(), Yes(), No(), query);
            else if (!is_last)
                pass(Yes(), Yes(), No(), next);
            else if (is_to || is_saved)
                to_memory ? pass(No(), No(), Yes(), query) : pass(No(), No(), No(), query);
            if (to_memory) fence();
            source = own, source_ld = STATE_COLUMNS;
            if (!IS_DELTA)
                for (int j = 0; j < STATE_VECS; j++)
                    result[j] = r_.skip ? fma(splat(r_.skip[head]), load<Vec>(value + j * LANES), products.query[j]) : products.query[j];
            float* const to = flat_.results + token * flat_.results_ld + head * ld + column;
            memcpy(to, result, size_t(width) * sizeof(float));
            for (; save != row.saves_end && save[1] == t + 1; save += 3)
                copy_columns(own, STATE_COLUMNS, width, head_of(save[2], head) + column, ld);
            if (is_to && target == own) copy_columns(own, STATE_COLUMNS, width, head_of(row.to, head) + column, ld);
        }
    }

    void copy_columns(const float* from, int64_t from_ld, int64_t width, float* to, int64_t to_ld) const {
        for (int64_t i = 0; i < r_.key_dim; i++, from += from_ld, to += to_ld) memcpy(to, from, size_t(width) * sizeof(float));
    }

    const everbatch_recurrence& r_;
    const std::vector<StateRow>& rows_;
    const std::vector<Piece>& pieces_;
    float* const states_;
    const Flat flat_;
    const float eps_;
    RecurrenceMemory& memory_;
};

}  // namespace everbatch
