// A tile of keys and values, taken from the pool and packed for `multiply`.
#pragma once

#include "paged.h"
#include "transpose.h"

namespace baton {

constexpr int TILE_KEYS = 64;

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
    static constexpr int GROUP = Product<Activation>::GROUP;

    alignas(64) Activation keys[MAX_HEAD_SIZE * TILE_KEYS];    // [head_size / GROUP][keys][GROUP]
    alignas(64) Activation values[TILE_KEYS * MAX_HEAD_SIZE];  // [keys / GROUP][head_size][GROUP]
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
            const size_t stride = rows.keys.stride();
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
        const size_t bytes = RUN * next.keys.stride();
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
                Activation* to = keys + i * TILE_KEYS + (run + row) * GROUP;
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
            std::memset(keys + (word * TILE_KEYS + run) * GROUP, 0, RUN * GROUP * sizeof(Activation));
        std::memset(values + run * size_, 0, RUN * size_ * sizeof(Activation));
    }

    const int size_;
    const bool int8_;
    const float scale_;
};

}  // namespace baton
