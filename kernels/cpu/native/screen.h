// Finds the most likely token without reading all of lm_head.
//
// A screen is an int8 copy of lm_head with half or a quarter of its bytes. It gives each logit with a bound of its error. Only the
// panels of 32 columns that may hold the greatest logit are then computed from lm_head itself, so the token is exactly the same.
//
//     |x w - x' w'|  <=  |x| |w - w'| + |x - x'| |w'|                x, w: a row and a column; x', w': their int8 forms
//
// by the inequality of Cauchy and Schwarz, where |.| is the Euclidean norm. A float32 sum of k products is off by at most
// 2 k 2^-24 |x| |w|; twice as much, for the two sums, is added to |w - w'|.
#pragma once
#include <cfloat>

#include "rows.h"

namespace everbatch {

struct Screen {
    Linear linear;  // W8A8, of lm_head's shape; its data is null where there is no screen
    float* error;   // [panels * 32]: |w - w'| of a column, plus the rounding of sums
    float* norm;    // [panels * 32]: |w'|
};

constexpr int64_t SCREENED_ROWS = 8;  // rows; for more, too many panels would remain to be computed

// x >= 0, rounded up to a bfloat16.
inline bf16 up_to_bf16(float x) {
    const bf16 nearest = to_bf16(x);
    return to_float(nearest) < x ? bf16(nearest + 1) : nearest;
}

// Fills `to`, whose memory is all zero and whose groups are of PANEL columns of the input, from a packed layer of T.
template <class T>
void make_screen(Team& team, const Linear& of, const Screen& to) {
    constexpr int TOGETHER = std::is_same_v<T, bf16> ? 2 : 1;
    const int64_t depth = to.linear.depth();
    const float rounding = 4.0f * float(depth) * 0x1p-24f, up = 1.0f + 1e-3f;  // `up` covers the rounding of the norms
    team.for_each(of.panels(), [&](int64_t p) {
        const T* w = static_cast<const T*>(of.data) + p * depth * PANEL;
        int8_t* q = static_cast<int8_t*>(const_cast<void*>(to.linear.data)) + p * depth * PANEL;
        bf16* scales = const_cast<bf16*>(to.linear.scales) + p * to.linear.groups() * PANEL;
        float lost[PANEL] = {}, kept[PANEL] = {};  // squares
        for (int64_t first = 0; first < depth; first += PANEL, scales += PANEL) {
            float tile[PANEL][PANEL], largest[PANEL] = {}, scale[PANEL], inverse[PANEL];
            for (int i = 0; i < PANEL; i++)
                for (int c = 0; c < PANEL; c++) tile[i][c] = to_float(w[packed_at<TOGETHER>(first + i, c)]);
            for (int i = 0; i < PANEL; i++)
                for (int c = 0; c < PANEL; c++) largest[c] = std::max(largest[c], std::abs(tile[i][c]));
            for (int c = 0; c < PANEL; c++) {
                scales[c] = std::isfinite(largest[c]) ? up_to_bf16(largest[c] / 127.0f) : bf16(0);
                scale[c] = to_float(scales[c]), inverse[c] = scale[c] > 0 ? 1.0f / scale[c] : 0.0f;
            }
            for (int i = 0; i < PANEL; i++)
                for (int c = 0; c < PANEL; c++) {
                    const float whole = std::min(127.0f, std::max(-127.0f, std::nearbyint(tile[i][c] * inverse[c]))), back = whole * scale[c];
                    q[packed_at<4>(first + i, c)] = int8_t(uint8_t(int8_t(whole)) + WEIGHT_BIAS);
                    lost[c] += (tile[i][c] - back) * (tile[i][c] - back), kept[c] += back * back;
                }
        }
        for (int c = 0; c < PANEL; c++) {
            const float norm = std::sqrt(kept[c]), error = std::sqrt(lost[c]);
            const bool is_bounded = std::isfinite(error) && p * PANEL + c < of.n;
            to.norm[p * PANEL + c] = norm * up;
            to.error[p * PANEL + c] = is_bounded ? (error + rounding * (norm + error)) * up : FLT_MAX;  // else computed always
        }
    });
}

// The norms |x| and |x - x'| of a row.
struct Reach {
    float norm, lost;
};

// x [depth] is a row as lm_head reads it; `screened` holds it as the screen reads it.
inline Reach reach(const float* x, const Operand& screened, int64_t row, int64_t depth, int64_t group) {
    const int8_t* q = screened.row<int8_t>(row);
    double norm = 0, lost = 0;
    for (int64_t i = 0; i < depth; i++) {
        const double difference = x[i] - q[i] * screened.scales[row * screened.groups + i / group];
        norm += double(x[i]) * x[i], lost += difference * difference;
    }
    const double up = 1.0 + 1e-6;
    return {float(std::sqrt(norm) * up), float(std::sqrt(lost) * up)};
}

}  // namespace everbatch
