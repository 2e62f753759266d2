// treemla plan: what a device would do with a shape. Pure arithmetic: the device need not be there.

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "commands.hpp"
#include "core/generate.hpp"
#include "core/host_device.hpp"
#include "core/kv_row.hpp"
#include "cpu_ceilings.hpp"
#include "host.hpp"
#include "options.hpp"
#include "output.hpp"
#include "plan/cost.hpp"
#include "plan/device_model.hpp"
#include "plan/split_plan.hpp"
#include "plan/tiles.hpp"
#include "progress.hpp"
#include "table.hpp"
#include "text.hpp"
#include "treemla/treemla.hpp"

namespace treemla::cli {
namespace {

struct PlanOptions {
  std::string arch, dtype = "bf16", kv_dtype;
  int64_t b = 1, s_q = 9, h_q = 64, prefix = 4096, d_v = 512, d_rope = 64;
  std::vector<RequestSpec> requests;
  int64_t workers = 0, rows_per_tile = 64, keys_per_tile = 64, split_keys = 4096, items = 0;
  bool batch_invariant = false, measure = false, grid = false;
};

struct Batch {
  std::vector<int32_t> q_len, kv_len;
  int max_rows = 0;
  int64_t max_keys = 0;
};

Batch make_batch(const PlanOptions& o) {
  Batch batch;
  std::vector<RequestSpec> requests = o.requests;
  if (requests.empty()) requests.assign(static_cast<std::size_t>(o.b), {o.prefix, static_cast<int>(o.s_q)});
  for (const RequestSpec& r : requests) {
    batch.q_len.push_back(r.q_len);
    batch.kv_len.push_back(static_cast<int32_t>(r.prefix_len + r.q_len));
    batch.max_keys = std::max<int64_t>(batch.max_keys, batch.kv_len.back());
    batch.max_rows = std::max(batch.max_rows, static_cast<int>(r.q_len * o.h_q));
  }
  return batch;
}

DeviceModel device_of(const PlanOptions& o) {
  DeviceModel device = find_device_model(o.arch);
  if (device.arch != "cpu") {
    if (o.measure)
      throw Error(ErrorCode::kInvalidArgument, "measure", "--measure: works with --arch cpu only");
    return device;
  }
  device.num_sms = num_cores();
  device.l2_bytes = last_level_cache_bytes();
  if (o.measure) {
    Progress progress;
    progress.show(0, "measuring the ceilings");
    const CpuCeilings c = measure_cpu_ceilings(o.workers > 0 ? static_cast<int>(o.workers) : device.num_sms);
    device.fp32_flops = c.fma_flops_per_s;
    device.mem_bytes_per_s = c.read_bytes_per_s;
    device.provenance = "measured now on this machine";
  } else {
    device.provenance = "cores and cache of this machine; --measure fills in the rates";
  }
  return device;
}

// Blocks of a kernel that fit on an SM, and what limits them.
struct Occupancy {
  int blocks = 0;
  const char* limit = "";
};

Occupancy occupancy(const DeviceModel& d, const KernelModel& k) {
  Occupancy o{d.max_blocks_per_sm, "block slots"};
  const auto limit = [&](int blocks, const char* what) {
    if (blocks < o.blocks) o = {blocks, what};
  };
  limit(d.smem_per_sm_bytes / std::max(1, k.smem_per_block_bytes + d.smem_reserved_per_block_bytes),
        "shared memory");
  limit(d.max_threads_per_sm / std::max(1, k.threads_per_block), "threads");
  if (k.regs_per_thread > 0) limit(d.regs_per_sm / (k.regs_per_thread * k.threads_per_block), "registers");
  return o;
}

// The tile asked for, with the costs that only say "rows times keys".
KernelModel generic_kernel(const PlanOptions& o, int max_rows) {
  KernelModel k;
  k.tile.rows_per_tile = static_cast<int>(std::clamp<int64_t>(max_rows, 1, o.rows_per_tile));
  k.tile.keys_per_tile = static_cast<int>(o.keys_per_tile);
  k.tile.pair_cost = k.tile.rows_per_tile;  // queries in and output out: about one key tile
  k.tensor_cores = o.dtype != "fp32";
  return k;
}

// How often the row tiles of a request load its cache, on average over cached rows.
double loads_per_row(const SplitParams& params, const Batch& batch) {
  double loads = 0, rows = 0;
  for (std::size_t r = 0; r < batch.q_len.size(); ++r) {
    const int row_tiles = request_cost(params, batch.q_len[r], batch.kv_len[r]).row_tiles;
    loads += double{1} * row_tiles * batch.kv_len[r];
    rows += row_tiles > 0 ? batch.kv_len[r] : 0;
  }
  return rows > 0 ? loads / rows : 0;
}

// A plan is spelled out item by item: refuse what would not fit in memory.
void check_size(const SplitParams& params, const Batch& batch) {
  constexpr double kMaxItems = 2e7;
  double items = params.num_workers;
  for (std::size_t r = 0; r < batch.q_len.size(); ++r) {
    const RequestCost c = request_cost(params, batch.q_len[r], batch.kv_len[r]);
    items += double{1} * c.row_tiles * (params.fixed_tiles > 0 ? c.units : 1);
  }
  if (items > kMaxItems) {
    throw Error(ErrorCode::kInvalidArgument, "items",
                fmt::format("this batch has about {:.2g} work items: at most {:.2g} can be planned here",
                            items, kMaxItems));
  }
}

// A kernel's share of the work, and the least time that it allows.
struct KernelPlan {
  SplitPlan plan;
  SplitParams params;
  Occupancy occupancy;
  Floor floor;
  double seconds = 0;  // floor / balance + launch; 0: the device's rates are unknown
};

KernelPlan plan_kernel(const PlanOptions& o, const DeviceModel& device, const Batch& batch,
                       const KernelModel& kernel, const Work& work) {
  KernelPlan k;
  int workers = device.num_sms;
  if (!kernel.backend.empty() && device.arch != "cpu") {
    k.occupancy = occupancy(device, kernel);
    workers *= std::max(1, k.occupancy.blocks);
  }
  workers /= kernel.cluster;
  if (o.workers > 0) workers = static_cast<int>(o.workers);
  k.params.tile = clustered(kernel.tile, kernel.cluster);
  k.params.h_q = static_cast<int>(o.h_q);
  k.params.num_workers = workers;
  if (o.batch_invariant)
    k.params.fixed_tiles = static_cast<int>(ceil_div<int64_t>(o.split_keys, kernel.tile.keys_per_tile));
  check_size(k.params, batch);
  k.plan = make_split_plan(k.params, batch.q_len, batch.kv_len);
  k.floor = floor_time(work, device, kernel.tensor_cores);
  if (k.floor.seconds() > 0) k.seconds = k.floor.seconds() / k.plan.balance() + device.launch_us * 1e-6;
  return k;
}

// Everything of one kernel.
std::string describe_kernel(const PlanOptions& o, const DeviceModel& device, const Batch& batch,
                            const KernelModel& kernel, const Work& work) {
  const bool is_gpu = device.arch != "cpu";
  const KernelPlan k = plan_kernel(o, device, batch, kernel, work);
  const int workers = k.params.num_workers;
  std::string s;
  if (kernel.backend.empty()) {
    s += fmt::format(
        "kernel       none{} for {} in this build: this is a plan for a tile of {} x {} (--rows_per_tile,\n"
        "             --keys_per_tile), one worker a SM, and not for a kernel that exists here\n",
        kernel.tensor_cores ? " with tensor cores" : "", device.arch, o.rows_per_tile, o.keys_per_tile);
  } else {
    s += fmt::format("kernel       {}\n", kernel.backend);
    if (is_gpu)
      s += fmt::format(
          "block        {} threads, {} registers a thread, {} shared memory; {} a SM ({:.0f}% of its "
          "threads), limited by {}\n",
          kernel.threads_per_block, kernel.regs_per_thread, bytes_text(kernel.smem_per_block_bytes),
          k.occupancy.blocks,
          100.0 * k.occupancy.blocks * kernel.threads_per_block / device.max_threads_per_sm,
          k.occupancy.limit);
  }
  s += describe(k.plan);
  s += fmt::format("loads        every cached row {:.1f} times, once a row tile\n",
                   loads_per_row(k.params, batch));
  if (is_gpu)
    s += fmt::format("waves        {:.2f} of {} workers\n",
                     static_cast<double>(k.plan.busy_workers()) / workers, workers);

  if (k.seconds == 0) {
    s += "predicted    unknown: this device's rates are\n";
  } else {
    s += fmt::format("floor        memory {}, {} {}: {}-bound\n", time_text(k.floor.memory_s),
                     kernel.tensor_cores ? "bf16 matrix" : "float32 FMA", time_text(k.floor.compute_s),
                     k.floor.bound());
    s += fmt::format("predicted    {} = floor / balance{}\n", time_text(k.seconds),
                     device.launch_us > 0 ? " + launch" : "");
    s += "             the least that this split allows: latency, padded rows, repeated loads and partials "
         "are left out\n";
  }
  if (o.items > 0) s += "\n" + list_items(k.plan, static_cast<int>(o.items));
  return s;
}

// A shape: its work, and the kernels that this build has for it.
struct Shape {
  Batch batch;
  Work work;
  std::vector<KernelModel> kernels;
};

Shape make_shape(const PlanOptions& o, const DeviceModel& device) {
  const MlaShape shape{static_cast<int>(o.h_q), static_cast<int>(o.d_v), static_cast<int>(o.d_rope)};
  const DType q_dtype = parse_dtype(o.dtype),
              kv_dtype = o.kv_dtype.empty() ? q_dtype : parse_dtype(o.kv_dtype);
  check_kv_widths(shape, kv_dtype);
  Shape x;
  x.batch = make_batch(o);
  x.work = count_work(shape, x.batch.q_len, x.batch.kv_len, q_dtype, kv_dtype, q_dtype);
  x.kernels = kernel_models(device, shape, kv_dtype, static_cast<int>(x.batch.q_len.size()), x.batch.max_rows,
                            x.batch.max_keys, o.batch_invariant);
  // 16-bit caches deserve tensor cores: what those could do is shown even where no kernel uses them.
  const bool wants_tensor_cores = device.arch != "cpu" && o.dtype != "fp32";
  const bool has_tensor_cores =
      std::any_of(x.kernels.begin(), x.kernels.end(), [](const KernelModel& k) { return k.tensor_cores; });
  if (x.kernels.empty() || (wants_tensor_cores && !has_tensor_cores))
    x.kernels.push_back(generic_kernel(o, x.batch.max_rows));
  return x;
}

// The shapes that other libraries were measured on, a line each: by the first kernel on tensor cores, as calls choose, and if there is none
// by the one that allows the least time.
int plan_grid(PlanOptions o) {
  const DeviceModel device = device_of(o);
  print(describe(device) + "\n");
  const Table table({{"b", Align::kRight, 3},
                     {"s_q"},
                     {"h_q"},
                     {"prefix"},
                     {"kernel", Align::kLeft, 16},
                     {"tile", Align::kRight, 8},
                     {"workers"},
                     {"memory", Align::kRight, 8},
                     {"compute", Align::kRight, 8},
                     {"bound", Align::kLeft, 7},
                     {"predicted"},
                     {"of floor"}});
  print(table.header());
  for (const int64_t b : {1, 8})
    for (const int64_t s_q : {1, 9, 33})
      for (const int64_t h_q : {8, 16, 64, 128})
        for (const int64_t prefix : {256, 1024, 4096, 16384, 65536}) {
          if (reader_gone()) return kSuccess;
          o.b = b, o.s_q = s_q, o.h_q = h_q, o.prefix = prefix;
          const Shape x = make_shape(o, device);
          KernelPlan best;
          const KernelModel* kernel = nullptr;
          for (const KernelModel& k : x.kernels) {
            KernelPlan plan = plan_kernel(o, device, x.batch, k, x.work);
            if (kernel != nullptr &&
                (kernel->tensor_cores || (!k.tensor_cores && plan.seconds >= best.seconds)))
              continue;
            best = std::move(plan);
            kernel = &k;
          }
          const bool known = best.seconds > 0;
          const auto time = [&](double seconds) { return known ? time_text(seconds) : std::string("-"); };
          print(table.line({fmt::format("{}", b), fmt::format("{}", s_q), fmt::format("{}", h_q),
                            fmt::format("{}", prefix), kernel->backend.empty() ? "-" : kernel->backend,
                            fmt::format("{} x {}", kernel->tile.rows_per_tile, kernel->tile.keys_per_tile),
                            fmt::format("{}", best.params.num_workers), time(best.floor.memory_s),
                            time(best.floor.compute_s), known ? best.floor.bound() : "-", time(best.seconds),
                            known ? percent_text(best.floor.seconds() / best.seconds) : "-"}));
        }
  print(
      "\npredicted: floor / balance of the split + launch, the least that it allows; latency, padded rows, "
      "repeated loads and "
      "partials are left out\n");
  return kSuccess;
}

int run_plan(const PlanOptions& o) {
  const DeviceModel device = device_of(o);
  const Shape x = make_shape(o, device);
  const DType q_dtype = parse_dtype(o.dtype),
              kv_dtype = o.kv_dtype.empty() ? q_dtype : parse_dtype(o.kv_dtype);
  const std::size_t b = x.batch.q_len.size();
  std::string s = describe(device) + "\n";
  s += fmt::format("problem      {} request{}, h_q {}, d_v {}, d_rope {}, q {}, cache {}\n", b,
                   b == 1 ? "" : "s", o.h_q, o.d_v, o.d_rope, dtype_name(q_dtype), dtype_name(kv_dtype));
  s += fmt::format("work         {}, {} of cache once, {} of q, out and lse: {:.0f} FLOP/byte\n\n",
                   metric_text(x.work.flops, "FLOP"), metric_text(x.work.kv_bytes, "B"),
                   metric_text(x.work.io_bytes, "B"), x.work.bytes() > 0 ? x.work.flops / x.work.bytes() : 0);
  for (std::size_t i = 0; i < x.kernels.size(); ++i) {
    if (i > 0) s += "\n";
    s += describe_kernel(o, device, x.batch, x.kernels[i], x.work);
  }
  print(s);
  return kSuccess;
}

std::vector<std::string> arch_names() {
  std::vector<std::string> names;
  for (const DeviceModel& m : device_models()) names.push_back(m.name);
  return names;
}

}  // namespace

Run add_plan(CLI::App& app) {
  auto o = std::make_shared<PlanOptions>();
  CLI::App* cmd = app.add_subcommand("plan", "Show how a device would split a shape, and its floor");
  cmd->add_option("--arch", o->arch, fmt::format("{}, or sm_90, sm_120, ...", fmt::join(arch_names(), ", ")))
      ->required()
      ->type_name("NAME");
  CLI::Option* b = add_int(*cmd, "--b", o->b, 1, kMaxRequests, "requests");
  CLI::Option* s_q = add_int(*cmd, "--s_q", o->s_q, 0, kMaxNodes, "tree nodes of each, root included");
  CLI::Option* prefix = add_int(*cmd, "--prefix", o->prefix, 0, kMaxPrefix, "cached tokens before the tree");
  CLI::Option* requests = add_requests(*cmd, o->requests);
  CLI::Option* h_q = add_int(*cmd, "--h_q", o->h_q, 1, kMaxHeads, "query heads");
  add_int(*cmd, "--d_v", o->d_v, 1, 4096, "latent width");
  add_int(*cmd, "--d_rope", o->d_rope, 0, 4096, "rope width");
  add_choice(*cmd, "--dtype", o->dtype, query_dtypes(), "of queries and outputs");
  add_choice(*cmd, "--kv_dtype", o->kv_dtype, cache_dtypes(), "of the cache, by default as --dtype");
  add_int(*cmd, "--workers", o->workers, 0, 1 << 20, "CTAs or threads; 0 is what the device holds at once");
  cmd->add_flag("--batch_invariant", o->batch_invariant, "splits at absolute key positions");
  add_int(*cmd, "--split_keys", o->split_keys, 1, kMaxPrefix, "keys a batch-invariant split");
  add_int(*cmd, "--rows_per_tile", o->rows_per_tile, 1, 4096,
          "where this build has no kernel for the device");
  add_int(*cmd, "--keys_per_tile", o->keys_per_tile, 1, 4096, "the same");
  CLI::Option* items = add_int(*cmd, "--items", o->items, 0, 1000000, "list so many work items");
  CLI::Option* grid = cmd->add_flag(
      "--grid", o->grid, "a line for each of 120 shapes: b, s_q, h_q and prefix as others are measured");
  cmd->add_flag("--measure", o->measure, "measure this CPU's rates first (--arch cpu)");
  cmd->footer(footer(
      {"treemla plan --arch h200 --b 8 --s_q 33 --h_q 8 --prefix 65536", "treemla plan --arch sm_120 --grid",
       "treemla plan --arch cpu --measure --requests 300:9,63:1 --items 20"},
      ""));
  return [o, requests, b, s_q, prefix, h_q, items, grid] {
    check_excludes(requests, {b, s_q, prefix});
    check_excludes(grid, {requests, b, s_q, prefix, h_q, items});
    return o->grid ? plan_grid(*o) : run_plan(*o);
  };
}

}  // namespace treemla::cli
