#include "treemla/verify.hpp"

#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "backend/backend.hpp"
#include "core/lookup.hpp"
#include "treemla/error.hpp"

namespace treemla {
namespace {

void check_options(const RunOptions& o) {
  auto fail = [](const char* name, int value, const char* allowed) {
    throw Error(ErrorCode::kInvalidArgument, name, fmt::format("{} = {}: must be {}", name, value, allowed));
  };
  constexpr int kMaxThreads = 4096;
  if (o.num_threads < 0 || o.num_threads > kMaxThreads)
    fail("num_threads", o.num_threads, "0 (one a core) to 4096");
  if (o.split_keys < 0) fail("split_keys", o.split_keys, "0 (the backend's default) or more");
  if (o.split_keys > 0 && !o.batch_invariant)
    fail("split_keys", o.split_keys,
         "0 unless batch_invariant is set: balanced splits choose their own length");
}

// The parts of a problem that a plan was made for.
struct Planned {
  MlaShape shape;
  int b;
  int64_t total_q, q_token_stride, q_head_stride, num_pages, row_stride, max_q_len, max_kv_len;
  DType q_dtype, kv_dtype;
  KvLayout kv_layout;
  int page_size;
  Memory memory;
  bool reads_kv;  // check_problem() has seen to it that kv.data is there if any row is read
  explicit Planned(const VerifyProblem& p)
      : shape(p.shape),
        b(p.b),
        total_q(p.q.total_q),
        q_token_stride(treemla::q_token_stride(p)),
        q_head_stride(treemla::q_head_stride(p)),
        num_pages(p.kv.num_pages),
        row_stride(kv_row_stride(p)),
        max_q_len(p.max_q_len),
        max_kv_len(p.max_kv_len),
        q_dtype(p.q.dtype),
        kv_dtype(p.kv.dtype),
        kv_layout(p.kv.layout),
        page_size(p.kv.page_size),
        memory(p.memory),
        reads_kv(p.kv.data != nullptr) {}

  // Throws for the first field in which `p` differs.
  void check_same(const VerifyProblem& p) const {
    const Planned n(p);
    auto same = [](const char* name, auto now, auto planned) {
      if (now != planned)
        throw Error(ErrorCode::kInvalidArgument, name,
                    fmt::format("{} = {} differs from the planned {}: plan again", name, now, planned));
    };
    same("shape.h_q", n.shape.h_q, shape.h_q);
    same("shape.d_v", n.shape.d_v, shape.d_v);
    same("shape.d_rope", n.shape.d_rope, shape.d_rope);
    same("b", n.b, b);
    same("q.total_q", n.total_q, total_q);
    same("q.dtype", dtype_name(n.q_dtype), dtype_name(q_dtype));
    same("q.token_stride", n.q_token_stride, q_token_stride);
    same("q.head_stride", n.q_head_stride, q_head_stride);
    same("kv.dtype", dtype_name(n.kv_dtype), dtype_name(kv_dtype));
    same("kv.layout", static_cast<int>(n.kv_layout), static_cast<int>(kv_layout));
    same("kv.num_pages", n.num_pages, num_pages);
    same("kv.page_size", n.page_size, page_size);
    same("kv.row_stride", n.row_stride, row_stride);
    same("max_q_len", n.max_q_len, max_q_len);
    same("max_kv_len", n.max_kv_len, max_kv_len);
    same("memory", static_cast<int>(n.memory), static_cast<int>(memory));
  }
};

// A layer's own q and kv: the only pointers of a problem that run() follows besides the output.
void check_layer(const char* name, const void* data, DType dtype, bool is_read) {
  if (is_read && !data) throw Error(ErrorCode::kInvalidArgument, name, fmt::format("{} is null", name));
  if (reinterpret_cast<std::uintptr_t>(data) % dtype_alignment(dtype) != 0)
    throw Error(ErrorCode::kInvalidArgument, name,
                fmt::format("{} = {} must be aligned to {} bytes", name, data, dtype_alignment(dtype)));
}

void check_layer_scale(const char* name, double scale) {
  if (!(scale > 0) || !std::isfinite(scale))
    throw Error(ErrorCode::kInvalidArgument, name,
                fmt::format("{} = {} must be finite and above 0", name, scale));
}

struct Release {
  const MemorySpace* space = nullptr;
  void operator()(void* p) const { space->release(p); }
};

}  // namespace

struct Verifier::Impl {
  RunOptions options;
  const Backend* backend = nullptr;
  std::string backend_name;
  std::unique_ptr<BackendPlan> plan;
  std::optional<Planned> planned;
  std::unique_ptr<void, Release> workspace;
  std::size_t workspace_bytes = 0;

  // Keeps what is there when it is large enough: planning again may happen inside a graph capture.
  void reserve(const MemorySpace& space, std::size_t bytes) {
    if (workspace && workspace.get_deleter().space == &space && bytes <= workspace_bytes) return;
    workspace.reset();
    workspace_bytes = 0;
    try {
      workspace = {space.allocate(bytes), Release{&space}};
    } catch (const Error& e) {
      if (e.code() != ErrorCode::kOutOfMemory) throw;
      throw Error(ErrorCode::kOutOfMemory, "workspace",
                  fmt::format("no memory for a workspace of {} bytes: {}", bytes, e.what()));
    }
    workspace_bytes = bytes;
  }
};

Verifier::Verifier(RunOptions options) : impl_(std::make_unique<Impl>()) {
  check_options(options);
  impl_->options = std::move(options);
}
Verifier::~Verifier() = default;
Verifier::Verifier(Verifier&&) noexcept = default;
Verifier& Verifier::operator=(Verifier&&) noexcept = default;

void Verifier::plan(const VerifyProblem& problem) {
  // A failed plan leaves none behind: run() must not use half of an old one.
  impl_->planned.reset();
  impl_->plan.reset();
  impl_->backend_name.clear();
  check_problem(problem);
  const Backend& backend = choose_backend(problem, impl_->options.backend);
  impl_->plan = backend.plan(problem, impl_->options);
  impl_->reserve(backend.space(), impl_->plan->workspace_bytes());
  impl_->backend = &backend;
  backend.prepare(*impl_->plan, problem, impl_->workspace.get(), impl_->options);
  impl_->backend_name = backend.name();
  impl_->planned.emplace(problem);
}

void Verifier::update(const VerifyProblem& problem) {
  if (!impl_->planned)
    throw Error(ErrorCode::kInvalidArgument, "problem", "update() needs a plan: call plan() first");
  if (problem.memory == Memory::kHost) return plan(problem);
  impl_->planned->check_same(problem);
  check_problem(problem);
  impl_->backend->prepare(*impl_->plan, problem, impl_->workspace.get(), impl_->options);
}

void Verifier::set_stream(void* stream) { impl_->options.stream = stream; }

void Verifier::check_device() const {
  if (impl_->planned) impl_->backend->check_prepared(*impl_->plan, impl_->workspace.get(), impl_->options);
}

void Verifier::run(const VerifyProblem& problem, const VerifyOutput& output) {
  if (!impl_->planned)
    throw Error(ErrorCode::kInvalidArgument, "problem", "run() needs a plan: call plan() first");
  impl_->planned->check_same(problem);
  check_layer("q.data", problem.q.data, problem.q.dtype, problem.q.total_q > 0);
  check_layer("kv.data", problem.kv.data, problem.kv.dtype, impl_->planned->reads_kv);
  check_layer_scale("sm_scale", problem.sm_scale);
  check_layer_scale("kv.scale", problem.kv.scale);
  check_output(problem, output);
  impl_->backend->run(*impl_->plan, problem, output, impl_->workspace.get(), impl_->options);
}

const std::string& Verifier::backend() const { return impl_->backend_name; }
std::size_t Verifier::workspace_bytes() const { return impl_->plan ? impl_->plan->workspace_bytes() : 0; }
std::string Verifier::describe() const {
  return impl_->plan ? fmt::format("backend      {}\n", impl_->backend_name) + impl_->plan->describe()
                     : "no plan yet\n";
}

void check_device_problem(const VerifyProblem& problem, void* stream) {
  check_problem(problem);
  if (problem.memory == Memory::kHost) return;  // all of it was seen
  std::string reason = "this build has no device backend";
  for (const Backend* b : backends()) {
    if (b->memory() != problem.memory) continue;
    const Support s = b->available();
    if (s.ok) return b->check_contents(problem, stream);
    reason = s.reason;
  }
  throw Error(ErrorCode::kUnsupported, "memory", "memory = device can't be checked: " + reason);
}

void verify(const VerifyProblem& problem, const VerifyOutput& output, const RunOptions& options) {
  Verifier v(options);
  v.plan(problem);
  v.run(problem, output);
}

}  // namespace treemla
