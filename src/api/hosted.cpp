#include "api/hosted.hpp"

#include <algorithm>

#include "core/lookup.hpp"

namespace treemla {
namespace {

// What the copies of a host problem's arrays are bounded by: a device backend can't see the lengths.
void set_bounds(VerifyProblem& p, const VerifyProblem& host) {
  int64_t max_q_len = 0, max_kv_len = 0;
  for (int r = 0; r < host.b; ++r) {
    max_q_len = std::max<int64_t>(max_q_len, host.q_indptr[r + 1] - host.q_indptr[r]);
    max_kv_len = std::max<int64_t>(max_kv_len, host.kv_len[r]);
  }
  if (p.max_q_len == 0) p.max_q_len = max_q_len;
  if (p.max_kv_len == 0) p.max_kv_len = max_kv_len;
}

// The arrays of a problem with their sizes in bytes; a strided tensor up to its last element.
template <class Visit>
void each_array(VerifyProblem& p, bool tensors, const Visit& visit) {
  const auto b = static_cast<std::size_t>(p.b), total_q = static_cast<std::size_t>(p.q.total_q);
  if (tensors) {
    const int64_t rows = p.kv.num_pages * p.kv.page_size;
    visit(p.q.data, p.q.total_q == 0
                        ? 0
                        : static_cast<std::size_t>((p.q.total_q - 1) * q_token_stride(p) +
                                                   (p.shape.h_q - 1) * q_head_stride(p) + p.shape.d_qk()) *
                              dtype_bytes(p.q.dtype));
    visit(p.kv.data, rows == 0 ? 0
                               : static_cast<std::size_t>((rows - 1) * kv_row_stride(p) +
                                                          kv_row_elements(p.shape, p.kv.dtype)) *
                                     dtype_bytes(p.kv.dtype));
  }
  visit(p.pages.entries,
        static_cast<std::size_t>(p.pages.num_entries) * (p.pages.index_type == IndexType::kI32 ? 4 : 8));
  visit(p.pages.indptr, (b + 1) * sizeof(int32_t));
  visit(p.q_indptr, (b + 1) * sizeof(int32_t));
  visit(p.kv_len, b * sizeof(int32_t));
  visit(p.mask.parents, total_q * sizeof(int32_t));
  visit(p.mask.ancestor_bits, total_q * static_cast<std::size_t>(p.mask.words_per_row) * sizeof(uint32_t));
}

}  // namespace

template <class T>
void HostedProblem::place(const T*& pointer, std::size_t bytes) {
  if (pointer == nullptr) return;
  const MemorySpace& space = backend_.space();
  blocks_.emplace_back(space.allocate(bytes), Release{&space});
  space.upload(blocks_.back().get(), pointer, bytes, nullptr);
  pointer = static_cast<const T*>(blocks_.back().get());
}

HostedProblem::HostedProblem(const Backend& backend, const VerifyProblem& host)
    : backend_(backend), problem_(host) {
  if (backend.memory() == Memory::kHost) return;
  set_bounds(problem_, host);
  each_array(problem_, true, [&](auto& pointer, std::size_t bytes) { place(pointer, bytes); });
  problem_.memory = backend.memory();
  backend.space().synchronize(nullptr);
}

void HostedProblem::refresh(const VerifyProblem& host, void* stream) {
  if (backend_.memory() == Memory::kHost) {
    const auto q = problem_.q.data;
    const auto kv = problem_.kv.data;
    problem_ = host;
    problem_.q.data = q;
    problem_.kv.data = kv;
    return;
  }
  VerifyProblem from = host;
  std::vector<const void*> sources;
  std::vector<std::size_t> sizes;
  each_array(from, false, [&](auto& pointer, std::size_t bytes) {
    sources.push_back(pointer);
    sizes.push_back(bytes);
  });
  std::size_t i = 0;
  each_array(problem_, false, [&](auto& pointer, std::size_t) {
    if (pointer != nullptr)
      backend_.space().upload(const_cast<void*>(static_cast<const void*>(pointer)), sources[i], sizes[i],
                              stream);
    ++i;
  });
  backend_.space().synchronize(stream);
}

HostedOutput::HostedOutput(const Backend& backend, const VerifyProblem& p, const VerifyOutput& host)
    : backend_(backend), host_(host), output_(host) {
  const auto rows = static_cast<std::size_t>(p.q.total_q * p.shape.h_q);
  out_bytes_ = rows * static_cast<std::size_t>(p.shape.d_v) * dtype_bytes(host.out_dtype);
  lse_bytes_ = host.lse ? rows * sizeof(float) : 0;
  if (backend.memory() == Memory::kHost) return;
  const MemorySpace& space = backend.space();
  const auto release = [&space](void* q) { space.release(q); };
  out_ = {space.allocate(out_bytes_), release};
  output_.out = out_.get();
  if (host.lse) {
    lse_ = {space.allocate(lse_bytes_), release};
    output_.lse = static_cast<float*>(lse_.get());
  }
  fill();
  space.synchronize(nullptr);
}

void HostedOutput::fill(void* stream) {
  if (out_) backend_.space().upload(out_.get(), host_.out, out_bytes_, stream);
  if (lse_) backend_.space().upload(lse_.get(), host_.lse, lse_bytes_, stream);
}

void HostedOutput::fetch(void* stream) {
  if (out_) backend_.space().download(host_.out, out_.get(), out_bytes_, stream);
  if (lse_) backend_.space().download(host_.lse, lse_.get(), lse_bytes_, stream);
  backend_.space().synchronize(stream);
}

void verify_hosted(const VerifyProblem& host, const VerifyOutput& output, const RunOptions& options) {
  check_problem(host);
  check_output(host, output);
  const Backend* backend = find_backend(options.backend);
  if (!backend || backend->memory() == Memory::kHost)
    return verify(host, output, options);  // "best", or an unknown name's error
  if (const Support s = backend->available(); !s.ok)
    return verify(host, output, options);  // throws with the reason
  HostedProblem there(*backend, host);
  HostedOutput out(*backend, host, output);
  Verifier verifier(options);
  verifier.plan(there.problem());
  verifier.run(there.problem(), out.output());
  verifier.check_device();
  out.fetch(options.stream);
}

std::string why_unsupported_hosted(const std::string& backend, const VerifyProblem& host) {
  VerifyProblem p = host;
  if (const Backend* b = find_backend(backend); b && b->memory() != p.memory) {
    set_bounds(p, host);
    p.memory = b->memory();
    // Allocations of a device are aligned; where the host's arrays lie means nothing there.
    p.q.data = p.kv.data = nullptr;
  }
  return why_unsupported(backend, p);
}

}  // namespace treemla
