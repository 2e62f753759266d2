#include "backend/cuda/cuda_memory.hpp"

#include <fmt/format.h>

#include "backend/cuda/cuda_check.hpp"
#include "backend/cuda/device_properties.hpp"

namespace treemla {
namespace {

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

struct Event {
  Event() { check_cuda(cudaEventCreate(&event), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t event = nullptr;
};

// What `enqueue` puts on the stream, as a graph.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& enqueue) {
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    try {
      enqueue();
    } catch (...) {  // a stream left capturing would fail every later call
      cudaStreamEndCapture(stream, &graph_);
      if (graph_) cudaGraphDestroy(graph_);
      throw;
    }
    check_cuda(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&exec_, graph_, 0), "cudaGraphInstantiate");
  }
  ~Graph() {
    if (exec_) cudaGraphExecDestroy(exec_);
    if (graph_) cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(cudaStream_t stream) const { check_cuda(cudaGraphLaunch(exec_, stream), "cudaGraphLaunch"); }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
};

class CudaMemory : public MemorySpace {
 public:
  void* allocate(std::size_t bytes) const override {
    void* p = nullptr;
    check_cuda(cudaMalloc(&p, bytes > 0 ? bytes : 1), fmt::format("cudaMalloc of {} bytes", bytes));
    return p;
  }
  void release(void* p) const noexcept override { cudaFree(p); }
  void upload(void* to, const void* from, std::size_t bytes, void* stream) const override {
    if (bytes > 0)
      check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_of(stream)),
                 fmt::format("uploading {} bytes", bytes));
  }
  void download(void* to, const void* from, std::size_t bytes, void* stream) const override {
    if (bytes > 0)
      check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_of(stream)),
                 fmt::format("downloading {} bytes", bytes));
  }
  void synchronize(void* stream) const override {
    check_cuda(cudaStreamSynchronize(stream_of(stream)), "cudaStreamSynchronize");
  }

  void* make_stream() const override {
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    return stream;
  }
  void release_stream(void* stream) const noexcept override { cudaStreamDestroy(stream_of(stream)); }

  std::vector<double> measure(void* stream, const std::function<void()>& enqueue, int samples,
                              bool cold) const override {
    const cudaStream_t s = stream_of(stream);
    const std::size_t flush_bytes =
        cold ? 4 * static_cast<std::size_t>(current_cuda_device().model.l2_bytes) : 0;
    const std::unique_ptr<void, void (*)(void*)> flush(flush_bytes > 0 ? allocate(flush_bytes) : nullptr,
                                                       [](void* p) {
                                                         if (p) cudaFree(p);
                                                       });
    const Graph graph(s, enqueue);
    graph.launch(s);
    // One pair of events a sample and no wait between: the device never idles, so its clock stays up.
    std::vector<std::pair<Event, Event>> events(static_cast<std::size_t>(samples));
    for (int i = 0; i < samples; ++i) {
      if (flush) check_cuda(cudaMemsetAsync(flush.get(), i, flush_bytes, s), "cudaMemsetAsync");
      check_cuda(cudaEventRecord(events[i].first.event, s), "cudaEventRecord");
      graph.launch(s);
      check_cuda(cudaEventRecord(events[i].second.event, s), "cudaEventRecord");
    }
    synchronize(stream);
    std::vector<double> seconds;
    for (const auto& [begin, end] : events) {
      float ms = 0;
      check_cuda(cudaEventElapsedTime(&ms, begin.event, end.event), "cudaEventElapsedTime");
      seconds.push_back(1e-3 * ms);
    }
    return seconds;
  }
};

}  // namespace

const MemorySpace& cuda_memory() {
  static const CudaMemory space;
  return space;
}

}  // namespace treemla
