// Powers of sixteen floats at once.
#pragma once

#include "simd.h"

namespace baton {

constexpr float LOG2_E = 1.44269504f;

// 2^x of x <= 0, within two units in the last place; below -126 it is 0.
inline f32x16 power_of_two(f32x16 x) {
    // Adding and taking off 1.5 * 2^23 rounds to a whole number.
    const float magic = 12582912.0f;
    const f32x16 shifted = x + magic;
    const f32x16 r = x - (shifted - magic);
    f32x16 p = r * 1.535336188e-4f + 1.339887440e-3f;  // Cephes' exp2f
    p = p * r + 9.618437357e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472028e-1f;
    p = p * r + 1.0f;
    const i32x16 power = (i32x16)shifted << 23;  // the magic's own bits are shifted out
    return x < -126.0f ? f32x16{} : (f32x16)((i32x16)p + power);
}

}  // namespace baton
