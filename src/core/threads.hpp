// How many threads a call runs on: the one place that decides it; and where they wait. What a child
// of fork() must not inherit half done.
#pragma once

#include <cstdint>

namespace qattn {

/// The threads of a call that asked for at most `asked` (0: the OpenMP default).
int most_threads(int asked);

/// The same for a parallel region that begins now: num_threads(team(asked)).
///
/// GNU's OpenMP runtime keeps the workers of a thread's last team for its next one, and a child of
/// fork() inherits that belief without the workers: its first team would wait for them for ever. A
/// thread that had a team of qattn's before fork() therefore runs alone in the child, under any
/// runtime. Threads that the child starts have whole teams.
int team(int asked);

/// fork() of any thread calls the two around it. Before it everything that is made once is made
/// (tests/hardening/fork_guards.cmake lists it), and the library's lock (backend.cpp) is held, so
/// that the child, which has none of the other threads, waits for nothing that one of them had
/// begun.
void before_fork();
void after_fork();

/// The loops of one parallel region, of which each needs what the ones before it left. All threads
/// of the team call the same. Threads wait where there is something to wait for: where they sleep
/// meanwhile (OMP_WAIT_POLICY=passive) every barrier costs 25 us (two Zen 5 cores).
class Phases {
 public:
  /// f(0) to f(count - 1), shared out. A loop of nothing waits for nobody.
  template <class F>
  void each(std::int64_t count, const F& f) {
    if (count == 0) return;
    if (follows_) {
#pragma omp barrier
    }
    follows_ = true;
#pragma omp for schedule(dynamic) nowait
    for (std::int64_t i = 0; i < count; ++i) f(i);
  }

 private:
  bool follows_ = false;
};

}  // namespace qattn
