// One step of a decoder (backend/architectures/description.py) over a flat mixed batch, in one parallel region.
//
// The phases of each layer (| = the next phase begins when all items of this one are done, whichever threads did them: team.h):
//     norm to operand | qkv product | rope, write KV | attention | to operand | out product, added to x | norm to operand |
//     gate and up product | activation to operand | down product, added to x
// Latent attention (latent.h) has more before and after it. A recurrent layer (recurrence.h) has its own phases in the place of those from the qkv product to the attention.
// Some models have more: a norm of q and k over all heads after the qkv product, a norm of a product before it is added to x. In a parallel
// block the MLP comes first, because both halves read the x that was there before.
// A product of rows that have adapters is preceded by a phase of its own, and adds their part to its sums (lora.h).
// Where several ranks share the layers (ranks.h), they meet behind the out product and the down product, whose sums they add up, and at the
// end. Where a step has some of the layers only, hidden states enter and leave it as floats, which x is made of, so nothing is rounded.
// An operand is the form in which a linear layer reads its input. After the attention of the last layer, only tokens whose logits
// are wanted go on.
#include <optional>

#include "latent.h"
#include "mixture.h"
#include "recurrence.h"

using namespace everbatch;

namespace {

template <class T>
class Step {
public:
    Step(const everbatch_model& m, const everbatch_batch& b, everbatch_workspace& w)
        : m_(m), b_(b), w_(w), lora_(w.lora(T())), attention_(b, m.kv, m.heads, w.attention) {
        if (m.ranks && m.ranks->size > 1) meeting_.emplace(*m.ranks);
        if (m.ranks && m.ranks->stages > 1) handover_.emplace(*m.ranks);
        for (int64_t r = 0; r < b.num_rows; r++) {
            const everbatch_row& row = b.rows[r];
            for (int t = 0; t < row.num_tokens; t++) all_.push_back(int64_t(all_.size()));
            for (int t = b.leaving ? 0 : row.num_logits; t > 0; t--) sampled_.push_back(int64_t(all_.size()) - t);
        }
        tokens_ = int64_t(all_.size());
        int64_t latents = 0, results = m.heads * m.kv.head_dim;
        int64_t inputs = std::max((m.heads * (m.form.gates_attention ? 2 : 1) + 2 * m.kv.kv_heads) * m.kv.head_dim, (m.form.is_gated ? 2 : 1) * m.intermediate);
        for (int64_t i = 0; i < m.num_layers; i++) {
            if (const everbatch_latent* latent = m.layers[i].latent) {
                LatentAttention<T>::make_room(*latent, m.layers[i].qkv, m.heads, tokens_, w.latent);
                results = std::max(results, LatentAttention<T>::results(*latent, m.heads)), latents = std::max(latents, LatentAttention<T>::widest(*latent));
            }
            if (const everbatch_recurrence* r = m.layers[i].recurrence) {
                results = std::max(results, Recurrence::num_results(*r)), inputs = std::max(inputs, r->inputs.n);
                Recurrence::make_room(*r, tokens_, w.recurrence);
                if (states_.empty()) states_ = state_rows(b);
            }
        }
        x_ld_ = row_length(m.hidden), att_ld_ = row_length(results), y_ld_ = row_length(inputs);
        int64_t widest = std::max(m.lm_head.depth(), latents);
        w.x.grow(tokens_ * x_ld_), w.y.grow(tokens_ * y_ld_), w.attended.grow(tokens_ * att_ld_);
        for (int64_t i = 0; i < m.num_layers; i++) {  // a checkpoint may have left some layers unquantised
            const everbatch_layer& l = m.layers[i];
            const Linear* const gates = l.recurrence ? &l.recurrence->gates : nullptr;
            for (const Linear* of_norm : {l.recurrence ? &l.recurrence->inputs : &l.qkv, gates, l.mixture ? &l.mixture->router : &l.gate_up})
                if (of_norm && of_norm->n) w.normed[of_norm->format].shape(*of_norm, tokens_, sizeof(T)), widest = std::max(widest, of_norm->depth());
            if (l.mixes()) operand_of_out(l).shape(l.out, tokens_, sizeof(T)), widest = std::max(widest, l.out.depth());
            if (l.attention_out_norm.weight || l.mlp_out_norm.weight) w.delta.grow(tokens_ * x_ld_);
            if (l.mixture) {
                make_room(*l.mixture);
                widest = std::max(widest, Mixture<T>::widest(*l.mixture));
            } else if (l.has_mlp()) {
                w.activated[l.down.format].shape(l.down, tokens_, sizeof(T));
                widest = std::max(widest, l.down.depth());
            }
        }
        if (w.mixture_counts.size() < size_t(m.num_layers)) w.mixture_counts.resize(size_t(m.num_layers));
        w.last.shape(m.lm_head, int64_t(sampled_.size()), sizeof(T));
        if (w.rows.size() < size_t(b.threads)) w.rows = std::vector<Buffer<float>>(size_t(b.threads));
        for (auto& row : w.rows) row.grow(widest);
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
            b_.entering ? enter(team) : embed(team);
            for (int64_t l = 0; l < m_.num_layers; l++) layer(team, l);
            if (b_.leaving) return leave(team);
            if (!sampled_.empty()) head(team);
            if (meeting_) end_together(team);
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
        const std::vector<Piece>& units = attention_.units();
        team.for_each(int64_t(units.size()), [&](int64_t u) {
            const Piece& piece = units[size_t(u)];
            const int64_t* ids = b_.token_ids + b_.rows[piece.row].slot * m_.max_seq_len + piece.position;
            for (int t = 0; t < piece.count; t++) {
                float* x = w_.x.data() + (piece.first + t) * x_ld_;
                if (const float* given = b_.embedded ? b_.embedded[piece.first + t] : nullptr) {
                    memcpy(x, given, size_t(m_.hidden) * sizeof(float));
                    continue;
                }
                if (m_.held_embedding.data) {
                    embed_held(ids[t], x);
                    continue;
                }
                const T* from = table + ids[t] * m_.hidden;
                for (int64_t i = 0; i < m_.hidden; i++) x[i] = to_float(from[i]) * m_.form.embedding_scale;
            }
        });
    }

    // Its numbers are rounded to T, as a table of T has them.
    void embed_held(int64_t id, float* x) const {
        const Linear& held = m_.held_embedding;
        const uint8_t* panel = static_cast<const uint8_t*>(held.data) + held.bytes_of<T>(id / PANEL * held.depth() * PANEL);
        with_super_blocks(held.format, [&](auto s) {
            unpack_column<decltype(s)>(panel, int(id % PANEL), m_.hidden, [&](int64_t i, float weight) {
                x[i] = (sizeof(T) == 2 ? to_float(to_bf16(weight)) : weight) * m_.form.embedding_scale;
            });
        });
    }

    void enter(Team& team) {
        team.for_each(tokens_, [&](int64_t t) { memcpy(w_.x.data() + t * x_ld_, b_.entering + t * m_.hidden, size_t(m_.hidden) * sizeof(float)); });
    }

    // All ranks of a stage have the same hidden states, and one of them hands them on.
    void leave(Team& team) {
        if (meeting_ && m_.ranks->rank) return;
        team.for_each(tokens_, [&](int64_t t) { memcpy(b_.leaving + t * m_.hidden, w_.x.data() + t * x_ld_, size_t(m_.hidden) * sizeof(float)); });
    }

    float* scratch(Team& team) { return w_.rows[size_t(team.id)].data(); }

    void normalise(const Norm& norm, const float* x, int64_t n, float* out) const {
        everbatch::normalise(NormKind(m_.form.norm), norm, x, n, m_.form.eps, out);
    }

    // operand = norm(x), for the picked tokens. told: where these rows are wanted as floats as well, or null; second: as another operand.
    void prepare_normed(Team& team, OperandBuffer& operand, const Norm& norm, const std::vector<int64_t>& picked, const LoraRows* adapted,
                        float* told = nullptr, OperandBuffer* second = nullptr) {
        team.for_each(int64_t(picked.size()), [&](int64_t r) {
            const float* x = w_.x.data() + picked[r] * x_ld_;
            if (norm.weight)
                normalise(norm, x, m_.hidden, scratch(team));
            else
                memcpy(scratch(team), x, size_t(m_.hidden) * sizeof(float));
            if (adapted) lora_.put(*adapted, r, scratch(team), m_.hidden);
            if (told) memcpy(told + r * m_.hidden, scratch(team), size_t(m_.hidden) * sizeof(float));
            operand.put(r, scratch(team));
            if (second) second->put(r, scratch(team));
        });
    }

    // x += residual_scale * norm(product), for the picked tokens. A product that has no norm is added while its sums are in the cache.
    void add_to_x(Team& team, const Linear& l, const Norm& norm, const OperandBuffer& operand, const std::vector<int64_t>& picked, Adapted adapted) {
        const int64_t rows = int64_t(picked.size());
        const Vec scale = splat(m_.form.residual_scale);
        shrink(team, l, adapted);
        linear<T>(team, l, operand.view(), rows, [&](int64_t r, int64_t column, const float* given) {
            alignas(64) float own[PANEL];
            const float* sums = with_lora(adapted, r, column, given, own);
            if (meeting_) return void(memcpy(meeting_->own_sums(r) + column, sums, PANEL * sizeof(float)));
            if (norm.weight) return void(memcpy(w_.delta.data() + r * x_ld_ + column, sums, PANEL * sizeof(float)));
            float* x = w_.x.data() + picked[r] * x_ld_ + column;
            for (int j = 0; j < PANEL; j += LANES) store(x + j, fma(load<Vec>(sums + j), scale, load<Vec>(x + j)));
        });
        if (meeting_) return add_all_to_x(team, norm, picked);
        if (!norm.weight) return;
        team.for_each(rows, [&](int64_t r) {
            float *x = w_.x.data() + picked[r] * x_ld_, *delta = scratch(team);
            normalise(norm, w_.delta.data() + r * x_ld_, m_.hidden, delta);
            for (int64_t i = 0; i < m_.hidden; i++) x[i] += delta[i] * m_.form.residual_scale;
        });
    }

    // x += the sums of all ranks, normalised where there is a norm.
    void add_all_to_x(Team& team, const Norm& norm, const std::vector<int64_t>& picked) {
        team.for_each(1, [&](int64_t) { meeting_->meet_with_sums(int64_t(picked.size())); });
        team.for_each(int64_t(picked.size()), [&](int64_t r) {
            float *x = w_.x.data() + picked[r] * x_ld_, *delta = scratch(team);
            meeting_->add_up(r, delta);
            if (norm.weight) normalise(norm, delta, m_.hidden, delta);
            for (int64_t i = 0; i < m_.hidden; i++) x[i] += delta[i] * m_.form.residual_scale;
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

    // Which tokens the halves of a layer go on with, after its attention.
    struct Half {
        int64_t index;  // of the layer
        const std::vector<int64_t>& picked;
        const LoraRows* adapted;
    };

    void layer(Team& team, int64_t index) {
        const everbatch_layer& l = m_.layers[index];
        if (handover_) handover_->beat();
        const LoraRows* adapted = has_lora_ ? &lora_rows_ : nullptr;
        const bool is_last = index + 1 == m_.num_layers && !b_.leaving;
        const std::vector<int64_t>& picked = is_last ? sampled_ : all_;
        if (l.recurrence) {
            recur(team, l, index);
        } else if (l.attends()) {
            prepare_normed(team, w_.normed[l.qkv.format], l.attention_norm, all_, adapted);
            if (l.latent)
                latent(*l.latent).begin(team, l.qkv, w_.normed[l.qkv.format].view(), scratch(team));
            else
                to_y(team, l.qkv, tokens_, {adapted, index, &LoraLayer::qkv});
            if (m_.form.norms_rows) norm_rows(team, l);
            attend(team, l, b_.pools[index], !picked.empty());
            if (l.latent && !picked.empty()) latent(*l.latent).finish(team, picked, scratch(team));
        }
        if (picked.empty()) return;
        const Half half{index, picked, has_lora_ && is_last ? &lora_sampled_ : adapted};
        if (m_.form.is_parallel) mlp(team, l, half);
        if (l.mixes()) out(team, l, half);
        if (!m_.form.is_parallel && l.has_mlp()) mlp(team, l, half);
        if (index < b_.added_layers) add_given(team, index, picked);
    }

    // x += what the step gives for the layer's results.
    void add_given(Team& team, int64_t index, const std::vector<int64_t>& picked) {
        team.for_each(int64_t(picked.size()), [&](int64_t r) {
            const float* given = b_.added[index * tokens_ + picked[size_t(r)]];
            float* x = w_.x.data() + picked[size_t(r)] * x_ld_;
            for (int64_t i = 0; given && i < m_.hidden; i++) x[i] += given[i];
        });
    }

    LatentAttention<T> latent(const everbatch_latent& l) {
        return LatentAttention<T>(l, m_.heads, {w_.y.data(), y_ld_, w_.attended.data(), att_ld_, tokens_}, w_.latent);
    }

    Recurrence recurrence(const everbatch_recurrence& r, int64_t index) {
        const Recurrence::Flat flat{w_.y.data(), y_ld_, w_.attended.data(), att_ld_, tokens_};
        return Recurrence(r, states_, attention_.units(), b_.states[index], flat, m_.form.eps, w_.recurrence);
    }

    // A recurrent mixer up to its heads' results.
    void recur(Team& team, const everbatch_layer& l, int64_t index) {
        const everbatch_recurrence& r = *l.recurrence;
        OperandBuffer &input = w_.normed[r.inputs.format], &of_gates = w_.normed[r.gates.format];
        prepare_normed(team, input, l.attention_norm, all_, nullptr, nullptr, r.gates.n && &of_gates != &input ? &of_gates : nullptr);
        float* gates = w_.recurrence.gates.data();
        const int64_t ld = Recurrence::gates_ld(r);
        const auto put = [=](int64_t row, int64_t column, const float* sums) { memcpy(gates + row * ld + column, sums, PANEL * sizeof(float)); };
        if (r.gates.n) linear_by_rows<T>(team, r.gates, of_gates.view(), tokens_, put);
        to_y(team, r.inputs, tokens_, {nullptr, index, nullptr});
        recurrence(r, index).run(team);
    }

    OperandBuffer& operand_of_out(const everbatch_layer& l) { return (l.recurrence ? w_.recurrent : w_.heads)[l.out.format]; }

    // The end of the attention or the recurrence: from the heads' results to x.
    void out(Team& team, const everbatch_layer& l, const Half& half) {
        OperandBuffer& operand = operand_of_out(l);
        team.for_each(int64_t(half.picked.size()), [&](int64_t r) {
            if (l.recurrence)
                recurrence(*l.recurrence, half.index).finish(half.picked[r], scratch(team));
            else
                memcpy(scratch(team), w_.attended.data() + half.picked[r] * att_ld_, size_t(l.out.k) * sizeof(float));
            if (half.adapted) lora_.put(*half.adapted, r, scratch(team), l.out.k);
            operand.put(r, scratch(team));
        });
        add_to_x(team, l.out, l.attention_out_norm, operand, half.picked, {half.adapted, half.index, &LoraLayer::out});
    }

    void make_room(const everbatch_mixture& m) {
        MixtureMemory& memory = w_.mixture;
        memory.normed.grow(size_t(tokens_ * x_ld_)), memory.logits.grow(size_t(tokens_ * row_length(m.router.n)));
        memory.chosen.grow(size_t(tokens_ * m.places)), memory.weights.grow(size_t(tokens_ * m.places));
    }

    // The experts of the picked tokens, in the place of an MLP.
    void mix(Team& team, const everbatch_layer& l, const Half& half) {
        const everbatch_mixture& m = *l.mixture;
        MixtureMemory& memory = w_.mixture;
        const int64_t rows = int64_t(half.picked.size()), routed = m.router.n - m.is_shared_gated, ld = row_length(m.router.n);
        float *logits = memory.logits.data(), *normed = memory.normed.data();
        prepare_normed(team, w_.normed[m.router.format], l.mlp_norm, half.picked, nullptr, normed);
        linear<T>(team, m.router, w_.normed[m.router.format].view(), rows,
                  [&](int64_t r, int64_t column, const float* sums) { memcpy(logits + r * ld + column, sums, PANEL * sizeof(float)); });
        const Router router(m.routing);
        team.for_each(rows, [&](int64_t r) {
            float *own = logits + r * ld, &gate = own[routed];
            int64_t* chosen = memory.chosen.data() + r * m.places;
            if (m.is_shared_gated) gate = 1.0f / (1.0f + std::exp(-gate));
            router.choose(own, routed, m.places, chosen, memory.weights.data() + r * m.places);
            for (int64_t p = 0; p < m.places; p++) chosen[p] -= m.first_expert;
        });
        Mixture<T> mixture(m, memory, w_.mixture_counts[size_t(half.index)], w_.rows, b_.threads);
        mixture.run(
            team, rows, memory.chosen.data(), memory.weights.data(), m.is_shared_gated ? logits + routed : nullptr, ld,
            [&](int64_t r, float* row) { memcpy(row, normed + r * m_.hidden, size_t(m_.hidden) * sizeof(float)); },
            [&](int64_t r, float* sum) {
                if (meeting_) return void(memcpy(meeting_->own_sums(r), sum, size_t(m_.hidden) * sizeof(float)));
                if (l.mlp_out_norm.weight) normalise(l.mlp_out_norm, sum, m_.hidden, sum);
                float* x = w_.x.data() + half.picked[size_t(r)] * x_ld_;
                for (int64_t i = 0; i < m_.hidden; i++) x[i] += sum[i] * m_.form.residual_scale;
            });
        if (meeting_) add_all_to_x(team, l.mlp_out_norm, half.picked);
    }

    void mlp(Team& team, const everbatch_layer& l, const Half& half) {
        if (l.mixture) return mix(team, l, half);
        prepare_normed(team, w_.normed[l.gate_up.format], l.mlp_norm, half.picked, half.adapted);
        activate(team, l, int64_t(half.picked.size()), {half.adapted, half.index, &LoraLayer::gate_up});
        add_to_x(team, l.down, l.mlp_out_norm, w_.activated[l.down.format], half.picked, {half.adapted, half.index, &LoraLayer::down});
    }

    // activated = activation(gate) * up, or activation(up) without a gate. With many rows, gate and up are not stored in between.
    void activate(Team& team, const everbatch_layer& l, int64_t rows, Adapted adapted) {
        OperandBuffer& activated = w_.activated[l.down.format];
        const Operand& input = w_.normed[l.gate_up.format].view();
        const auto kind = Activation(m_.form.activation);
        if (takes_many_rows(rows, activated) && !adapted.rows)
            return activate_panels<T>(team, l.gate_up, kind, m_.form.is_gated, input, rows, activated);
        to_y(team, l.gate_up, rows, adapted);
        team.for_each(rows, [&](int64_t r) {
            const float* y = w_.y.data() + r * y_ld_;
            everbatch::activate(kind, y, m_.form.is_gated ? y + m_.intermediate : nullptr, m_.intermediate, scratch(team));
            if (adapted.rows) lora_.put(*adapted.rows, r, scratch(team), m_.intermediate);
            activated.put(r, scratch(team));
        });
    }

    // Normalises q and k of y, all heads of a token together.
    void norm_rows(Team& team, const everbatch_layer& l) {
        const int64_t of_q = m_.heads * m_.kv.head_dim, of_k = m_.kv.kv_heads * m_.kv.head_dim;
        team.for_each(tokens_, [&](int64_t token) {
            float *q = w_.y.data() + token * y_ld_, *k = q + of_q;
            normalise(l.q_norm, q, of_q, q), normalise(l.k_norm, k, of_k, k);
        });
    }

    // Queries, keys and values of y as the products read them.
    struct Heads {
        const Step& step;
        const everbatch_layer& layer;

        int64_t angle(int64_t token, int64_t position) const { return step.b_.cos ? token : step.b_.positions ? step.b_.positions[token] : position; }
        const float* of(int64_t token, int64_t head) const { return step.w_.y.data() + token * step.y_ld_ + head * step.m_.kv.head_dim; }

        void query(int64_t token, int64_t position, int64_t head, float* out) const {
            const everbatch_form& form = step.m_.form;
            step.turn(layer, of(token, head), layer.q_norm, angle(token, position), out);
            if (form.query_scales)
                for (int i = 0; i < step.m_.kv.head_dim; i++) out[i] *= form.query_scales[angle(token, position)];
        }
        void key(int64_t token, int64_t position, int64_t head, float* out) const {
            const int64_t d = step.m_.kv.head_dim;
            step.turn(layer, of(token, step.m_.heads + head), layer.k_norm, angle(token, position), out);
            if (!layer.key_shift || !step.m_.kv.is_quantized()) return;
            for (int64_t i = 0; i < d; i++) out[i] -= layer.key_shift[head * d + i];
        }
        void value(int64_t token, int64_t head, float* out) const {
            memcpy(out, of(token, step.m_.heads + step.m_.kv.kv_heads + head), size_t(step.m_.kv.head_dim) * sizeof(float));
        }
    };

    // out = x, normalised on its own and rotated. angle: a row of the rotary tables.
    void turn(const everbatch_layer& l, const float* x, const Norm& norm, int64_t angle, float* out) const {
        const int64_t d = m_.kv.head_dim, half = l.rotary_dim / 2, turned = l.cos ? l.rotary_dim : 0;
        alignas(64) float normed[MAX_HEAD_DIM];
        if (norm.weight && !m_.form.norms_rows) normalise(norm, x, d, normed), x = normed;
        const float *cos = (b_.cos ? b_.cos : l.cos), *sin = (b_.cos ? b_.sin : l.sin);
        if (turned) (m_.form.is_interleaved ? rotate_neighbours : rotate_halves)(x, cos + angle * half, sin + angle * half, half, out);
        if (turned < d) memcpy(out + turned, x + turned, size_t(d - turned) * sizeof(float));
    }

    void attend(Team& team, const everbatch_layer& l, char* pool, bool is_wanted) {
        const Scoring scoring{m_.form.attention_scale, m_.form.attention_softcap, l.sinks};
        attention_.run(team, pool, {l.window, m_.sink_tokens}, scoring, is_wanted, Heads{*this, l},
                       [&](int64_t token, int64_t head, const float* acc, float factor) {
                           float* out = w_.attended.data() + token * att_ld_ + head * m_.kv.head_dim;
                           for (int i = 0; i < m_.kv.head_dim; i++) out[i] = acc[i] * factor;
                           if (!m_.form.gates_attention) return;
                           const float* gate = w_.y.data() + token * y_ld_ + (m_.heads + 2 * m_.kv.kv_heads + head) * m_.kv.head_dim;
                           activate_with(Sigmoid(), gate, out, m_.kv.head_dim, out);
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
            for (int t = 1; t < team.size; t++) of_all.take(best_[t * n + r]);
            b_.greedy[r] = of_all.id;
            if (meeting_) meeting_->best(m_.ranks->rank, r) = of_all;
        });
    }

    // The last meeting: no rank reads token ids or block tables any more. Rank 0 then has the greatest logit of all ranks, and all logits.
    void end_together(Team& team) {
        const int64_t num_logits = b_.logits ? m_.lm_head.n : 0;
        team.for_each(1, [&](int64_t) { meeting_->meet_with_logits(int64_t(sampled_.size()), m_.ranks->first_token, num_logits); });
        if (m_.ranks->rank) return;
        team.for_each(int64_t(sampled_.size()), [&](int64_t r) {
            Best of_all = meeting_->best(0, r);
            for (int rank = 1; rank < m_.ranks->size; rank++) of_all.take(meeting_->best(rank, r));
            b_.greedy[r] = of_all.id;
            const int64_t own = m_.lm_head.n;
            if (b_.logits) memcpy(b_.logits + r * m_.vocab + own, meeting_->logits(r) + own, size_t(m_.vocab - own) * sizeof(float));
        });
    }

    // Where this rank puts the logits of row r, [vocab].
    float* logits(int64_t r) { return meeting_ && m_.ranks->rank ? meeting_->logits(r) : b_.logits + r * m_.vocab; }

    // A put() that keeps the greatest logit of each row that this thread has seen, and stores the logits if they are wanted. It compares what
    // lm_head yields: the scale of logits is greater than zero, and it and the cap keep their order.
    auto find_best(Team& team) {
        return [this, best = best_.data() + team.id * int64_t(sampled_.size())](int64_t r, int64_t column, const float* sums) {
            const int count = int(std::min<int64_t>(PANEL, m_.lm_head.n - column));
            const int64_t token = (m_.ranks ? m_.ranks->first_token : 0) + column;
            if (b_.logits) put_logits(sums, count, logits(r) + token);
            Vec maxima = load<Vec>(sums);
            for (int j = LANES; j < PANEL; j += LANES) maxima = vmax(maxima, load<Vec>(sums + j));
            if (count == PANEL && reduce_max(maxima) < best[r].value) return;
            for (int j = 0; j < count; j++) best[r].take({sums[j], token + j});
        };
    }

    // Stores `count` logits of a panel, scaled and capped.
    void put_logits(const float* sums, int count, float* out) const {
        const float scale = m_.form.logit_scale, cap = m_.form.logit_softcap;
        alignas(64) float logits[PANEL];
        for (int j = 0; j < PANEL; j += LANES) {
            const Vec scaled = load<Vec>(sums + j) * scale;
            store(logits + j, cap ? everbatch::tanh(scaled / cap) * cap : scaled);
        }
        memcpy(out, logits, size_t(count) * sizeof(float));
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
    BatchAttention<T> attention_;
    std::optional<Meeting> meeting_;    // where several ranks share the layers
    std::optional<Handover> handover_;  // where others have other layers
    const bool has_lora_ = b_.adapter_of;
    LoraRows lora_rows_, lora_sampled_;  // of all tokens, of those whose logits are wanted
    int64_t tokens_, x_ld_, y_ld_, att_ld_;
    std::vector<int64_t> all_, sampled_;
    std::vector<StateRow> states_;  // where a layer is recurrent
    std::vector<Best> best_;  // [threads][sampled]
    bool is_screened_;
    std::vector<Reach> reaches_;             // [sampled]
    std::vector<float> lower_bounds_, upper_bounds_;     // [threads][sampled], [sampled][panels]
    std::vector<int64_t> wanted_;
};

// The first row that names a token, a block or a state that does not exist, or -1. Where no layer has attention, blocks are not read.
int64_t first_bad_row(const everbatch_model& m, const everbatch_batch& b) {
    const Sight widest{m.widest_window, m.sink_tokens};
    bool has_states = false, has_attention = !m.num_layers;
    for (int64_t i = 0; i < m.num_layers; i++) has_states |= m.layers[i].recurrence != nullptr, has_attention |= m.layers[i].attends();
    int64_t flat = 0;
    for (int64_t r = 0; r < b.num_rows; r++) {
        const everbatch_row& row = b.rows[r];
        if (row.num_logits < 0 || row.num_logits > row.num_tokens || !has_tokens(row, m.max_seq_len)) return r;
        if (has_attention && !has_blocks(row, b, m.kv, m.max_seq_len, widest)) return r;
        for (int64_t t = row.num_computed; t < int64_t(row.num_computed) + row.num_tokens; t++, flat++) {
            const int64_t id = b.token_ids[row.slot * m.max_seq_len + t];
            if ((id < 0 || id >= m.vocab) && !(b.embedded && b.embedded[flat])) return r;
            if (b.ends && (b.ends[flat] <= t || b.ends[flat] > int64_t(row.num_computed) + row.num_tokens)) return r;
            if (b.positions && !b.cos && (b.positions[flat] < 0 || b.positions[flat] >= m.max_seq_len)) return r;
        }
    }
    return has_states ? first_bad_state(b) : -1;
}

int64_t num_tokens(const everbatch_batch& b) {
    int64_t sum = 0;
    for (int64_t r = 0; r < b.num_rows; r++) sum += b.rows[r].num_tokens;
    return sum;
}

}  // namespace

extern "C" {

everbatch_workspace* everbatch_new_workspace() { return new everbatch_workspace; }
void everbatch_free_workspace(everbatch_workspace* w) { delete w; }

int64_t everbatch_ranks_bytes(const Ranks* ranks) { return RanksMemory(*ranks).num_bytes(); }

// Where in that memory the hidden states lie that a stage hands on, [rows][hidden].
int64_t everbatch_hidden_at(const Ranks* ranks, int32_t stage) { return RanksMemory(*ranks).hidden_at(stage); }

// Makes the ranks wait no longer for the rank of this number, whose process has ended.
void everbatch_lose_rank(const Ranks* ranks, int32_t number) { RanksMemory(*ranks).give_up(number); }

// Connections to so many ranks, this one included; each gets a socket.
Links* everbatch_new_links(int32_t ranks) { return new Links(ranks); }
void everbatch_link_rank(Links* links, int32_t number, int32_t socket) { links->connect(number, socket); }
void everbatch_free_links(Links* links) { delete links; }

// Takes what the rank of this number sends, until the connection to it ends.
void everbatch_receive_from_rank(const Ranks* ranks, int32_t number) { RanksMemory(*ranks).receive(number); }

// The first row that names a token, a block or a state that does not exist, or -1.
int64_t everbatch_check(const everbatch_model* m, const everbatch_batch* b) { return first_bad_row(*m, *b); }

// Runs a step and returns -1. If a row names a token, a block or a state that does not exist, returns its index and writes nothing. If a rank
// is lost, returns -2 - its number. Where the layers are split into stages, hidden states come from the stage before and go to the next one.
int64_t everbatch_step(const everbatch_model* m, const everbatch_batch* b, everbatch_workspace* w) {
    const int64_t bad = first_bad_row(*m, *b);
    if (bad >= 0) return bad;
    const Ranks* ranks = m->ranks;
    const auto lost = [&] { return ranks ? RanksMemory(*ranks).lost() : -1; };
    if (ranks && b->entering) Handover(*ranks).take();
    if (lost() < 0) {
        if (m->kv.element_bytes == 4)
            Step<float>(*m, *b, *w).run();
        else
            Step<bf16>(*m, *b, *w).run();
    }
    if (ranks && b->leaving && !ranks->rank) Handover(*ranks).hand_on(b->leaving, num_tokens(*b));
    return lost() < 0 ? -1 : -2 - lost();
}

}  // extern "C"
