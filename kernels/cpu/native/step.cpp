// One step of a Llama-shaped decoder over a flat mixed batch: one parallel region, everything inside it.
//
// For each layer (| = all threads wait):
//     norm -> operand | qkv product | rope, write KV | attention | -> operand | out product, added to x | norm -> operand |
//     gate and up product | silu * -> operand | down product, added to x |
// The last layer goes on after its attention only with the tokens whose logits are wanted.
#include "api.h"

using namespace everbatch;

namespace {

struct Piece {  // consecutive tokens of one row
    int32_t row, first, count;  // first: in the flat batch
    int32_t position;           // of the first, in its sequence
};

struct Best {
    float value;
    int64_t id;
};

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Cut each row's tokens into pieces of at most `most` tokens that do not cross a multiple of `border` (0: no borders).
std::vector<Piece> cut(const everbatch_batch& b, int most, int border) {
    std::vector<Piece> pieces;
    int32_t flat = 0;
    for (int64_t r = 0; r < b.num_rows; r++) {
        const everbatch_row& row = b.rows[r];
        for (int done = 0; done < row.num_tokens;) {
            const int at = row.num_computed + done;
            int count = std::min(most, row.num_tokens - done);
            if (border) count = std::min(count, border - at % border);
            pieces.push_back({int32_t(r), flat, count, at});
            flat += count, done += count;
        }
    }
    return pieces;
}

void rotate(const float* x, const float* cos, const float* sin, int64_t half, float* out) {
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - x[i + half] * sin[i];
        out[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
    }
}

void put(float* x, float v) { *x = v; }
void put(bf16* x, float v) { *x = to_bf16(v); }

}  // namespace

struct everbatch_workspace {
    std::vector<float> x, y, attended;
    std::vector<char> queries;
    OperandBuffer operand;
};

namespace {

template <class T>
class Step {
public:
    Step(const everbatch_model& m, const everbatch_batch& b, everbatch_workspace& w)
        : m_(m), b_(b), w_(w), kv_(m.kv), group_(int(m.heads / m.kv.kv_heads)), dim_(m.kv.dim()) {
        for (int64_t r = 0; r < b.num_rows; r++) {
            const everbatch_row& row = b.rows[r];
            for (int t = 0; t < row.num_tokens; t++) all_.push_back(int64_t(all_.size()));
            for (int t = row.num_logits; t > 0; t--) sampled_.push_back(int64_t(all_.size()) - t);
        }
        tokens_ = int64_t(all_.size());
        units_ = cut(b, PANEL, PANEL);
        queries_ = cut(b, std::max(1, 32 / group_), 0);
        x_ld_ = round_up(m.hidden, 64), att_ld_ = round_up(m.heads * m.kv.head_dim, 64);
        y_ld_ = round_up(std::max((m.heads + 2 * m.kv.kv_heads) * m.kv.head_dim, 2 * m.intermediate), 64);
        w.x.resize(size_t(tokens_ * x_ld_)), w.y.resize(size_t(tokens_ * y_ld_)), w.attended.resize(size_t(tokens_ * att_ld_));
        w.queries.resize(size_t(tokens_ * m.heads * dim_) * sizeof(T));
        best_.assign(size_t(b.threads) * sampled_.size(), {-INFINITY, 0});
    }

    void run() {
        run_team(b_.threads, [&](Team& team) {
            begin_thread();
            std::vector<float> row(size_t(std::max({m_.lm_head.depth(), m_.layers[0].out.depth(), m_.layers[0].down.depth()})));
            AttentionScratch<T> scratch;
            embed(team);
            for (int64_t l = 0; l < m_.num_layers; l++) layer(team, l, row, scratch);
            if (!sampled_.empty()) head(team, row);
        });
    }

private:
    // Every thread comes here; the first to arrive shapes the operand, all see it after the barrier that follows.
    void shape(const Linear& l, int64_t rows) {
#pragma omp single
        w_.operand.shape(l, rows, sizeof(T));
    }

    void embed(Team& team) {
        const T* table = static_cast<const T*>(m_.embedding);
        team.for_each(int64_t(units_.size()), 1, [&](int64_t u) {
            const Piece& piece = units_[u];
            const int64_t* ids = b_.token_ids + b_.rows[piece.row].slot * m_.max_seq_len + piece.position;
            for (int t = 0; t < piece.count; t++) {
                const T* from = table + ids[t] * m_.hidden;
                float* x = w_.x.data() + (piece.first + t) * x_ld_;
                for (int64_t i = 0; i < m_.hidden; i++)
                    if constexpr (sizeof(T) == 4)
                        x[i] = from[i];
                    else
                        x[i] = to_float(from[i]);
            }
        });
    }

    // The operand of `l` = the norm of x, for the picked tokens.
    void prepare_normed(Team& team, const Linear& l, const float* weight, const std::vector<int64_t>& picked, std::vector<float>& row) {
        shape(l, int64_t(picked.size()));
        team.for_each(int64_t(picked.size()), 1, [&](int64_t r) {
            rms_norm(w_.x.data() + picked[r] * x_ld_, weight, m_.hidden, m_.eps, row.data());
            w_.operand.put(r, row.data());
        });
    }

    void add_to_x(Team& team, const Linear& l, const std::vector<int64_t>& picked) {
        linear<T>(team, l, w_.operand.view(), int64_t(picked.size()), [&](int64_t r, int64_t column, const float* sums) {
            float* x = w_.x.data() + picked[r] * x_ld_ + column;
            for (int j = 0; j < PANEL; j += LANES) store(x + j, load<Vec>(x + j) + load<Vec>(sums + j));
        });
    }

    void to_y(Team& team, const Linear& l, int64_t rows) {
        linear<T>(team, l, w_.operand.view(), rows, [&](int64_t r, int64_t column, const float* sums) {
            memcpy(w_.y.data() + r * y_ld_ + column, sums, PANEL * sizeof(float));
        });
    }

    void layer(Team& team, int64_t index, std::vector<float>& row, AttentionScratch<T>& scratch) {
        const everbatch_layer& l = m_.layers[index];
        prepare_normed(team, l.qkv, l.input_norm, all_, row);
        to_y(team, l.qkv, tokens_);
        append(team, l, b_.pools[index], row);
        const std::vector<int64_t>& picked = index + 1 < m_.num_layers ? all_ : sampled_;
        if (picked.empty()) return;
        attention(team, l, b_.pools[index], scratch);
        shape(l.out, int64_t(picked.size()));
        team.for_each(int64_t(picked.size()), 1, [&](int64_t r) {
            memcpy(row.data(), w_.attended.data() + picked[r] * att_ld_, size_t(l.out.k) * sizeof(float));
            w_.operand.put(r, row.data());
        });
        add_to_x(team, l.out, picked);
        prepare_normed(team, l.gate_up, l.post_norm, picked, row);
        to_y(team, l.gate_up, int64_t(picked.size()));
        shape(l.down, int64_t(picked.size()));
        team.for_each(int64_t(picked.size()), 1, [&](int64_t r) {
            const float* y = w_.y.data() + r * y_ld_;
            silu_mul(y, y + m_.intermediate, m_.intermediate, row.data());
            w_.operand.put(r, row.data());
        });
        add_to_x(team, l.down, picked);
    }

    // q, k, v of y: norm and rotate; queries to their buffer, keys and values to the pool.
    void append(Team& team, const everbatch_layer& l, char* pool, std::vector<float>& row) {
        const int64_t kv_heads = kv_.kv_heads, d = kv_.head_dim;
        T* queries = reinterpret_cast<T*>(w_.queries.data());
        auto normed_rotated = [&](const float* x, const float* norm, int64_t position, float* out) {
            if (norm) rms_norm(x, norm, d, m_.eps, out), x = out;
            alignas(64) float turned[1024];
            rotate(x, m_.cos + position * (d / 2), m_.sin + position * (d / 2), d / 2, turned);
            memcpy(out, turned, size_t(d) * sizeof(float));
        };
        team.for_each(int64_t(units_.size()) * kv_heads, 1, [&](int64_t item) {
            const Piece& piece = units_[item / kv_heads];
            const int64_t h = item % kv_heads;
            const int32_t* table = b_.block_tables + b_.rows[piece.row].slot * b_.max_blocks;
            const KVHead head{kv_, pool + table[piece.position / kv_.block_size] * kv_.block_bytes() + h * kv_.head_bytes()};
            for (int t = 0; t < piece.count; t++) {
                const int64_t position = piece.position + t, flat = piece.first + t;
                const float* y = w_.y.data() + flat * y_ld_;
                for (int g = 0; g < group_; g++) {
                    normed_rotated(y + (h * group_ + g) * d, l.q_norm, position, row.data());
                    T* q = queries + ((h * tokens_ + flat) * group_ + g) * dim_;
                    for (int64_t i = 0; i < d; i++) put(q + i, row[i]);
                    for (int64_t i = d; i < dim_; i++) put(q + i, 0.0f);
                }
                normed_rotated(y + (m_.heads + h) * d, l.k_norm, position, row.data());
                const float* value = y + (m_.heads + kv_heads + h) * d;
                const int offset = int(position % kv_.block_size);
                if (kv_.is_int8)
                    write_cell<int8_t>(head, offset, row.data(), value);
                else
                    write_cell<T>(head, offset, row.data(), value);
            }
        });
    }

    void attention(Team& team, const everbatch_layer& l, const char* pool, AttentionScratch<T>& scratch) {
        const int64_t kv_heads = kv_.kv_heads, d = kv_.head_dim;
        const float scale = 1.0f / std::sqrt(float(d));
        const T* queries = reinterpret_cast<const T*>(w_.queries.data());
        team.for_each(int64_t(queries_.size()) * kv_heads, 1, [&](int64_t item) {
            const Piece& piece = queries_[item / kv_heads];
            const int64_t h = item % kv_heads;
            const everbatch_row& row = b_.rows[piece.row];
            const Keys keys{b_.block_tables + row.slot * b_.max_blocks, row.num_computed + row.num_tokens, l.window};
            attend<T>(kv_, pool, int(h), keys, piece.position, piece.count, group_, queries + (h * tokens_ + piece.first) * group_ * dim_,
                      scale, scratch, [&](int t, int g, const float* sums, float inverse) {
                          float* out = w_.attended.data() + (piece.first + t) * att_ld_ + (h * group_ + g) * d;
                          for (int64_t i = 0; i < d; i++) out[i] = sums[i] * inverse;
                      });
        });
    }

    void head(Team& team, std::vector<float>& row) {
        const int64_t n = int64_t(sampled_.size());
        prepare_normed(team, m_.lm_head, m_.norm, sampled_, row);
        Best* best = best_.data() + omp_get_thread_num() * n;
        linear<T>(team, m_.lm_head, w_.operand.view(), n, [&](int64_t r, int64_t column, const float* sums) {
            const int count = int(std::min<int64_t>(PANEL, m_.vocab - column));
            if (b_.logits) memcpy(b_.logits + r * m_.vocab + column, sums, size_t(count) * sizeof(float));
            for (int j = 0; j < count; j++)
                if (sums[j] > best[r].value || (sums[j] == best[r].value && column + j < best[r].id)) best[r] = {sums[j], column + j};
        });
        team.for_each(n, 1, [&](int64_t r) {
            Best of_all = best_[r];
            for (int t = 1; t < team.size; t++) {
                const Best& other = best_[t * n + r];
                if (other.value > of_all.value || (other.value == of_all.value && other.id < of_all.id)) of_all = other;
            }
            b_.greedy[r] = of_all.id;
        });
    }

    const everbatch_model& m_;
    const everbatch_batch& b_;
    everbatch_workspace& w_;
    const KVLayout& kv_;
    const int group_, dim_;
    int64_t tokens_, x_ld_, y_ld_, att_ld_;
    std::vector<int64_t> all_, sampled_;
    std::vector<Piece> units_, queries_;
    std::vector<Best> best_;
};

// The first row that names a token or a block that does not exist, or -1.
int64_t first_bad_row(const everbatch_model& m, const everbatch_batch& b) {
    for (int64_t r = 0; r < b.num_rows; r++) {
        const everbatch_row& row = b.rows[r];
        const int64_t end = int64_t(row.num_computed) + row.num_tokens;
        if (row.num_computed < 0 || row.num_tokens < 1 || end > m.max_seq_len) return r;
        if (row.num_logits < 0 || row.num_logits > row.num_tokens) return r;
        const int64_t blocks = (end + m.kv.block_size - 1) / m.kv.block_size;
        if (blocks > b.max_blocks) return r;
        for (int64_t i = 0; i < m.num_layers; i++) {
            const int64_t window = m.layers[i].window;
            const int64_t first = window ? std::max<int64_t>(0, row.num_computed - window + 1) : 0;
            for (int64_t block = first / m.kv.block_size; block < blocks; block++) {
                const int32_t id = b.block_tables[row.slot * b.max_blocks + block];
                if (id < 0 || id >= b.num_blocks) return r;
            }
            if (i + 1 < m.num_layers && m.layers[i + 1].window == window) i = m.num_layers - 2;  // as uniform models are
        }
        for (int64_t t = row.num_computed; t < end; t++) {
            const int64_t id = b.token_ids[row.slot * m.max_seq_len + t];
            if (id < 0 || id >= m.vocab) return r;
        }
    }
    return -1;
}

}  // namespace

extern "C" {

everbatch_workspace* everbatch_new_workspace() { return new everbatch_workspace; }
void everbatch_free_workspace(everbatch_workspace* w) { delete w; }

// Runs a step. Returns -1, or the index of the first row that asks for what does not exist; nothing has been written then.
int64_t everbatch_step(const everbatch_model* m, const everbatch_batch* b, everbatch_workspace* w) {
    const int64_t bad = first_bad_row(*m, *b);
    if (bad >= 0) return bad;
    if (m->kv.element_bytes == 4)
        Step<float>(*m, *b, *w).run();
    else
        Step<bf16>(*m, *b, *w).run();
    return -1;
}

}  // extern "C"
