// treemla gen: random cases with expected values from the float64 oracle.

#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string>
#include <system_error>

#include "api/expected.hpp"
#include "commands.hpp"
#include "core/generate.hpp"
#include "host.hpp"
#include "options.hpp"
#include "output.hpp"
#include "progress.hpp"
#include "text.hpp"
#include "treemla/treemla.hpp"

namespace treemla::cli {
namespace {

struct GenOptions {
  int64_t h_q = 64, prefix = 1024, budget = 8, page_size = 1, d_v = 512, d_rope = 64, seed = 1;
  std::string tree = "random", mask = "tree", dtype = "bf16", kv_dtype, out;
  double gain = 4, sm_scale = 0.1447, kv_scale = 1;
  std::vector<RequestSpec> requests;
  bool no_expected = false, force = false;
};

CaseSpec to_spec(const GenOptions& o) {
  CaseSpec spec;
  spec.requests = o.requests;
  if (spec.requests.empty()) spec.requests = {{o.prefix, static_cast<int>(o.budget + 1)}};
  spec.shape = {static_cast<int>(o.h_q), static_cast<int>(o.d_v), static_cast<int>(o.d_rope)};
  spec.tree = parse_tree_kind(o.tree);
  spec.mask = parse_mask(o.mask);
  spec.q_dtype = parse_dtype(o.dtype);
  spec.kv_dtype = o.kv_dtype.empty() ? spec.q_dtype : parse_dtype(o.kv_dtype);
  spec.page_size = static_cast<int>(o.page_size);
  spec.sm_scale = o.sm_scale;
  spec.gain = o.gain;
  spec.kv_scale = o.kv_scale;
  spec.seed = static_cast<uint64_t>(o.seed);
  return spec;
}

// Estimated before anything is allocated, since asking the system for too much may end in a kill instead of
// an error. Tensors exist twice while a case is built and once more while it is written.
void check_memory(const CaseSpec& spec) {
  const double d_qk = spec.shape.d_qk(), h_q = spec.shape.h_q, page_size = spec.page_size,
               row = kv_row_elements(spec.shape, spec.kv_dtype);
  double pages = 1, nodes = 0;
  for (const RequestSpec& r : spec.requests) {
    pages += 1.125 * static_cast<double>((r.prefix_len + r.q_len + spec.page_size - 1) / spec.page_size);
    nodes += r.q_len;
  }
  const double bytes =
      3 * (pages * page_size * row * static_cast<double>(dtype_bytes(spec.kv_dtype)) +
           nodes * h_q * (d_qk * static_cast<double>(dtype_bytes(spec.q_dtype)) + 4 * spec.shape.d_v));
  const auto available = static_cast<double>(memory_available_bytes());
  if (bytes > available) {
    throw Error(ErrorCode::kOutOfMemory, "requests",
                fmt::format("the case needs about {} of memory, {} available: ask for a smaller one",
                            bytes_text(bytes), bytes_text(available)));
  }
}

int run_gen(const GenOptions& o) {
  std::error_code error;
  if (!o.force && std::filesystem::exists(std::filesystem::symlink_status(o.out, error))) {
    complain(fmt::format("--out {}: exists already; --force overwrites it", o.out));
    return kUnusable;
  }
  const CaseSpec spec = to_spec(o);
  check_memory(spec);

  Progress progress;
  progress.show(0, "drawing the case");
  Case c = generate_case(spec);
  if (!o.no_expected) {
    progress.show(0.1, "computing expected values in float64");
    add_expected(c);
  }
  progress.show(0.9, "writing");
  write_case(c, o.out);
  progress.clear();
  print(fmt::format("wrote {}, {}{}: {}\n", o.out,
                    bytes_text(static_cast<double>(std::filesystem::file_size(o.out, error))),
                    o.no_expected ? ", without expected values" : "", describe(spec)));
  return kSuccess;
}

}  // namespace

Run add_gen(CLI::App& app) {
  auto o = std::make_shared<GenOptions>();
  CLI::App* cmd = app.add_subcommand("gen", "Generate a random case with expected values");
  add_file(*cmd, "--out", o->out, "the .kdtr file to write")->required();
  cmd->add_flag("--force", o->force, "overwrite FILE");
  add_int(*cmd, "--h_q", o->h_q, 1, kMaxHeads, "query heads");
  CLI::Option* prefix = add_int(*cmd, "--prefix", o->prefix, 0, kMaxPrefix, "cached tokens before the tree");
  CLI::Option* budget =
      add_int(*cmd, "--budget", o->budget, 0, kMaxNodes - 1, "draft nodes besides the root");
  CLI::Option* requests = add_requests(*cmd, o->requests);
  add_tree(*cmd, o->tree);
  add_mask(*cmd, o->mask);
  add_choice(*cmd, "--dtype", o->dtype, query_dtypes(), "of the queries");
  add_choice(*cmd, "--kv_dtype", o->kv_dtype, cache_dtypes(), "of the cache, by default as --dtype");
  add_int(*cmd, "--page_size", o->page_size, 1, kMaxPageSize, "tokens a page");
  add_int(*cmd, "--d_v", o->d_v, 1, 4096, "latent width");
  add_int(*cmd, "--d_rope", o->d_rope, 0, 4096, "rope width");
  add_real(*cmd, "--sm_scale", o->sm_scale, 1e-6, 1e6, "factor of the scores");
  add_real(*cmd, "--kv_scale", o->kv_scale, 1e-6, 1e6, "real cache row = stored row * this (FP8, q8_0)");
  add_real(*cmd, "--gain", o->gain, 0, 1e6,
           "standard deviation of the scores; small = near-uniform attention");
  add_int(*cmd, "--seed", o->seed, 0, INT64_MAX, "the same seed gives the same file");
  cmd->add_flag("--no-expected", o->no_expected,
                "leave the expected values out (`treemla verify` computes them)");
  cmd->footer(footer({"treemla gen --h_q 8 --prefix 300 --budget 8 --tree ddtree --out case.kdtr",
                      "treemla gen --requests 300:9,63:1 --page_size 64 --kv_dtype e4m3 --out ragged.kdtr"},
                     ""));
  return [o, requests, prefix, budget] {
    check_excludes(requests, {prefix, budget});
    return run_gen(*o);
  };
}

}  // namespace treemla::cli
