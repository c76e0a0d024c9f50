// A tile of keys and values: packed for `multiply`, or read from the pool while it is multiplied.
#pragma once

#include "kernels.h"

namespace baton {

constexpr int TILE_KEYS = 64;

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

// The type that keys, values, queries and weights are multiplied in.
typedef Operand<Activation> Factor;

// Words of a row as factors: calls work(i, vector) for each GROUP neighbours in depth, of which a word of
// four int8 holds several.
template <class Row, class Work>
inline void widened(Words words, const Work& work) {
    if constexpr (std::is_same_v<Row, Factor>) {
        work(0, words);
    } else if constexpr (std::is_same_v<Row, bf16>) {
        for (int i = 0; i < 2; i++) work(i, (Words)Lanes<bf16>::right((bf16*)&words, i));
    } else if constexpr (sizeof(Factor) == 2) {
        for (int i = 0; i < 2; i++)  // bf16, the upper half of a float, holds int8 exactly
            work(i, widen_byte(words, 2 * i) >> 16 | widen_byte(words, 2 * i + 1));
    } else {
        for (int i = 0; i < 4; i++) work(i, widen_byte(words, i));
    }
}

// 16 * VECTORS columns of GROUP rows as factors.
template <int VECTORS, class Row>
inline void take_columns(const char* row, size_t stride, Words (&to)[VECTORS * LANES / WORDS]) {
    int v = 0;
#ifdef __AVX512BW__
    typedef uint16_t u16x32 __attribute__((vector_size(64)));
    constexpr u16x32 FIRST{0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                           8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    if constexpr (std::is_same_v<Row, bf16> && std::is_same_v<Factor, bf16>)
        for (; v + 2 <= VECTORS; v += 2) {
            const char* from = row + v * LANES * sizeof(Row);
            const u16x32 even = load<u16x32>(from), odd = load<u16x32>(from + stride);
            to[v] = (Words)__builtin_shuffle(even, odd, FIRST);
            to[v + 1] = (Words)__builtin_shuffle(even, odd, FIRST + LANES);
        }
#endif
    for (; v < VECTORS; v++) {
        const Row* from = (const Row*)row + v * LANES;
        u32x16 columns = (u32x16)load_floats(from);
        if constexpr (sizeof(Factor) == 2)  // exact, as above
            columns = columns >> 16 | (u32x16)load_floats((const Row*)((const char*)from + stride));
        for (int i = 0; i < LANES / WORDS; i++)
            to[v * LANES / WORDS + i] = load<Words>((const uint32_t*)&columns + i * WORDS);
    }
}

// The K and V of one sequence, layer and KV head, at positions below `end`.
struct HeadRows {
    PagedRows keys, values;
    int end;
};

// Prefetches rows that are needed soon, some lines at a time: all at once would delay the arithmetic.
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

// 64 keys and values from a multiple of 64 on; zeros past a sequence's end.
class KeyTile {
   public:
    static constexpr int GROUP = Product<Factor>::GROUP;

    alignas(64) Factor keys[MAX_HEAD_SIZE * TILE_KEYS];    // [head_size / GROUP][keys][GROUP]
    alignas(64) Factor values[TILE_KEYS * MAX_HEAD_SIZE];  // [keys / GROUP][head_size][GROUP]
    alignas(64) float key_scales[TILE_KEYS];                // multiply scores
    alignas(64) float value_scales[TILE_KEYS];              // multiply weights
    Prefetcher prefetcher;                                  // of the next tile

    KeyTile(int head_size, bool int8, float scale) : size_(head_size), int8_(int8), scale_(scale) {
        std::fill_n(key_scales, TILE_KEYS, scale);
        std::fill_n(value_scales, TILE_KEYS, 1.0f);
    }

    // Begins the tile from `first` on, and prefetching that of `next` from `next_first` on.
    void begin(const HeadRows& rows, int first, const HeadRows& next, int next_first) {
        prefetch(next, next_first);
        stride_ = rows.keys.stride;
        runs_ = std::min(parts(rows.end - first, RUN), TILE_KEYS / RUN);
        for (int i = 0; i < runs_; i++) {
            key_runs_[i] = rows.keys.at(first + i * RUN);
            value_runs_[i] = rows.values.at(first + i * RUN);
            if (int8_) load_scales(rows, first + i * RUN, i * RUN);
        }
    }

    // Fills `keys` and `values`.
    void pack() {
        by_row([&](auto row) {
            for (int i = 0; i < runs_; i++) {
                this->template pack_keys<decltype(row)>(i);
                this->template pack_values<decltype(row)>(i);
            }
        });
        for (int i = runs_; i < TILE_KEYS / RUN; i++) clear(i * RUN);
    }

    // Scores of few queries [ROWS][head_size] with keys read from the pool: packing pays only for many
    // queries. Bit-equal to those with packed keys.
    template <int ROWS>
    void score(const Factor* queries, float (&scores)[ROWS][TILE_KEYS]) {
        by_row([&](auto row) { this->template score_runs<ROWS, decltype(row)>(queries, scores); });
    }

    // sums [ROWS][head_size] = sums * each row's correction + weights times values, read from the pool.
    template <int ROWS>
    void add_values(const Factor (&weights)[ROWS][TILE_KEYS], const float* corrections, float* sums) {
        constexpr int VECTORS = std::min(tile_vectors(ROWS), std::max(1, 24 / ROWS));
        by_row([&](auto row) {
            in_parts<VECTORS>(0, size_ / LANES, [&](auto vectors, int first) {
                this->template add_columns<ROWS, vectors(), decltype(row)>(weights, corrections,
                                                                           first * LANES, sums);
            });
        });
    }

   private:
    void prefetch(const HeadRows& next, int first) {
        prefetcher.clear();
        const size_t bytes = RUN * next.keys.stride;
        for (const PagedRows* rows : {&next.keys, &next.values})  // in the order of their use
            for (int key = first; key < std::min(next.end, first + TILE_KEYS); key += RUN) {
                prefetcher.add(rows->at(key), bytes);
                if (int8_) __builtin_prefetch(rows->scale_at(key));  // a run's scales are one line
            }
    }

    // Calls work with a value of the rows' type.
    template <class Work>
    void by_row(const Work& work) const {
        if (int8_)
            work(int8_t{});
        else
            work(Activation{});
    }

    void load_scales(const HeadRows& rows, int first, int run) {
        static_assert(RUN == LANES);
        store(key_scales + run, load<f32x16>(rows.keys.scale_at(first)) * scale_);
        store(value_scales + run, load<f32x16>(rows.values.scale_at(first)));
    }

    // Calls work(depth, factors) along the depth of WORDS keys.
    template <class Row, class Work>
    void walk_keys(const char* rows, const Work& work) {
        constexpr int PER_WORD = sizeof(uint32_t) / sizeof(Row);  // an int8 word becomes several words
        for (int i = 0; i < size_; i += 4 * PER_WORD) {
            prefetcher.fetch(4);
            Words columns[4];
            transpose(rows + i * sizeof(Row), stride_, columns);
            for (int j = 0; j < 4; j++)
                widened<Row>(columns[j], [&](int at, auto factors) {
                    work(i + j * PER_WORD + at * GROUP, (Words)factors);
                });
        }
    }

    template <class Row>
    void pack_keys(int run) {
        for (int row = 0; row < RUN; row += WORDS)
            walk_keys<Row>(key_runs_[run] + row * stride_, [&](int depth, Words factors) {
                store(keys + depth * TILE_KEYS + (run * RUN + row) * GROUP, factors);
            });
    }

    template <int ROWS, class Row>
    void score_runs(const Factor* queries, float (&scores)[ROWS][TILE_KEYS]) {
        typedef Lanes<Factor> L;
        for (int key = 0; key < runs_ * RUN; key += WORDS) {
            typename L::Sum held[ROWS] = {};
            const char* rows = key_runs_[key / RUN] + key % RUN * stride_;
            walk_keys<Row>(rows, [&](int depth, Words factors) {
                for (int r = 0; r < ROWS; r++)
                    held[r] = L::add(held[r], L::left(queries + r * size_ + depth, 0),
                                     L::right((const Factor*)&factors, 0));
            });
            for (int r = 0; r < ROWS; r++) store(scores[r] + key, held[r]);
        }
    }

    template <class Row>
    void pack_values(int run) {
        for (int i = 0; i < RUN; i += GROUP) {
            prefetcher.fetch(4);
            Factor* to = values + (run * RUN + i) * size_;
            const char* rows = value_runs_[run] + i * stride_;
            for (int column = 0; column < size_; column += LANES) {
                Words factors[LANES / WORDS];
                take_columns<1, Row>(rows + column * sizeof(Row), stride_, factors);
                for (int j = 0; j < LANES / WORDS; j++)
                    store(to + (column + j * WORDS) * GROUP, factors[j]);
            }
        }
    }

    template <int ROWS, int VECTORS, class Row>
    void add_columns(const Factor (&weights)[ROWS][TILE_KEYS], const float* corrections, int column,
                     float* sums) {
        typedef Lanes<Factor> L;
        constexpr int REGISTERS = VECTORS * LANES / WORDS;
        typename L::Sum held[ROWS][REGISTERS];
        const auto at = [&](int r, int v) { return sums + r * size_ + column + v * WORDS; };
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < REGISTERS; v++)
                held[r][v] = load<typename L::Sum>(at(r, v)) * corrections[r];
        for (int key = 0; key < runs_ * RUN; key += GROUP) {
            prefetcher.fetch(4);
            const char* rows = value_runs_[key / RUN] + key % RUN * stride_ + column * sizeof(Row);
            Words factors[REGISTERS];
            take_columns<VECTORS, Row>(rows, stride_, factors);
            for (int r = 0; r < ROWS; r++) {
                const auto left = L::left(weights[r] + key, 0);
                for (int v = 0; v < REGISTERS; v++)
                    held[r][v] = L::add(held[r][v], left, L::right((const Factor*)&factors[v], 0));
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < REGISTERS; v++) store(at(r, v), held[r][v]);
    }

    void clear(int run) {
        for (int word = 0; word < size_ / GROUP; word++)
            std::memset(keys + (word * TILE_KEYS + run) * GROUP, 0, RUN * GROUP * sizeof(Factor));
        std::memset(values + run * size_, 0, RUN * size_ * sizeof(Factor));
    }

    const int size_;
    const bool int8_;
    const float scale_;
    // Addresses of the tile's rows.
    const char *key_runs_[TILE_KEYS / RUN], *value_runs_[TILE_KEYS / RUN];
    size_t stride_;
    int runs_;
};

}  // namespace baton
