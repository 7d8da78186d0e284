// The most likely token without reading all of lm_head.
//
// A screen is a copy of lm_head in int8, of half or a quarter of its bytes. It gives each logit with a bound of its error; only the
// panels of 32 columns that may hold the greatest logit are then computed from lm_head itself. The token is the same, bit for bit.
//
//     |x w - x' w'|  <=  |x| |w - w'| + |x - x'| |w'|                x, w: a row and a column; x', w': what int8 keeps of them
//
// by the inequality of Cauchy and Schwarz, |.| the Euclidean norm. For what the sums lose in float32, of k products at most
// 2 k 2^-24 |x| |w| each, twice that is added to |w - w'|.
#pragma once
#include "rows.h"

namespace everbatch {

struct Screen {
    Linear linear;  // W8A8, of lm_head's shape; its data is null where there is no screen
    float* error;   // [panels * 32]: |w - w'| and what rounding adds; of a column
    float* norm;    // [panels * 32]: |w'|
};

constexpr int64_t SCREENED_ROWS = 8;  // with more, too many panels are left to compute

// Fills `to`, whose memory is all zero, from a packed layer of T. The columns' scales are those of W8A8 weights.
template <class T>
void make_screen(Team& team, const Linear& of, const Screen& to) {
    constexpr int TOGETHER = sizeof(T) == 4 ? 1 : 2;
    const int64_t depth = to.linear.depth(), group = to.linear.group;
    const float rounding = 4.0f * float(depth) * 5.97e-8f, up = 1.0f + 1e-4f;  // `up`: the norms themselves are rounded
    team.for_each(of.panels(), [&](int64_t p) {
        const T* w = static_cast<const T*>(of.data) + p * of.depth() * PANEL;
        int8_t* q = static_cast<int8_t*>(const_cast<void*>(to.linear.data)) + p * depth * PANEL;
        bf16* scales = const_cast<bf16*>(to.linear.scales) + p * to.linear.groups() * PANEL;
        for (int c = 0; c < PANEL; c++) {
            auto weight = [&](int64_t i) {
                const T value = i < of.depth() ? w[packed_at<TOGETHER>(i, c)] : T(0);
                if constexpr (sizeof(T) == 4)
                    return float(value);
                else
                    return to_float(value);
            };
            double lost = 0, kept = 0;
            for (int64_t first = 0; first < depth; first += group) {
                float most = 0;
                for (int64_t i = first; i < first + group; i++) most = std::max(most, std::abs(weight(i)));
                const bf16 rounded = to_bf16(most / 127.0f);
                const bf16 scale = to_float(rounded) * 127.0f < most ? bf16(rounded + 1) : rounded;
                const float s = to_float(scale), inverse = s > 0 ? 1.0f / s : 0.0f;
                scales[first / group * PANEL + c] = scale;
                for (int64_t i = first; i < first + group; i++) {
                    const float v = weight(i), whole = std::min(127.0f, std::max(-127.0f, std::nearbyint(v * inverse))), back = whole * s;
                    q[packed_at<4>(i, c)] = int8_t(uint8_t(int8_t(whole)) + WEIGHT_BIAS);
                    lost += double(v - back) * (v - back), kept += double(back) * back;
                }
            }
            to.norm[p * PANEL + c] = float(std::sqrt(kept)) * up;
            to.error[p * PANEL + c] = float(std::sqrt(lost) + rounding * (std::sqrt(kept) + std::sqrt(lost))) * up;
        }
    });
}

// |x| and |x - x'| of a row as lm_head reads it (of T) and as the screen does.
struct Reach {
    float norm, lost;
};

template <class T>
Reach reach(const Operand& exact, const Operand& screened, int64_t row, int64_t depth, int64_t group) {
    const T* x = exact.row<T>(row);
    const int8_t* q = screened.row<int8_t>(row);
    double norm = 0, lost = 0;
    for (int64_t i = 0; i < depth; i++) {
        float v;
        if constexpr (sizeof(T) == 4)
            v = x[i];
        else
            v = to_float(x[i]);
        const float difference = v - float(q[i]) * screened.scales[row * screened.groups + i / group];
        norm += double(v) * v, lost += double(difference) * difference;
    }
    return {float(std::sqrt(norm)) * (1.0f + 1e-4f), float(std::sqrt(lost)) * (1.0f + 1e-4f)};
}

}  // namespace everbatch
