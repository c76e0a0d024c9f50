// The threads of a step.
#pragma once

#include <omp.h>

#include <atomic>

#include "simd.h"

namespace baton {

// One object for each thread; all threads make the same calls in the same order.
class Team {
   public:
    // State shared by the threads of a team.
    struct Shared {
        std::atomic<int> arrived{0};
        std::atomic<unsigned> round{0};
        std::atomic<int> next[3] = {};
    };

    Team(Shared& shared, int thread, int threads)
        : thread(thread), threads_(threads), shared_(shared) {}

    const int thread;
    int threads() const { return threads_; }

    // Calls work(i) for every i below count, each on a free thread, and returns when all calls have. A
    // descheduled thread delays the others by one call at most.
    template <class Work>
    void share(int count, const Work& work) {
        if (threads_ == 1) {
            for (int i = 0; i < count; i++) work(i);
            return;
        }
        std::atomic<int>& next = shared_.next[turn_ % 3];
        shared_.next[(turn_ + 1) % 3].store(0, std::memory_order_relaxed);  // unused now
        turn_++;
        for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
        barrier();
    }

    // Returns when every thread has called it.
    void barrier() {
        if (threads_ == 1) return;
        const unsigned round = shared_.round.load(std::memory_order_relaxed);
        if (shared_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            shared_.arrived.store(0, std::memory_order_relaxed);
            shared_.round.store(round + 1, std::memory_order_release);
            shared_.round.notify_all();
            return;
        }
        for (int spins = 0; spins < SPINS; spins++) {
            if (shared_.round.load(std::memory_order_acquire) != round) return;
            _mm_pause();
        }
        // Another process may have the core of a slower thread: sleep, to free this one.
        shared_.round.wait(round, std::memory_order_acquire);
    }

   private:
    static constexpr int SPINS = 4096;  // about 50 microseconds, longer than most waits
    const int threads_;
    Shared& shared_;
    unsigned turn_ = 0;
};

// Runs work(team) on `threads` threads, or on fewer where OMP_THREAD_LIMIT or OMP_DYNAMIC limits them.
template <class Work>
void with_team(int threads, const Work& work) {
    Team::Shared shared;
#pragma omp parallel num_threads(threads)
    {
        Team team(shared, omp_get_thread_num(), omp_get_num_threads());
        work(team);
    }
}

}  // namespace baton
