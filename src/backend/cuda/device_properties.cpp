#include "backend/cuda/device_properties.hpp"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "backend/cuda/cuda_check.hpp"

namespace treemla {
namespace {

constexpr int kMinCc = 80;

std::string arch_name(int cc) { return fmt::format("sm_{}{}", cc, cc == 90 ? "a" : ""); }

// The card of device_models() that this is, else the first of its architecture: its rates are then a guess, and say so.
void take_rates(const cudaDeviceProp& p, DeviceModel& m) {
  const DeviceModel* same_arch = nullptr;
  for (const DeviceModel& known : device_models()) {
    if (known.arch != m.arch) continue;
    if (!same_arch) same_arch = &known;
    std::string name(known.name);  // "rtx_pro_6000"
    std::string present(p.name);   // "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
    for (std::string* s : {&name, &present})
      for (char& c : *s)
        c = c == ' ' || c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    if (present.find(name) == std::string::npos) continue;
    m.name = known.name;
    m.mem_bytes_per_s = known.mem_bytes_per_s;
    m.fp32_flops = known.fp32_flops;
    m.mma16_flops = known.mma16_flops;
    m.launch_us = known.launch_us;
    m.provenance = known.provenance;
    return;
  }
  if (!same_arch) return;
  m.mem_bytes_per_s = same_arch->mem_bytes_per_s;
  m.fp32_flops = same_arch->fp32_flops * m.num_sms / same_arch->num_sms;
  m.mma16_flops = same_arch->mma16_flops * m.num_sms / same_arch->num_sms;
  m.launch_us = same_arch->launch_us;
  m.provenance = fmt::format("guessed from {}, scaled by SMs", same_arch->name);
}

CudaDevice query(int ordinal) {
  CudaDevice d;
  d.ordinal = ordinal;
  cudaDeviceProp p;
  check_cuda(cudaGetDeviceProperties(&p, ordinal),
             fmt::format("cudaGetDeviceProperties of device {}", ordinal));
  d.cc = 10 * p.major + p.minor;
  DeviceModel& m = d.model;
  m.name = p.name;
  m.arch = arch_name(d.cc);
  m.num_sms = p.multiProcessorCount;
  m.smem_per_block_bytes = static_cast<int>(p.sharedMemPerBlockOptin);
  m.smem_per_sm_bytes = static_cast<int>(p.sharedMemPerMultiprocessor);
  m.smem_reserved_per_block_bytes = static_cast<int>(p.reservedSharedMemPerBlock);
  m.regs_per_sm = p.regsPerMultiprocessor;
  m.max_threads_per_sm = p.maxThreadsPerMultiProcessor;
  m.max_blocks_per_sm = p.maxBlocksPerMultiProcessor;
  m.l2_bytes = p.l2CacheSize;
  m.provenance = "unknown";
  take_rates(p, m);
  d.usable = d.cc >= kMinCc;
  d.reason = d.usable ? fmt::format("{}, {}, {} SMs, {:.0f} GB", p.name, m.arch, m.num_sms,
                                    static_cast<double>(p.totalGlobalMem) / 1e9)
                      : fmt::format("{} has compute capability {}.{}: 8.0 is the oldest supported", p.name,
                                    p.major, p.minor);
  return d;
}

CudaDevice without_device(cudaError_t code) {
  CudaDevice d;
  cudaGetLastError();
  d.reason = code == cudaErrorInsufficientDriver || code == cudaErrorNoDevice || code == cudaSuccess
                 ? "no CUDA device: this machine has no NVIDIA GPU, or no driver for one"
                 : fmt::format("no CUDA device: {}", cudaGetErrorString(code));
  return d;
}

}  // namespace

const CudaDevice& current_cuda_device() {
  static std::mutex mutex;
  static std::map<int, CudaDevice> devices;  // addresses stay
  int count = 0, ordinal = -1;
  cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaSuccess && count > 0) code = cudaGetDevice(&ordinal);
  if (code != cudaSuccess) ordinal = -1;

  const std::lock_guard lock(mutex);
  const auto found = devices.find(ordinal);
  if (found != devices.end()) return found->second;
  try {
    return devices.emplace(ordinal, ordinal < 0 ? without_device(code) : query(ordinal)).first->second;
  } catch (const std::exception& e) {
    CudaDevice broken;
    broken.reason = e.what();
    return devices.emplace(ordinal, std::move(broken)).first->second;
  }
}

}  // namespace treemla
