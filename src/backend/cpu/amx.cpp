// AMX: the CPU's own tile registers under the stages of amx_kernel-inl.hpp, and the questions that come before their use.
//
// Instructions are written as inline assembly: the compilers' intrinsics are macros that paste a register's number into text,
// so that no template could choose it.
//
// With TREEMLA_EMULATE_AMX defined the registers are arrays and the products loops, on any CPU with AVX-512: for tests of the whole
// path where there is no AMX.

#include "backend/cpu/amx.hpp"

#include <hwy/base.h>

#if HWY_ARCH_X86_64 && defined(__linux__) && (HWY_COMPILER_GCC_ACTUAL >= 1000 || HWY_COMPILER_CLANG >= 900)
#define TREEMLA_AMX 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#if HWY_COMPILER_GCC_ACTUAL && !HWY_COMPILER_CLANG
#pragma GCC diagnostic ignored \
    "-Wmaybe-uninitialized"  // GCC 12: of _mm512_undefined_epi32() in its own header
#endif
#else
#define TREEMLA_AMX 0
#endif

#include <algorithm>
#include <cstring>
#include <limits>

#include "backend/cpu/amx_layout.hpp"
#include "backend/cpu/fetch_ahead.hpp"

#if TREEMLA_AMX

HWY_PUSH_ATTRIBUTES("avx512f,avx512bw,avx512dq,avx512vl")
#include "backend/cpu/amx_kernel-inl.hpp"

namespace treemla {
namespace {

#ifdef TREEMLA_EMULATE_AMX

struct Tiles {
  static thread_local uint32_t tile[8][kAmxTileWords];
  static void configure() {}
  static void release() {}
  static void fence() {}
  template <int T>
  static void zero() {
    std::memset(tile[T], 0, sizeof tile[T]);
  }
  template <int T>
  static void load(const void* from, int64_t ld = kAmxTile) {
    for (int i = 0; i < kAmxTile; ++i)
      std::memcpy(tile[T] + i * kAmxTile, static_cast<const uint32_t*>(from) + i * ld, 64);
  }
  template <int T>
  static void stream(const void* from) {
    load<T>(from);
  }
  template <int T>
  static void store(float* to, int64_t ld) {
    for (int i = 0; i < kAmxTile; ++i) std::memcpy(to + i * ld, tile[T] + i * kAmxTile, 64);
  }
  template <int C, int A, int B>
  static void dot() {
    float c[kAmxTileWords];
    std::memcpy(c, tile[C], sizeof c);
    amx_emulate_dot(c, tile[A], tile[B]);
    std::memcpy(tile[C], c, sizeof c);
  }
};
thread_local uint32_t Tiles::tile[8][kAmxTileWords];

#else

struct Tiles {
  static void configure() {
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static const Config config;
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  static void release() { asm volatile("tilerelease"); }
  // What the program wrote before is in memory when tiles are loaded from here on: loads don't say so one by one.
  static void fence() { asm volatile("" : : : "memory"); }
  template <int T>
  static HWY_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  template <int T>
  static HWY_INLINE void load(const void* from, int64_t ld = kAmxTile) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(4 * ld), "i"(T));
  }
  template <int T>
  static HWY_INLINE void stream(const void* from) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(int64_t{4 * kAmxTile}), "i"(T));
  }
  template <int T>
  static HWY_INLINE void store(float* to, int64_t ld) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(4 * ld), "i"(T) : "memory");
  }
  template <int C, int A, int B>
  static HWY_INLINE void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};

#endif

void pack_q(const uint16_t* const* rows, int num_rows, int width, uint32_t* q) {
  pack_q_tiles(rows, num_rows, width, q);
}
void load_keys(const uint16_t* const* rows, int num_keys, bool interleaved, int d_qk, int d_v, uint16_t* keys,
               uint32_t* values) {
  load_key_tiles(rows, num_keys, interleaved, d_qk, d_v, keys, values);
}
void score(const uint16_t* keys, int num_keys, const uint32_t* q, int num_rows, int d_qk, float* scores,
           FetchAhead& ahead) {
  NoSteps none;
  score_tiles<Tiles>(keys, num_keys, q, num_rows, d_qk, scores, none, ahead);
}
void score_meanwhile(const uint16_t* keys, int num_keys, const uint32_t* q, int num_rows, int d_qk,
                     float* scores, const AmxWeights& work, FetchAhead& ahead) {
  WeightSteps<kAmxRows / kAmxTile> steps(work);
  score_tiles<Tiles>(keys, num_keys, q, num_rows, d_qk, scores, steps, ahead);
}
void mask(float* scores, int begin, int end, int tree_begin, const uint32_t* const* bits, int num_rows) {
  mask_rows(scores, begin, end, tree_begin, bits, num_rows);
}
bool maxima(const float* scores, int num_keys, int num_rows, float scale, bool first, float* max,
            float* alpha) {
  return maxima_rows(scores, num_keys, num_rows, scale, first, max, alpha);
}
void weights(const AmxWeights& work) { weights_alone(work); }
void accumulate(const uint32_t* weights, const uint32_t* values, int num_keys, int num_rows, int d_v,
                bool first, const float* alpha, float* out, int64_t out_ld, FetchAhead& ahead) {
  accumulate_tiles<Tiles>(weights, values, num_keys, num_rows, d_v, first, alpha, out, out_ld, ahead);
}

double chains(int steps, float* sink) {
  const AmxRegisters registers;
  uint16_t quarters[2 * kAmxTileWords], small[2 * kAmxTileWords];
  std::fill_n(quarters, 2 * kAmxTileWords, uint16_t{0x3E80});  // 1/4
  std::fill_n(small, 2 * kAmxTileWords, uint16_t{0x3C00});     // 1/128
  Tiles::fence();
  zero_accumulators<Tiles>();
  Tiles::zero<4>();
  Tiles::zero<5>();
  Tiles::load<6>(quarters);
  Tiles::load<7>(small);
  for (int s = 0; s < steps; ++s) {
    Tiles::dot<0, 6, 7>();
    Tiles::dot<1, 6, 7>();
    Tiles::dot<2, 6, 7>();
    Tiles::dot<3, 6, 7>();
    Tiles::dot<4, 6, 7>();
    Tiles::dot<5, 6, 7>();
  }
  float c[kAmxTileWords];
  Tiles::store<0>(c, kAmxTile);
  *sink += c[0];
  return 6.0 * 2 * kAmxTileWords * kAmxStep * steps;
}

}  // namespace
}  // namespace treemla
HWY_POP_ATTRIBUTES

namespace treemla {
namespace {

bool avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#ifdef TREEMLA_EMULATE_AMX
bool tiles_granted() { return true; }
#else
// The instructions, registers of the size used here, and Linux's consent: it keeps the 8 KB of tile data out of every thread's
// saved state until a process asks for them.
bool tiles_granted() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;  // xgetbv
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;
  if ((low & kTileState) != kTileState) return false;
  if (!__get_cpuid_count(0x1D, 1, &a, &b, &c, &d)) return false;
  if ((b & 0xFFFF) < 64 || b >> 16 < 8 || (c & 0xFFFF) < kAmxTile)
    return false;  // row bytes, registers, rows
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

}  // namespace

bool amx_available() {
  static const bool available = avx512() && tiles_granted();
  return available;
}

AmxRegisters::AmxRegisters() { Tiles::configure(); }
AmxRegisters::~AmxRegisters() { Tiles::release(); }

void amx_pack_q(const uint16_t* const* rows, int num_rows, int width, uint32_t* q) {
  pack_q(rows, num_rows, width, q);
}
void amx_load_keys(const uint16_t* const* rows, int num_keys, bool interleaved, int d_qk, int d_v,
                   uint16_t* keys, uint32_t* values) {
  load_keys(rows, num_keys, interleaved, d_qk, d_v, keys, values);
}
void amx_score(const uint16_t* keys, int num_keys, const uint32_t* q, int num_rows, int d_qk, float* scores,
               const AmxWeights* meanwhile, FetchAhead& ahead) {
  if (meanwhile)
    score_meanwhile(keys, num_keys, q, num_rows, d_qk, scores, *meanwhile, ahead);
  else
    score(keys, num_keys, q, num_rows, d_qk, scores, ahead);
}
void amx_mask(float* scores, int begin, int end, int tree_begin, const uint32_t* const* bits, int num_rows) {
  mask(scores, begin, end, tree_begin, bits, num_rows);
}
bool amx_maxima(const float* scores, int num_keys, int num_rows, float scale, bool first, float* max,
                float* alpha) {
  return maxima(scores, num_keys, num_rows, scale, first, max, alpha);
}
void amx_weights(const AmxWeights& work) { weights(work); }
void amx_accumulate(const uint32_t* weights, const uint32_t* values, int num_keys, int num_rows, int d_v,
                    bool first, const float* alpha, float* out, int64_t out_ld, FetchAhead& ahead) {
  accumulate(weights, values, num_keys, num_rows, d_v, first, alpha, out, out_ld, ahead);
}
double amx_chains(int steps, float* sink) { return amx_available() ? chains(steps, sink) : 0; }

}  // namespace treemla

#else

namespace treemla {
bool amx_available() { return false; }
AmxRegisters::AmxRegisters() = default;
AmxRegisters::~AmxRegisters() = default;
void amx_pack_q(const uint16_t* const*, int, int, uint32_t*) {}
void amx_load_keys(const uint16_t* const*, int, bool, int, int, uint16_t*, uint32_t*) {}
void amx_score(const uint16_t*, int, const uint32_t*, int, int, float*, const AmxWeights*, FetchAhead&) {}
void amx_mask(float*, int, int, int, const uint32_t* const*, int) {}
bool amx_maxima(const float*, int, int, float, bool, float*, float*) { return false; }
void amx_weights(const AmxWeights&) {}
void amx_accumulate(const uint32_t*, const uint32_t*, int, int, int, bool, const float*, float*, int64_t,
                    FetchAhead&) {}
double amx_chains(int, float*) { return 0; }
}  // namespace treemla

#endif

namespace treemla {

int amx_score_steps(int num_keys, int num_rows, int d_qk) {
  const int blocks = num_rows > kAmxTile ? ceil_div(num_keys, 32) : ceil_div(num_keys, 64);
  return blocks * (d_qk / kAmxStep);
}
int amx_accumulate_steps(int num_keys, int num_rows, int d_v) {
  const int blocks = num_rows > kAmxTile ? ceil_div(d_v, 32) : ceil_div(d_v, 64);
  return blocks * ceil_div(num_keys, kAmxStep);
}

}  // namespace treemla
