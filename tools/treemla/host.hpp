// Facts about this machine and this build.
#pragma once

#include <cstdint>
#include <string>

namespace treemla::cli {

std::string cpu_name();
int num_cores();                   // this process may run on; respects affinity and container quotas
int64_t last_level_cache_bytes();  // 0 if unknown
int64_t memory_total_bytes();      // of the machine, or the container's limit if that is less
int64_t memory_available_bytes();  // what may be allocated without swapping or being killed
std::string system_name();         // kernel and its release

std::string compiler_name();
std::string build_options();  // optimisation, sanitizers, instruction set, CUDA
std::string revision();       // git revision of the build, or "unknown"
std::string utc_now();        // 2026-01-31T12:00:00Z

}  // namespace treemla::cli
