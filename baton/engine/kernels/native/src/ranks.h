// All-reduce and gather over the processes ("ranks") of one model, through shared memory.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstring>

#include "simd.h"
#include "team.h"

namespace baton {

constexpr size_t EXCHANGE_BYTES = 4 << 20;  // of one rank, exchanged at a time

// Shared by all ranks, initially zero. Two buffers follow it, used alternately, with a place for each
// rank: when one is written again, every rank has read it. Mirrored by baton/engine/ranks.py.
struct alignas(64) Exchange {
    std::atomic<uint32_t> arrived, round, aborted;
    uint32_t timeout_ms;  // after which a rank counts as hung
    uint64_t total_ns;     // total duration of exchanges, on rank 0
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// This rank; `exchange` is null where there is one rank only.
struct Ranks {
    Exchange* exchange;
    int32_t rank, count;
};

class Exchanges {
   public:
    // All ranks begin at the same turn, because none can be ahead of one that has not arrived.
    Exchanges(Team& team, const Ranks& ranks)
        : team_(team),
          ranks_(ranks),
          turn_(ranks.exchange ? ranks.exchange->round.load(std::memory_order_acquire) : 0) {}

    // Adds x [count] of all ranks in the order of ranks: the same bits on all of them.
    template <class Element>
    void all_reduce(Element* x, size_t count) {
        if (!ranks_.exchange) return;
        const uint64_t began = now_ns();
        const size_t most = EXCHANGE_BYTES / sizeof(Element);
        for (size_t first = 0; first < count; first += most)
            reduce_piece(x + first, std::min(most, count - first));
        add_time(began);
    }

    // Returns when every rank has called it and written its KV to the pool.
    void finish() {
        if (!ranks_.exchange) return;
        meet();
        turn_++;
    }

    // part [rows][columns of the rank] -> whole [rows][columns] on rank 0. Rank r has the columns from
    // r * columns / ranks on.
    void gather(const float* part, int rows, int columns, float* whole) {
        const auto first = [&](int rank) { return size_t(columns) * rank / ranks_.count; };
        const size_t mine = first(ranks_.rank + 1) - first(ranks_.rank);
        const size_t widest = (columns + ranks_.count - 1) / ranks_.count;
        const int most = int(EXCHANGE_BYTES / sizeof(float) / widest);
        const uint64_t began = now_ns();
        for (int row = 0; row < rows; row += most) {
            const int piece = std::min(most, rows - row);
            const float* own = part + row * mine;
            if (ranks_.rank > 0)
                team_.share(piece, [&](int i) {
                    std::memcpy((float*)place(ranks_.rank) + i * mine, own + i * mine,
                                mine * sizeof(float));
                });
            meet();
            if (ranks_.rank == 0)
                team_.share(piece, [&](int i) {
                    for (int rank = 0; rank < ranks_.count; rank++) {
                        const size_t size = first(rank + 1) - first(rank);
                        const float* from = rank == 0 ? own : (const float*)place(rank);
                        std::memcpy(whole + size_t(row + i) * columns + first(rank), from + i * size,
                                    size * sizeof(float));
                    }
                });
            turn_++;
        }
        add_time(began);
    }

   private:
    static uint64_t now_ns() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec * uint64_t(1'000'000'000) + now.tv_nsec;
    }

    void add_time(uint64_t began) {
        if (team_.thread == 0 && ranks_.rank == 0) ranks_.exchange->total_ns += now_ns() - began;
    }

    static constexpr int CHUNK = 4096;  // elements that a thread adds at a time

    template <class Element>
    void reduce_piece(Element* x, size_t count) {
        Element* mine = (Element*)place(ranks_.rank);
        const int chunks = int((count + CHUNK - 1) / CHUNK);
        team_.share(chunks, [&](int i) {
            const size_t first = size_t(i) * CHUNK, size = std::min<size_t>(CHUNK, count - first);
            std::memcpy(mine + first, x + first, size * sizeof(Element));
        });
        meet();
        team_.share(chunks, [&](int i) {
            const size_t end = std::min(count, size_t(i + 1) * CHUNK);
            for (size_t at = size_t(i) * CHUNK; at < end; at += LANES) {
                const int valid = int(std::min<size_t>(LANES, end - at));
                f32x16 total{};
                for (int rank = 0; rank < ranks_.count; rank++)
                    total += load_floats((const Element*)place(rank) + at, valid);
                store_floats(x + at, total, valid);
            }
        });
        turn_++;
    }

    // A rank's place in the buffer of this turn.
    char* place(int rank) const {
        char* begin = (char*)(ranks_.exchange + 1);
        return begin + (size_t(turn_ % 2) * ranks_.count + rank) * EXCHANGE_BYTES;
    }

    // Returns when every rank has written its data, or one has failed.
    void meet() {
        team_.barrier();
        if (team_.thread == 0) wait();
        team_.barrier();
    }

    void wait() {
        Exchange& all = *ranks_.exchange;
        if (all.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == uint32_t(ranks_.count)) {
            all.arrived.store(0, std::memory_order_relaxed);
            all.round.store(turn_ + 1, std::memory_order_release);
            syscall(SYS_futex, &all.round, FUTEX_WAKE, ranks_.count, nullptr, nullptr, 0);
            return;
        }
        const auto is_over = [&] {
            return all.round.load(std::memory_order_acquire) != turn_ || all.aborted.load();
        };
        for (int spins = 0; spins < SPINS; spins++) {
            if (is_over()) return;
            _mm_pause();
        }
        // A rank that aborts does not wake others, so waits are short.
        const timespec nap{0, NAP_MS * 1'000'000};
        const uint64_t began = now_ns(), most = all.timeout_ms * uint64_t(1'000'000);
        while (now_ns() - began < most) {  // a signal ends a nap
            syscall(SYS_futex, &all.round, FUTEX_WAIT, turn_, &nap, nullptr, 0);
            if (is_over()) return;
        }
        all.aborted.store(1);
    }

    static constexpr int SPINS = 4096;  // as in `Team::barrier`
    static constexpr int NAP_MS = 20;

    Team& team_;
    const Ranks& ranks_;
    uint32_t turn_;  // number of the next exchange
};

}  // namespace baton
