#include "plan/device_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "treemla/error.hpp"

namespace treemla {
namespace {

constexpr int kKiB = 1024;
constexpr int64_t kMiB = int64_t{1} << 20;

// An empty kernel inside a CUDA graph, measured on the H200. No other card was at hand, so all GPUs share it.
constexpr double kLaunchUs = 0.6;

// Per-SM limits of an architecture (CUDA programming guide, compute capabilities); cards add size and rates.
DeviceModel sm_80() {
  DeviceModel m;
  m.arch = "sm_80";
  m.smem_per_block_bytes = 163 * kKiB;
  m.smem_per_sm_bytes = 164 * kKiB;
  m.smem_reserved_per_block_bytes = 1 * kKiB;
  m.regs_per_sm = 65536;
  m.max_threads_per_sm = 2048;
  m.max_blocks_per_sm = 32;
  m.launch_us = kLaunchUs;
  return m;
}

DeviceModel sm_89() {
  DeviceModel m = sm_80();
  m.arch = "sm_89";
  m.smem_per_block_bytes = 99 * kKiB;
  m.smem_per_sm_bytes = 100 * kKiB;
  m.max_threads_per_sm = 1536;
  m.max_blocks_per_sm = 24;
  return m;
}

DeviceModel sm_90a() {
  DeviceModel m = sm_80();
  m.arch = "sm_90a";
  m.smem_per_block_bytes = 227 * kKiB;
  m.smem_per_sm_bytes = 228 * kKiB;
  return m;
}

DeviceModel sm_120() {
  DeviceModel m = sm_89();
  m.arch = "sm_120";
  return m;
}

DeviceModel cpu() {
  DeviceModel m;
  m.name = m.arch = "cpu";
  m.provenance = "none: a generic core whose rates are unknown until `treemla bench` measures them";
  return m;
}

struct Rates {
  double mem_bytes_per_s, fp32_flops, mma16_flops;
};

DeviceModel card(DeviceModel arch, std::string name, int num_sms, int64_t l2_mib, Rates rates,
                 std::string provenance) {
  arch.name = std::move(name);
  arch.num_sms = num_sms;
  arch.l2_bytes = l2_mib * kMiB;
  arch.mem_bytes_per_s = rates.mem_bytes_per_s;
  arch.fp32_flops = rates.fp32_flops;
  arch.mma16_flops = rates.mma16_flops;
  arch.provenance = std::move(provenance);
  return arch;
}

std::vector<DeviceModel> make_models() {
  return {
      cpu(),
      card(sm_90a(), "h200", 132, 60, {4.54e12, 51e12, 700e12},
           "measured on the card: read kernel, FMA kernel, large bf16 matmul (up to 790 when it is small); "
           "launch measured"),
      card(sm_90a(), "h100", 132, 50, {3.35e12, 67e12, 989e12},
           "datasheet peaks (SXM5, 80 GB): expect less; launch as measured on an H200"),
      card(sm_120(), "rtx_pro_6000", 188, 128, {1.79e12, 125e12, 417e12},
           "memory and fp32 datasheet peaks, bf16 reported by users; launch as measured on an H200"),
      card(sm_120(), "rtx_5090", 170, 96, {1.79e12, 104.8e12, 215e12},
           "memory and fp32 datasheet peaks, bf16 reported by users; launch as measured on an H200"),
      card(sm_80(), "a100", 108, 40, {2.039e12, 19.5e12, 312e12},
           "datasheet peaks (SXM4, 80 GB): expect less; launch as measured on an H200"),
      card(sm_89(), "l40s", 142, 96, {864e9, 91.6e12, 362e12},
           "datasheet peaks: expect less; launch as measured on an H200"),
  };
}

// "RTX-5090" and "rtx_5090" are the same card.
std::string canonical(std::string_view text) {
  std::string s(text);
  for (char& c : s)
    c = c == '-' || c == ' ' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return s;
}

std::string bytes_text(int64_t bytes) {
  return bytes % kMiB == 0 ? fmt::format("{} MiB", bytes / kMiB) : fmt::format("{} KiB", bytes / kKiB);
}

std::string rate_text(double per_s, double unit, std::string_view unit_name) {
  return per_s > 0 ? fmt::format("{:.4g} {}", per_s / unit, unit_name) : "unknown";
}

}  // namespace

const std::vector<DeviceModel>& device_models() {
  static const std::vector<DeviceModel> models = make_models();
  return models;
}

const DeviceModel& find_device_model(std::string_view name_or_arch) {
  const std::string wanted = canonical(name_or_arch);
  const auto& models = device_models();
  for (const auto& m : models)
    if (m.name == wanted) return m;
  // sm_90 is what people type for sm_90a.
  for (const auto& m : models)
    if (m.arch == wanted || m.arch == wanted + "a") return m;

  std::string known;
  for (const auto& m : models) {
    if (!known.empty()) known += ", ";
    known += m.name == m.arch ? m.name : fmt::format("{} ({})", m.name, m.arch);
  }
  throw Error(ErrorCode::kInvalidArgument, "arch",
              fmt::format("arch = \"{}\" is unknown: allowed are {}", name_or_arch, known));
}

std::string describe(const DeviceModel& m) {
  std::string s;
  if (m.arch == "cpu") {
    s += fmt::format("device       cpu, {} core{}\n", m.num_sms, m.num_sms == 1 ? "" : "s");
    if (m.l2_bytes > 0) s += fmt::format("cache        {} last level\n", bytes_text(m.l2_bytes));
    s += fmt::format("rates        read {}, float32 FMA {}\n", rate_text(m.mem_bytes_per_s, 1e9, "GB/s"),
                     rate_text(m.fp32_flops, 1e9, "GFLOP/s"));
  } else {
    s += fmt::format("device       {} ({}), {} SMs, L2 {}\n", m.name, m.arch, m.num_sms,
                     bytes_text(m.l2_bytes));
    s += fmt::format(
        "an SM        shared memory {} (at most {} a block and {} reserved with it), {} registers, {} "
        "threads, "
        "{} blocks\n",
        bytes_text(m.smem_per_sm_bytes), bytes_text(m.smem_per_block_bytes),
        bytes_text(m.smem_reserved_per_block_bytes), m.regs_per_sm, m.max_threads_per_sm,
        m.max_blocks_per_sm);
    s += fmt::format("rates        read {}, float32 FMA {}, bf16 matrix {}, launch {:.2g} us\n",
                     rate_text(m.mem_bytes_per_s, 1e12, "TB/s"), rate_text(m.fp32_flops, 1e12, "TFLOP/s"),
                     rate_text(m.mma16_flops, 1e12, "TFLOP/s"), m.launch_us);
  }
  s += fmt::format("provenance   {}\n", m.provenance);
  return s;
}

}  // namespace treemla
