// The first half of an MLP for many rows.
#pragma once
#include "activation.h"
#include "rows.h"

namespace everbatch {

constexpr int64_t MANY_ROWS = 64;  // from here on arithmetic, not reading weights, limits a product

// Whether an MLP of so many rows may use activate_panels.
inline bool takes_many_rows(int64_t rows, const OperandBuffer& activated) { return rows >= MANY_ROWS && activated.takes_panels(); }

// activated = activation(gate) * up, or activation(up) without a gate, of the product of gate_up, which is not stored in between.
template <class T>
void activate_panels(Team& team, const Linear& gate_up, Activation kind, bool is_gated, const Operand& input, int64_t rows, OperandBuffer& activated) {
    const auto put = [&](int64_t r, int64_t column, float* gate, const float* up) {
        activate(kind, gate, up, PANEL, gate);
        activated.put_panel(r, column, gate);
    };
    if (is_gated)
        linear_of_halves<T>(team, gate_up, input, rows, put);
    else
        linear<T>(team, gate_up, input, rows, [&](int64_t r, int64_t column, float* up) { put(r, column, up, nullptr); });
}

}  // namespace everbatch
