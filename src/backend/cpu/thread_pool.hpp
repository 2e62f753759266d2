// Fork-join on threads of the library's own: the caller works too, helpers join it.
//
// Work comes in shares, each done once by whichever thread takes it first, so a helper that wakes late or is descheduled delays
// nobody who could do its share, and a call without helpers is merely slower. Thread k of a call begins with share k, and
// is the same thread in every call of a lone caller: it finds its part of the workspace in its own caches and on its own NUMA
// node.
//
// The library's threads never multiply with the caller's. A call takes helpers only while fewer than its own number of threads
// run shares in the whole process: C callers at once, each asking for n threads, have at most C + n - 1 threads running, and once
// C >= n each call stays on the thread that it came from. A share that itself calls the library stays on its thread too.
#pragma once

#include <functional>

namespace treemla {

// Calls share(0) .. share(num_shares - 1), each once, on at most num_threads threads, the caller among them. Returns when all
// are done; rethrows the first exception of any.
void run_shares(int num_shares, int num_threads, const std::function<void(int)>& share);

// What RunOptions::num_threads means: itself; for 0 the environment's TREEMLA_NUM_THREADS, or one thread a core.
// Throws Error(kInvalidArgument) if the variable holds anything but 1 to kMaxThreads.
int num_threads_of(int num_threads);
inline constexpr int kMaxThreads = 4096;

// Cores this process may run on.
int available_cores();
// Helpers started so far: they stay until the process ends.
int num_helpers();

}  // namespace treemla
