// Threads for the kernels. Work is handed out an item at a time, so a result must not depend on which thread made it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace trace_fast {

// Calls work(item, thread) for every item in [0, count), thread < n_threads, on at most n_threads threads, this one
// among them. `work` must not throw. Threads are made a call: microseconds, against kernels of milliseconds, and no
// pool outlives the call or fights with the caller's own. A thread that cannot be made is done without.
template <class Work>
void parallel_for(std::int64_t count, int n_threads, const Work& work) {
  std::atomic<std::int64_t> next{0};
  const auto loop = [&](int thread) {
    for (std::int64_t item = next.fetch_add(1); item < count; item = next.fetch_add(1)) work(item, thread);
  };
  std::vector<std::thread> helpers;
  const std::int64_t wanted = std::min<std::int64_t>(std::max(n_threads, 1), count);
  try {
    helpers.reserve(static_cast<std::size_t>(std::max<std::int64_t>(wanted - 1, 0)));
  } catch (const std::bad_alloc&) {
    return loop(0);
  }
  for (int t = 1; t < wanted; ++t) {
    try {
      helpers.emplace_back(loop, t);
    } catch (const std::system_error&) {
      break;
    } catch (const std::bad_alloc&) {
      break;
    }
  }
  loop(0);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace trace_fast
