#include <chrono>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>

#include "backend/backend.hpp"
#include "treemla/error.hpp"

namespace treemla {
namespace {

class HostMemory : public MemorySpace {
 public:
  void* allocate(std::size_t bytes) const override {
    constexpr std::size_t kAlign =
        4096;  // a page: untouched here, it lies near the thread that first writes it
    const std::size_t rounded = (bytes / kAlign + 1) * kAlign;  // never 0 bytes
    void* p = std::aligned_alloc(kAlign, rounded);
    if (!p) throw Error(ErrorCode::kOutOfMemory, "bytes", fmt::format("no memory for {} bytes", bytes));
    return p;
  }
  void release(void* p) const noexcept override { std::free(p); }
  void upload(void* to, const void* from, std::size_t bytes, void*) const override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void download(void* to, const void* from, std::size_t bytes, void*) const override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void synchronize(void*) const override {}
  void* make_stream() const override { return nullptr; }
  void release_stream(void*) const noexcept override {}

  std::vector<double> measure(void*, const std::function<void()>& enqueue, int samples,
                              bool cold) const override {
    // Writing it puts other lines than the caller's into every cache.
    std::vector<char> flush(cold ? std::size_t{256} << 20 : 0);
    enqueue();
    std::vector<double> seconds;
    for (int i = 0; i < samples; ++i) {
      std::memset(flush.data(), i, flush.size());
      const auto begin = std::chrono::steady_clock::now();
      enqueue();
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    return seconds;
  }
};

}  // namespace

const MemorySpace& host_memory() {
  static const HostMemory space;
  return space;
}

}  // namespace treemla
