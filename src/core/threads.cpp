#include "core/threads.hpp"

#include <omp.h>
#include <pthread.h>

namespace qattn {
namespace {

// Of a thread, as the runtime's workers are. The child of fork() has a copy of the one that forked.
thread_local bool had_team = false;
thread_local bool lost_team = false;

void in_child() { lost_team = had_team; }

}  // namespace

int most_threads(int asked) {
  if (lost_team) return 1;
  return asked > 0 ? asked : omp_get_max_threads();
}

int team(int asked) {
  const int threads = most_threads(asked);
  if (threads > 1 && !had_team) {
    // Fails only without memory: then fork() is as dangerous as without it, and nothing else is.
    static const int registered = pthread_atfork(nullptr, nullptr, in_child);
    static_cast<void>(registered);
    had_team = true;
  }
  return threads;
}

}  // namespace qattn
