// How many threads a call runs on: the one place that decides it.
#pragma once

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

}  // namespace qattn
