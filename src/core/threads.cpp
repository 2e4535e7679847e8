#include "core/threads.hpp"

#include <omp.h>
#include <pthread.h>

#include <new>

#include "core/backend.hpp"
#include "qattn/recipe.hpp"

namespace qattn {
namespace {

// Of a thread, as the runtime's workers are. The child of fork() has a copy of the one that forked.
thread_local bool had_team = false;
thread_local bool lost_team = false;

void after_fork_in_child() {
  lost_team = had_team;
  after_fork();
}

// When the library is loaded. Fails only without memory: then fork() is as dangerous as without it,
// and nothing else is.
[[maybe_unused]] const int registered =
    pthread_atfork(before_fork, after_fork, after_fork_in_child);

}  // namespace

void before_fork() {
  try {
    static_cast<void>(recipes());
  } catch (const std::bad_alloc&) {  // then nobody has them yet, and the child makes its own
  }
  detail::hold_backends();
}

void after_fork() { detail::release_backends(); }

int most_threads(int asked) {
  if (lost_team) return 1;
  return asked > 0 ? asked : omp_get_max_threads();
}

int team(int asked) {
  const int threads = most_threads(asked);
  if (threads > 1) had_team = true;
  return threads;
}

}  // namespace qattn
