// 64-bit ARM's equivalents of the x86 intrinsics in the kernels.
//
// All else is in GCC's vector extensions. Not yet run on an ARM CPU: its results were compared with
// AVX2's in an emulator.
#pragma once

#include <arm_neon.h>

namespace baton {

inline void _mm_pause() { asm volatile("yield"); }

typedef int16_t i16x8 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef float f32x4 __attribute__((vector_size(16)));

// Sums of products of pairs of int16.
inline i32x4 dot_int16(i16x8 a, i16x8 b) {
    return vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
}

#ifdef __ARM_FEATURE_MATMUL_INT8
// sum + the products of four unsigned and four signed bytes.
inline i32x4 dot_int8(i32x4 sum, i32x4 a, i32x4 b) {
    return vusdotq_s32(sum, (uint8x16_t)a, (int8x16_t)b);
}
#endif

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
// sum + the products of two pairs.
inline f32x4 dot_bf16(f32x4 sum, u32x4 a, u32x4 b) {
    return vbfdotq_f32(sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#endif

}  // namespace baton
