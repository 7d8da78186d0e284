// One step of a Llama-shaped decoder over a flat mixed batch, in one parallel region.
//
// The phases of each layer (| = the next phase begins when all items of this one are done, whichever threads did them: team.h):
//     norm to operand | qkv product | rope, write KV | attention | to operand | out product, added to x | norm to operand |
//     gate and up product | silu(gate) * up to operand | down product, added to x |
// A product of rows that have adapters is preceded by a phase of its own, and adds their part to its sums (lora.h).
// An operand is the form in which a linear layer reads its input. After the attention of the last layer, only tokens whose logits
// are wanted go on.
#include "spans.h"

using namespace everbatch;

namespace {

struct Best {
    float value;
    int64_t id;
};

// Distance of rows of n float32: n rounded up to 64, and one cache line more, so that rows do not all map to the same cache sets.
int64_t row_length(int64_t n) { return (n + 63) / 64 * 64 + 16; }

void rotate(const float* x, const float* cos, const float* sin, int64_t half, float* __restrict out) {
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - x[i + half] * sin[i];
        out[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
    }
}

void convert(const float* x, int64_t n, float* out) { memcpy(out, x, size_t(n) * sizeof(float)); }
void convert(const float* x, int64_t n, bf16* out) {
    for (int64_t i = 0; i < n; i += LANES) store_bf16(out + i, load<Vec>(x + i));
}

}  // namespace

// Memory of a step, kept for the next one. Its buffers only grow.
struct everbatch_workspace {
    struct Thread {
        Buffer<float> row;
        AttentionScratch<float> of_floats;
        AttentionScratch<bf16> of_halves;

        AttentionScratch<float>& attention(float) { return of_floats; }
        AttentionScratch<bf16>& attention(bf16) { return of_halves; }
    };
    Buffer<float> x, y, attended, partials;
    Buffer<char> queries;
    OperandBuffer normed[NUM_FORMATS], attention[NUM_FORMATS], activated[NUM_FORMATS];  // operands of (qkv and gate_up), of out, of down
    OperandBuffer last, screened;  // operands of lm_head and of its screen
    std::vector<Thread> threads;
    Lora<float> lora_of_floats;
    Lora<bf16> lora_of_halves;

    Lora<float>& lora(float) { return lora_of_floats; }
    Lora<bf16>& lora(bf16) { return lora_of_halves; }
};

namespace {

constexpr int64_t MANY_ROWS = 64;  // from here on arithmetic, not reading weights, limits a product

template <class T>
class Step {
public:
    Step(const everbatch_model& m, const everbatch_batch& b, everbatch_workspace& w)
        : m_(m), b_(b), w_(w), lora_(w.lora(T())), kv_(m.kv), group_(int(m.heads / m.kv.kv_heads)), dim_(m.kv.dim()) {
        for (int64_t r = 0; r < b.num_rows; r++) {
            const everbatch_row& row = b.rows[r];
            for (int t = 0; t < row.num_tokens; t++) all_.push_back(int64_t(all_.size()));
            for (int t = row.num_logits; t > 0; t--) sampled_.push_back(int64_t(all_.size()) - t);
        }
        tokens_ = int64_t(all_.size());
        units_ = cut(b, PANEL, PANEL);
        queries_ = cut(b, std::max(1, ROWS_TOGETHER / group_), 0);
        spans_.share(queries_, kv_.kv_heads, group_, dim_);
        w.partials.grow(spans_.partials());
        x_ld_ = row_length(m.hidden), att_ld_ = row_length(m.heads * m.kv.head_dim);
        y_ld_ = row_length(std::max((m.heads + 2 * m.kv.kv_heads) * m.kv.head_dim, 2 * m.intermediate));
        int64_t widest = std::max<int64_t>(m.lm_head.depth(), 2 * dim_);
        w.x.grow(tokens_ * x_ld_), w.y.grow(tokens_ * y_ld_), w.attended.grow(tokens_ * att_ld_);
        w.queries.grow(tokens_ * m.heads * dim_ * sizeof(T));
        for (int64_t i = 0; i < m.num_layers; i++) {  // a checkpoint may have left some layers unquantised
            const everbatch_layer& l = m.layers[i];
            for (const Linear* of_norm : {&l.qkv, &l.gate_up}) w.normed[of_norm->format].shape(*of_norm, tokens_, sizeof(T));
            w.attention[l.out.format].shape(l.out, tokens_, sizeof(T));
            w.activated[l.down.format].shape(l.down, tokens_, sizeof(T));
            widest = std::max({widest, l.qkv.depth(), l.gate_up.depth(), l.out.depth(), l.down.depth()});
        }
        w.last.shape(m.lm_head, int64_t(sampled_.size()), sizeof(T));
        if (w.threads.size() < size_t(b.threads)) w.threads = std::vector<everbatch_workspace::Thread>(b.threads);
        for (auto& thread : w.threads) thread.row.grow(widest);
        if (has_lora_) {
            std::vector<int32_t> adapters, of_sampled;
            for (int64_t r = 0; r < b.num_rows; r++) adapters.insert(adapters.end(), size_t(b.rows[r].num_tokens), b.adapter_of[r]);
            for (int64_t token : sampled_) of_sampled.push_back(adapters[size_t(token)]);
            lora_rows_ = LoraRows(adapters), lora_sampled_ = LoraRows(of_sampled);
            lora_.begin(b.adapters, widest, b.max_rank, tokens_);
        }
        best_.assign(size_t(b.threads) * sampled_.size(), {-INFINITY, 0});
        is_screened_ = m.screen.linear.data && !b.logits && int64_t(sampled_.size()) <= SCREENED_ROWS;
        if (is_screened_) {
            w.screened.shape(m.screen.linear, int64_t(sampled_.size()), sizeof(T));
            reaches_.resize(sampled_.size()), upper_bounds_.resize(sampled_.size() * size_t(m.lm_head.panels()));
            lower_bounds_.assign(size_t(b.threads) * sampled_.size(), -INFINITY);
        }
    }

    void run() {
        run_team(b_.threads, [&](Team& team) {
            const TilesOfThread tiles;
            embed(team);
            for (int64_t l = 0; l < m_.num_layers; l++) layer(team, l);
            if (!sampled_.empty()) head(team);
        });
    }

private:
    struct Adapted {  // the adapters' part of a product; `rows` is null where no row has one
        const LoraRows* rows;
        int64_t layer;
        LoraLinear LoraLayer::*linear;
    };

    void embed(Team& team) {
        const T* table = static_cast<const T*>(m_.embedding);
        team.for_each(int64_t(units_.size()), [&](int64_t u) {
            const Piece& piece = units_[u];
            const int64_t* ids = b_.token_ids + b_.rows[piece.row].slot * m_.max_seq_len + piece.position;
            for (int t = 0; t < piece.count; t++) {
                float* x = w_.x.data() + (piece.first + t) * x_ld_;
                if (const float* given = b_.embedded ? b_.embedded[piece.first + t] : nullptr) {
                    memcpy(x, given, size_t(m_.hidden) * sizeof(float));
                    continue;
                }
                const T* from = table + ids[t] * m_.hidden;
                for (int64_t i = 0; i < m_.hidden; i++) x[i] = to_float(from[i]);
            }
        });
    }

    float* scratch(Team& team) { return w_.threads[team.id].row.data(); }

    // operand = norm(x), for the picked tokens. told: where these rows are wanted as floats as well, or null.
    void prepare_normed(Team& team, OperandBuffer& operand, const float* weight, const std::vector<int64_t>& picked, const LoraRows* adapted,
                        float* told = nullptr) {
        team.for_each(int64_t(picked.size()), [&](int64_t r) {
            rms_norm(w_.x.data() + picked[r] * x_ld_, weight, m_.hidden, m_.eps, scratch(team));
            if (adapted) lora_.put(*adapted, r, scratch(team), m_.hidden);
            if (told) memcpy(told + r * m_.hidden, scratch(team), size_t(m_.hidden) * sizeof(float));
            operand.put(r, scratch(team));
        });
    }

    void add_to_x(Team& team, const Linear& l, const OperandBuffer& operand, const std::vector<int64_t>& picked, Adapted adapted) {
        shrink(team, l, adapted);
        linear<T>(team, l, operand.view(), int64_t(picked.size()), [&](int64_t r, int64_t column, const float* given) {
            alignas(64) float own[PANEL];
            const float* sums = with_lora(adapted, r, column, given, own);
            float* x = w_.x.data() + picked[r] * x_ld_ + column;
            for (int j = 0; j < PANEL; j += LANES) store(x + j, load<Vec>(x + j) + load<Vec>(sums + j));
        });
    }

    void to_y(Team& team, const Linear& l, int64_t rows, Adapted adapted) {
        shrink(team, l, adapted);
        linear<T>(team, l, w_.normed[l.format].view(), rows, [&](int64_t r, int64_t column, const float* sums) {
            float* y = w_.y.data() + r * y_ld_ + column;
            memcpy(y, sums, PANEL * sizeof(float));
            if (adapted.rows) lora_.expand(*adapted.rows, adapted.layer, adapted.linear, r, column, y);
        });
    }

    void shrink(Team& team, const Linear& l, Adapted adapted) {
        if (adapted.rows) lora_.shrink(team, *adapted.rows, adapted.layer, adapted.linear, l.k);
    }

    // The sums of a panel with the part of the row's adapter, which is added to a copy in `own`.
    const float* with_lora(Adapted adapted, int64_t r, int64_t column, const float* sums, float* own) {
        if (!adapted.rows || adapted.rows->adapter_of(r) < 0) return sums;
        memcpy(own, sums, PANEL * sizeof(float));
        lora_.expand(*adapted.rows, adapted.layer, adapted.linear, r, column, own);
        return own;
    }

    void layer(Team& team, int64_t index) {
        const everbatch_layer& l = m_.layers[index];
        const LoraRows* adapted = has_lora_ ? &lora_rows_ : nullptr;
        prepare_normed(team, w_.normed[l.qkv.format], l.input_norm, all_, adapted);
        to_y(team, l.qkv, tokens_, {adapted, index, &LoraLayer::qkv});
        const bool is_last = index + 1 == m_.num_layers;
        const std::vector<int64_t>& picked = is_last ? sampled_ : all_;
        if (kv_.kv_bits == 8)
            attention<int8_t>(team, l, b_.pools[index], !picked.empty());
        else if (kv_.kv_bits == 4)
            attention<Int4>(team, l, b_.pools[index], !picked.empty());
        else
            attention<T>(team, l, b_.pools[index], !picked.empty());
        if (picked.empty()) return;
        if (has_lora_ && is_last) adapted = &lora_sampled_;
        team.for_each(int64_t(picked.size()), [&](int64_t r) {
            memcpy(scratch(team), w_.attended.data() + picked[r] * att_ld_, size_t(l.out.k) * sizeof(float));
            if (adapted) lora_.put(*adapted, r, scratch(team), l.out.k);
            w_.attention[l.out.format].put(r, scratch(team));
        });
        add_to_x(team, l.out, w_.attention[l.out.format], picked, {adapted, index, &LoraLayer::out});
        prepare_normed(team, w_.normed[l.gate_up.format], l.post_norm, picked, adapted);
        activate(team, l, int64_t(picked.size()), {adapted, index, &LoraLayer::gate_up});
        add_to_x(team, l.down, w_.activated[l.down.format], picked, {adapted, index, &LoraLayer::down});
    }

    // activated = silu(gate) * up. With many rows, gate and up are not stored in between.
    void activate(Team& team, const everbatch_layer& l, int64_t rows, Adapted adapted) {
        OperandBuffer& activated = w_.activated[l.down.format];
        if (rows >= MANY_ROWS && activated.takes_panels() && !adapted.rows) {
            linear_of_halves<T>(team, l.gate_up, w_.normed[l.gate_up.format].view(), rows,
                                [&](int64_t r, int64_t column, float* gate, const float* up) {
                                    silu_mul(gate, up, PANEL, gate);
                                    activated.put_panel(r, column, gate);
                                });
            return;
        }
        to_y(team, l.gate_up, rows, adapted);
        team.for_each(rows, [&](int64_t r) {
            const float* y = w_.y.data() + r * y_ld_;
            silu_mul(y, y + m_.intermediate, m_.intermediate, scratch(team));
            if (adapted.rows) lora_.put(*adapted.rows, r, scratch(team), m_.intermediate);
            activated.put(r, scratch(team));
        });
    }

    // E: the type of the pool's cells.
    template <class E>
    void attention(Team& team, const everbatch_layer& l, char* pool, bool is_wanted) {
        append<E>(team, l, pool);
        if (is_wanted) attend_all<E>(team, l, pool);
    }

    // Normalises and rotates q and k of y. Queries go to their buffer, keys and values to the pool.
    template <class E>
    void append(Team& team, const everbatch_layer& l, char* pool) {
        const int64_t kv_heads = kv_.kv_heads, d = kv_.head_dim, items = int64_t(units_.size()) * kv_heads;
        float *turned = scratch(team), *value = turned + dim_;
        std::fill(turned + d, turned + dim_, 0.0f), std::fill(value + d, value + dim_, 0.0f);
        T* queries = reinterpret_cast<T*>(w_.queries.data());
        auto normed_rotated = [&](const float* x, const float* norm, int64_t position) {
            alignas(64) float normed[MAX_HEAD_DIM];
            if (norm) rms_norm(x, norm, d, m_.eps, normed), x = normed;
            rotate(x, m_.cos + position * (d / 2), m_.sin + position * (d / 2), d / 2, turned);
        };
        auto head_of = [&](int64_t item) {
            const Piece& piece = units_[item / kv_heads];
            const int32_t* table = b_.block_tables + b_.rows[piece.row].slot * b_.max_blocks;
            return KVHead{kv_, pool + table[piece.position / kv_.block_size] * kv_.block_bytes() + item % kv_heads * kv_.head_bytes()};
        };
        team.for_each(items, [&](int64_t item) {
            const Piece& piece = units_[item / kv_heads];
            const int64_t h = item % kv_heads, next = std::min(item + 1, items - 1);
            const KVHead head = head_of(item);
            prefetch_cell<E>(head_of(next), int(units_[next / kv_heads].position % kv_.block_size));
            for (int t = 0; t < piece.count; t++) {
                const int64_t position = piece.position + t, flat = piece.first + t;
                const int64_t angle = b_.positions ? b_.positions[flat] : position;
                const float* y = w_.y.data() + flat * y_ld_;
                for (int g = 0; g < group_; g++) {
                    normed_rotated(y + (h * group_ + g) * d, l.q_norm, angle);
                    convert(turned, dim_, queries + ((h * tokens_ + flat) * group_ + g) * dim_);
                }
                normed_rotated(y + (m_.heads + h) * d, l.k_norm, angle);
                memcpy(value, y + (m_.heads + kv_heads + h) * d, size_t(d) * sizeof(float));
                write_cell<E>(head, int(position % kv_.block_size), turned, value);
            }
        });
    }

    template <class E>
    void attend_all(Team& team, const everbatch_layer& l, const char* pool) {
        const int64_t kv_heads = kv_.kv_heads, d = kv_.head_dim, items = int64_t(spans_.all.size()) * kv_heads;
        const float scale = 1.0f / std::sqrt(float(d));
        const T* queries = reinterpret_cast<const T*>(w_.queries.data());
        auto walk_of = [&](int64_t item) {
            const Piece& piece = queries_[spans_.all[item / kv_heads].piece];
            const int32_t* table = b_.block_tables + b_.rows[piece.row].slot * b_.max_blocks;
            return Walk(kv_, pool, int(item % kv_heads), table, piece.position, piece.count, l.window, m_.sink_tokens);
        };
        team.for_each(items, [&](int64_t item) {
            const int64_t following = std::min(item + 1, items - 1), h = item % kv_heads;
            const Walk walk = walk_of(item), next = walk_of(following);
            const Ahead ahead = next.first_panels(next.segment_from(int64_t(spans_.all[following / kv_heads].split) * SPLIT));
            const Span& span = spans_.all[item / kv_heads];
            const int64_t first = queries_[span.piece].first;
            Attention<T, E> attention(kv_, walk, group_, queries + (h * tokens_ + first) * group_ * dim_, scale,
                                      w_.threads[team.id].attention(T()));
            auto put = [&](int t, int g, const float* sums, float inverse) {
                float* out = w_.attended.data() + (first + t) * att_ld_ + (h * group_ + g) * d;
                for (int64_t i = 0; i < d; i++) out[i] = sums[i] * inverse;
            };
            if (span.splits == 1) return attention.whole(ahead, put);
            float* partials = w_.partials.data() + spans_.partial_of(span, h);
            attention.split(span.split, ahead);
            attention.store_split(partials + span.split * spans_.partial_size);
            if (spans_.is_last(span, h)) attention.merged(partials, span.splits, spans_.partial_size, put);
        });
    }

    void head(Team& team) {
        const int64_t n = int64_t(sampled_.size());
        prepare_normed(team, w_.last, m_.norm, sampled_, nullptr, b_.hidden);
        if (is_screened_) {
            screen(team);
            in_order<T, 1>(team, m_.lm_head, w_.last.view(), n, int64_t(wanted_.size()), [&](int64_t i) { return wanted_[i]; }, find_best(team));
        } else {
            linear<T>(team, m_.lm_head, w_.last.view(), n, find_best(team));
        }
        team.for_each(n, [&](int64_t r) {
            Best of_all = best_[r];
            for (int t = 1; t < team.size; t++) {
                const Best& other = best_[t * n + r];
                if (other.value > of_all.value || (other.value == of_all.value && other.id < of_all.id)) of_all = other;
            }
            b_.greedy[r] = of_all.id;
        });
    }

    // A put() that keeps the greatest logit of each row that this thread has seen, and stores the logits if they are wanted.
    auto find_best(Team& team) {
        return [this, best = best_.data() + team.id * int64_t(sampled_.size())](int64_t r, int64_t column, const float* sums) {
            const int count = int(std::min<int64_t>(PANEL, m_.vocab - column));
            if (b_.logits) memcpy(b_.logits + r * m_.vocab + column, sums, size_t(count) * sizeof(float));
            Vec maxima = load<Vec>(sums);
            for (int j = LANES; j < PANEL; j += LANES) maxima = vmax(maxima, load<Vec>(sums + j));
            if (count == PANEL && reduce_max(maxima) < best[r].value) return;
            for (int j = 0; j < count; j++)
                if (sums[j] > best[r].value || (sums[j] == best[r].value && column + j < best[r].id)) best[r] = {sums[j], column + j};
        };
    }

    // wanted_ = the panels of lm_head that may hold the greatest logit of some row (screen.h).
    void screen(Team& team) {
        const int64_t n = int64_t(sampled_.size()), panels = m_.lm_head.panels();
        const Screen& s = m_.screen;
        team.for_each(n, [&](int64_t r) {
            const T* x = w_.last.view().row<T>(r);
            float* row = scratch(team);
            for (int64_t i = 0; i < m_.hidden; i++) row[i] = to_float(x[i]);
            w_.screened.put(r, row);
            reaches_[r] = reach(row, w_.screened.view(), r, s.linear.depth(), s.linear.group);
        });
        float* lower_bounds = lower_bounds_.data() + team.id * n;  // a lower bound of each row's greatest logit
        linear<T>(team, s.linear, w_.screened.view(), n, [&](int64_t r, int64_t column, const float* sums) {
            Vec lowest, highest;
            for (int j = 0; j < PANEL; j += LANES) {
                const Vec sum = load<Vec>(sums + j);
                const Vec within = fma(load<Vec>(s.error + column + j), splat(reaches_[r].norm), load<Vec>(s.norm + column + j) * reaches_[r].lost);
                lowest = j ? vmax(sum - within, lowest) : sum - within;
                highest = j ? vmax(sum + within, highest) : sum + within;
            }
            lower_bounds[r] = std::max(lower_bounds[r], reduce_max(lowest));
            upper_bounds_[r * panels + column / PANEL] = reduce_max(highest);
        });
        team.for_each(1, [&](int64_t) {
            std::vector<char> is_wanted(static_cast<size_t>(panels));
            for (int64_t r = 0; r < n; r++) {
                float bound = lower_bounds_[r];
                for (int t = 1; t < team.size; t++) bound = std::max(bound, lower_bounds_[t * n + r]);
                for (int64_t p = 0; p < panels; p++) is_wanted[p] |= !(upper_bounds_[r * panels + p] < bound);  // a NaN counts as wanted
            }
            for (int64_t p = 0; p < panels; p++)
                if (is_wanted[p]) wanted_.push_back(p);
        });
    }

    const everbatch_model& m_;
    const everbatch_batch& b_;
    everbatch_workspace& w_;
    Lora<T>& lora_;
    const bool has_lora_ = b_.adapter_of;
    LoraRows lora_rows_, lora_sampled_;  // of all tokens, of those whose logits are wanted
    const KVLayout& kv_;
    const int group_, dim_;
    int64_t tokens_, x_ld_, y_ld_, att_ld_;
    std::vector<int64_t> all_, sampled_;
    std::vector<Piece> units_, queries_;
    Spans spans_;
    std::vector<Best> best_;  // [threads][sampled]
    bool is_screened_;
    std::vector<Reach> reaches_;             // [sampled]
    std::vector<float> lower_bounds_, upper_bounds_;     // [threads][sampled], [sampled][panels]
    std::vector<int64_t> wanted_;
};

// The first row that names a token or a block that does not exist, or -1.
int64_t first_bad_row(const everbatch_model& m, const everbatch_batch& b) {
    int64_t widest = 1;  // the widest window of a layer, in tokens
    for (int64_t i = 0; i < m.num_layers; i++) widest = std::max(widest, m.layers[i].window ? m.layers[i].window : m.max_seq_len);
    const int64_t sink_blocks = (m.sink_tokens + m.kv.block_size - 1) / m.kv.block_size;
    int64_t flat = 0;
    for (int64_t r = 0; r < b.num_rows; r++) {
        const everbatch_row& row = b.rows[r];
        const int64_t end = int64_t(row.num_computed) + row.num_tokens, block_size = m.kv.block_size;
        if (row.num_computed < 0 || row.num_tokens < 1 || end > m.max_seq_len) return r;
        if (row.num_logits < 0 || row.num_logits > row.num_tokens || (end + block_size - 1) / block_size > b.max_blocks) return r;
        const int32_t* table = b.block_tables + row.slot * b.max_blocks;
        const int64_t in_window = std::max<int64_t>(0, row.num_computed - widest + 1) / block_size;
        for (int64_t block = 0; block * block_size < end; block++) {
            if (block == sink_blocks) block = std::max(block, in_window);  // blocks in between may have been let go
            if (table[block] < 0 || table[block] >= b.num_blocks) return r;
        }
        for (int64_t t = row.num_computed; t < end; t++, flat++) {
            const int64_t id = b.token_ids[row.slot * m.max_seq_len + t];
            if ((id < 0 || id >= m.vocab) && !(b.embedded && b.embedded[flat])) return r;
            if (b.positions && (b.positions[flat] < 0 || b.positions[flat] >= m.max_seq_len)) return r;
        }
    }
    return -1;
}

}  // namespace

extern "C" {

everbatch_workspace* everbatch_new_workspace() { return new everbatch_workspace; }
void everbatch_free_workspace(everbatch_workspace* w) { delete w; }

// Runs a step and returns -1. If a row names a token or a block that does not exist, returns its index and writes nothing.
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
