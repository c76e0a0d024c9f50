// A tile of keys and values, taken from the pool and packed for `multiply`.
#pragma once

#include "kernels.h"

namespace baton {

constexpr int TILE_KEYS = 64;

// First, how rows are brought into the order that `multiply` reads: neighbours in depth side by side.

typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef uint64_t WordPairs __attribute__((vector_size(REGISTER)));

#ifdef __AVX512BW__
constexpr Words LOW_WORDS{0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
constexpr Words HIGH_WORDS{2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
constexpr WordPairs LOW_PAIRS{0, 8, 2, 10, 4, 12, 6, 14}, HIGH_PAIRS{1, 9, 3, 11, 5, 13, 7, 15};

// Four words each of the rows 0, 4, 8 and 12.
inline Words take_words(const char* from, size_t stride) {
    __m512i words = _mm512_castsi128_si512(load<__m128i>(from));
    words = _mm512_inserti32x4(words, load<__m128i>(from + 4 * stride), 1);
    words = _mm512_inserti32x4(words, load<__m128i>(from + 8 * stride), 2);
    return (Words)_mm512_inserti32x4(words, load<__m128i>(from + 12 * stride), 3);
}
#elif defined(__aarch64__)
constexpr Words LOW_WORDS{0, 4, 1, 5}, HIGH_WORDS{2, 6, 3, 7};
constexpr WordPairs LOW_PAIRS{0, 2}, HIGH_PAIRS{1, 3};

inline Words take_words(const char* from, size_t) { return load<Words>(from); }
#else
constexpr Words LOW_WORDS{0, 8, 1, 9, 4, 12, 5, 13}, HIGH_WORDS{2, 10, 3, 11, 6, 14, 7, 15};
constexpr WordPairs LOW_PAIRS{0, 4, 2, 6}, HIGH_PAIRS{1, 5, 3, 7};

inline Words take_words(const char* from, size_t stride) {
    return __builtin_shufflevector(load<u32x4>(from), load<u32x4>(from + 4 * stride), 0, 1, 2, 3, 4,
                                   5, 6, 7);
}
#endif

// WORDS rows of four words -> four rows of WORDS words.
inline void transpose(const char* from, size_t stride, Words (&to)[4]) {
    Words rows[4];
    for (int i = 0; i < 4; i++) rows[i] = take_words(from + i * stride, stride);
    for (int high = 0; high < 2; high++) {
        const Words mask = high ? HIGH_WORDS : LOW_WORDS;
        const WordPairs a = (WordPairs)__builtin_shuffle(rows[0], rows[1], mask);
        const WordPairs b = (WordPairs)__builtin_shuffle(rows[2], rows[3], mask);
        to[2 * high] = (Words)__builtin_shuffle(a, b, LOW_PAIRS);
        to[2 * high + 1] = (Words)__builtin_shuffle(a, b, HIGH_PAIRS);
    }
}

// One of the four int8 in each word, as the bits of a float.
inline Words widen_byte(Words words, int byte) {
    const Ints whole = (Ints)(words << (24 - 8 * byte)) >> 24;
    return (Words)__builtin_convertvector(whole, Floats);
}

// What keys, values, queries and weights are multiplied as.
typedef Operand<Activation> Factor;

// Stores words of a type of row as factors: words of four int8 become rows of words, `stride`
// elements apart.
template <class Row>
inline void store_words(Words words, Factor* to, size_t stride) {
    if constexpr (std::is_same_v<Row, Factor>) {
        store(to, words);
    } else if constexpr (std::is_same_v<Row, bf16>) {
        for (int i = 0; i < 2; i++) store(to + i * stride, Lanes<bf16>::right((bf16*)&words, i));
    } else if constexpr (sizeof(Factor) == 2) {
        for (int i = 0; i < 2; i++)  // a bf16 holds an int8 exactly, in the upper half of its float
            store(to + i * stride, widen_byte(words, 2 * i) >> 16 | widen_byte(words, 2 * i + 1));
    } else {
        for (int i = 0; i < 4; i++) store(to + i * stride, widen_byte(words, i));
    }
}

// Sixteen int8 as floats.
inline f32x16 load_floats(const int8_t* from) {
    const i8x16 bytes = load<i8x16>(from);
#ifdef __AVX512F__
    const i32x16 whole = (i32x16)_mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)bytes);
#elif defined(__aarch64__)
    const i32x16 whole = __builtin_convertvector(bytes, i32x16);
#else
    const __m128i low = (__m128i)bytes, high = _mm_unpackhi_epi64(low, low);
    const __m256i halves[2] = {_mm256_cvtepi8_epi32(low), _mm256_cvtepi8_epi32(high)};
    const i32x16 whole = load<i32x16>(halves);
#endif
    return __builtin_convertvector(whole, f32x16);
}

// Rows of a type, as many as neighbours in depth lie side by side, -> one row of elements.
template <class Row>
inline void interleave(const Row* const (&rows)[1], float* to, int size) {
    for (int i = 0; i < size; i += LANES) store_floats(to + i, load_floats(rows[0] + i));
}

template <class Row>
inline void interleave(const Row* const (&rows)[2], bf16* to, int size) {
    int i = 0;
#ifdef __AVX512BW__
    typedef uint16_t u16x32 __attribute__((vector_size(64)));
    constexpr u16x32 FIRST{0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                           8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    if constexpr (std::is_same_v<Row, bf16>)
        for (; i + 2 * LANES <= size; i += 2 * LANES) {
            const u16x32 a = load<u16x32>(rows[0] + i), b = load<u16x32>(rows[1] + i);
            store(to + 2 * i, __builtin_shuffle(a, b, FIRST));
            store(to + 2 * i + 2 * LANES, __builtin_shuffle(a, b, FIRST + LANES));
        }
#endif
    for (; i < size; i += LANES) {  // exact, as above
        const u32x16 even = (u32x16)load_floats(rows[0] + i), odd = (u32x16)load_floats(rows[1] + i);
        store(to + 2 * i, even >> 16 | odd);
    }
}

// The K and V of one sequence, layer and KV head, at positions below `end`.
struct HeadRows {
    PagedRows keys, values;
    int end;
};

// Brings rows that are needed soon into the cache, some lines whenever there is time: all at once
// they would wait for each other, and the arithmetic for them.
class Prefetcher {
   public:
    void clear() { *this = Prefetcher(); }

    // At most MOST times.
    void add(const char* from, size_t bytes) {
        begins_[added_++] = from;
        bytes_ = bytes;
    }

    // A multiple of four lines.
    void fetch(int lines) {
        for (; lines > 0; lines -= 4, at_ += 4 * CACHE_LINE) {
            if (at_ >= end_) {
                if (begun_ == added_) return;
                at_ = begins_[begun_++];
                end_ = at_ + bytes_;
            }
            for (int i = 0; i < 4; i++) __builtin_prefetch(at_ + i * CACHE_LINE);
        }
    }

   private:
    static constexpr int MOST = 2 * TILE_KEYS / RUN, CACHE_LINE = 64;

    const char* begins_[MOST];
    size_t bytes_ = 0;
    const char *at_ = nullptr, *end_ = nullptr;
    int added_ = 0, begun_ = 0;
};

// The 64 keys from a multiple of 64 on; those behind a sequence's end are zeros.
class KeyTile {
   public:
    static constexpr int GROUP = Product<Factor>::GROUP;

    alignas(64) Factor keys[MAX_HEAD_SIZE * TILE_KEYS];    // [head_size / GROUP][keys][GROUP]
    alignas(64) Factor values[TILE_KEYS * MAX_HEAD_SIZE];  // [keys / GROUP][head_size][GROUP]
    alignas(64) float key_scales[TILE_KEYS];                // what scores are to be multiplied by
    alignas(64) float value_scales[TILE_KEYS];              // and weights
    Prefetcher prefetcher;                                  // of the tile that comes next

    KeyTile(int head_size, bool int8, float scale) : size_(head_size), int8_(int8), scale_(scale) {
        std::fill_n(key_scales, TILE_KEYS, scale);
        std::fill_n(value_scales, TILE_KEYS, 1.0f);
    }

    // Takes the tile from `first` on and begins to fetch that of `next` from `next_first` on.
    void take(const HeadRows& rows, int first, const HeadRows& next, int next_first) {
        prefetch(next, next_first);
        for (int run = 0; run < TILE_KEYS; run += RUN) {
            if (first + run >= rows.end) {
                clear(run);
                continue;
            }
            const char *k = rows.keys.at(first + run), *v = rows.values.at(first + run);
            const size_t stride = rows.keys.stride;
            if (int8_) {
                take_scales(k + size_, v + size_, stride, run);
                pack_keys<int8_t>(k, stride, run);
                pack_values<int8_t>(v, stride, run);
            } else {
                pack_keys<Activation>(k, stride, run);
                pack_values<Activation>(v, stride, run);
            }
        }
    }

   private:
    void prefetch(const HeadRows& next, int first) {
        prefetcher.clear();
        const size_t bytes = RUN * next.keys.stride;
        for (int key = first; key < std::min(next.end, first + TILE_KEYS); key += RUN) {
            prefetcher.add(next.keys.at(key), bytes);
            prefetcher.add(next.values.at(key), bytes);
        }
    }

    void take_scales(const char* k, const char* v, size_t stride, int run) {
        for (int i = 0; i < RUN; i++) {
            key_scales[run + i] = load<float>(k + i * stride) * scale_;
            value_scales[run + i] = load<float>(v + i * stride);
        }
    }

    template <class Row>
    void pack_keys(const char* rows, size_t stride, int run) {
        constexpr int PER_WORD = sizeof(uint32_t) / sizeof(Row);  // an int8 word becomes several
        for (int i = 0; i < size_; i += 4 * PER_WORD)
            for (int row = 0; row < RUN; row += WORDS) {
                prefetcher.fetch(4);
                Words columns[4];
                transpose(rows + row * stride + i * sizeof(Row), stride, columns);
                Factor* to = keys + i * TILE_KEYS + (run + row) * GROUP;
                for (int j = 0; j < 4; j++)
                    store_words<Row>(columns[j], to + j * PER_WORD * TILE_KEYS, TILE_KEYS * GROUP);
            }
    }

    template <class Row>
    void pack_values(const char* rows, size_t stride, int run) {
        for (int i = 0; i < RUN; i += GROUP) {
            if (i % 4 == 0) prefetcher.fetch(4);
            const Row* group[GROUP];
            for (int j = 0; j < GROUP; j++) group[j] = (const Row*)(rows + (i + j) * stride);
            interleave(group, values + (run + i) * size_, size_);
        }
    }

    void clear(int run) {
        for (int word = 0; word < size_ / GROUP; word++)
            std::memset(keys + (word * TILE_KEYS + run) * GROUP, 0, RUN * GROUP * sizeof(Factor));
        std::memset(values + run * size_, 0, RUN * size_ * sizeof(Factor));
    }

    const int size_;
    const bool int8_;
    const float scale_;
};

}  // namespace baton
