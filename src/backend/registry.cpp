#include <fmt/format.h>

#include "backend/backend.hpp"
#include "backend/cpu/cpu_backends.hpp"
#ifdef TREEMLA_HAS_CUDA
#include "backend/cuda/cuda_backends.hpp"
#endif
#include "treemla/error.hpp"

namespace treemla {

const std::vector<const Backend*>& backends() {
  static const std::vector<const Backend*> all = {
#ifdef TREEMLA_HAS_CUDA
      &cuda_wgmma_backend(),
      &cuda_mma_backend(),
      &cuda_fp32_tiled_backend(),
      &cuda_warp_per_key_backend(),
      &cuda_warp_per_key_scalar_backend(),
      &cuda_head_tile_backend(),
      &cuda_naive_backend(),
#endif
      &cpu_simd_backend(),
      &cpu_oracle_backend()};
  return all;
}

const Backend* find_backend(std::string_view name) {
  for (const Backend* b : backends())
    if (b->name() == name) return b;
  return nullptr;
}

namespace {

std::string why_not(const Backend& b, const VerifyProblem& problem) {
  if (b.memory() != problem.memory)
    return b.memory() == Memory::kHost ? "takes tensors in host memory" : "takes tensors in device memory";
  if (const Support s = b.available(); !s.ok) return s.reason;
  if (const Support s = b.supports(problem); !s.ok) return s.reason;
  return "";
}

}  // namespace

std::string why_unsupported(const std::string& backend, const VerifyProblem& problem) {
  const Backend* b = find_backend(backend);
  if (!b) {
    std::string names;
    for (const Backend* known : backends())
      names += fmt::format("{}{}", names.empty() ? "" : ", ", known->name());
    throw Error(ErrorCode::kInvalidArgument, "backend",
                fmt::format("backend = \"{}\" does not exist: use best, {}", backend, names));
  }
  return why_not(*b, problem);
}

const Backend& choose_backend(const VerifyProblem& problem, const std::string& name) {
  if (name != "best") {
    const std::string reason = why_unsupported(name, problem);
    if (!reason.empty())
      throw Error(ErrorCode::kUnsupported, "backend",
                  fmt::format("backend {} can't run this: {}", name, reason));
    return *find_backend(name);
  }
  std::string reasons;
  const Backend* second_best = nullptr;
  for (const Backend* b : backends()) {
    const std::string reason = why_not(*b, problem);
    if (reason.empty() && b->prefers(problem)) return *b;
    if (reason.empty() && !second_best) second_best = b;
    if (!reason.empty()) reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", b->name(), reason);
  }
  if (second_best) return *second_best;
  throw Error(ErrorCode::kUnsupported, "backend", "no backend can run this: " + reasons);
}

std::vector<BackendInfo> list_backends() {
  std::vector<BackendInfo> list;
  for (const Backend* b : backends()) {
    const Support s = b->available();
    list.push_back({std::string(b->name()), b->memory(), s.ok, s.reason});
  }
  return list;
}

}  // namespace treemla
