// A work item of simd_kernel.cpp where AMX multiplies: tiles of up to 256 keys against groups of 32 rows.

#include <algorithm>
#include <limits>

#include "backend/cpu/amx.hpp"
#include "backend/cpu/simd_kernel.hpp"
#include "core/host_device.hpp"

#if defined(TREEMLA_BACKEND_CPU_AMX_WORKER_INL_) == defined(HWY_TARGET_TOGGLE)
#ifdef TREEMLA_BACKEND_CPU_AMX_WORKER_INL_
#undef TREEMLA_BACKEND_CPU_AMX_WORKER_INL_
#else
#define TREEMLA_BACKEND_CPU_AMX_WORKER_INL_
#endif

#include "backend/cpu/worker-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace treemla {
namespace HWY_NAMESPACE {
namespace {

// The same work in the stages of amx.hpp.
struct AmxWorker : Worker {
  uint16_t* keys;  // operands as amx.hpp has them
  uint32_t *q, *values, *weights;
  const uint16_t* cached[kAmxKeys];  // the tile's cached rows, zeros past the last
  int odd[kAmxKeys];
  int num_odd = 0;

  AmxWorker(const SimdItem& it, const SimdScratch& lay, float* s)
      : Worker(it, lay, s),
        keys(reinterpret_cast<uint16_t*>(s + lay.tile)),
        q(reinterpret_cast<uint32_t*>(s + lay.q)),
        values(reinterpret_cast<uint32_t*>(s + lay.values)),
        weights(reinterpret_cast<uint32_t*>(s + lay.weights)) {}

  int num_groups() const { return ceil_div(rows, kAmxRows); }
  int group_rows(int g) const { return std::min(kAmxRows, rows - g * kAmxRows); }
  uint32_t* group_q(int g) const { return q + static_cast<int64_t>(g) * kAmxRows * d_qk / 2; }

  // Keys a tile: even parts, unless bits must not depend on how many keys there are.
  int tile_keys() const {
    const int n = item.key_end - item.key_begin;
    return item.fixed_order ? kAmxKeys : round_up(ceil_div(n, ceil_div(n, kAmxKeys)), kAmxStep);
  }

  void begin() {
    std::fill_n(zeros, d_qk, uint16_t{0});
    std::fill(spare + d_qk, spare + layout.tile_ld, 0.0f);
    for (int g = 0; g < num_groups(); ++g) {
      const uint16_t* from[kAmxRows];
      for (int r = 0; r < group_rows(g); ++r) {
        from[r] = static_cast<const uint16_t*>(query(g * kAmxRows + r));
        if (!interleaved()) continue;
        interleave_row(from[r], d_qk, keys + r * d_qk);  // not in use yet
        from[r] = keys + r * d_qk;
      }
      amx_pack_q(from, group_rows(g), d_qk, group_q(g));
    }
  }

  void load(int key, int n) {
    num_odd = 0;
    for (int j = 0; j < n; ++j) {
      cached[j] = static_cast<const uint16_t*>(cached_row(key + j));
      if (key + j < item.prefix_len) continue;
      load_key(key + j, spare);
      if (finite(spare)) continue;
      cached[j] = zeros;
      odd[num_odd++] = j;
    }
    const int padded = round_up(n, kAmxStep);
    std::fill(cached + n, cached + padded, zeros);
    amx_load_keys(cached, padded, interleaved(), d_qk, d_v, keys, values);
  }

  // Two groups have scores at a time.
  float* group_scores(int g) const { return scores + g % 2 * (kAmxKeys * kAmxRows); }

  // With the weights of the group before, if given, on the way.
  void score(int g, int n, const AmxWeights* meanwhile) {
    amx_score(keys, round_up(n, kAmxStep), group_q(g), group_rows(g), d_qk, group_scores(g), meanwhile,
              ahead);
  }

  void mask(int g, int key, int n) {
    constexpr float kHidden = -std::numeric_limits<float>::infinity();
    float* s = group_scores(g);
    std::fill(s + n * kAmxRows, s + round_up(n, kAmxStep) * kAmxRows, kHidden);
    const int begin = std::max(0, item.prefix_len - key);
    if (begin < n) {
      const uint32_t* bits[kAmxRows];
      for (int r = 0; r < group_rows(g); ++r) bits[r] = mask_row(g * kAmxRows + r);
      amx_mask(s, begin, n, key + begin - item.prefix_len, bits, group_rows(g));
    }
    for (int o = 0; o < num_odd; ++o) std::fill_n(s + odd[o] * kAmxRows, kAmxRows, kHidden);
  }

  // Does any row's accumulator have to be multiplied?
  bool maxima(int g, int n, bool first) {
    return amx_maxima(group_scores(g), round_up(n, kAmxStep), group_rows(g), item.score_scale, first,
                      max + g * kAmxRows, alpha);
  }

  AmxWeights weights_of(int g, int n, bool first) const {
    return {.scores = group_scores(g),
            .num_keys = round_up(n, kAmxStep),
            .num_rows = group_rows(g),
            .scale = item.score_scale,
            .first = first,
            .max = max + g * kAmxRows,
            .alpha = alpha,
            .sum = sum + g * kAmxRows,
            .weights = weights};
  }

  void accumulate(int g, int n, bool first, bool raised) {
    amx_accumulate(weights, values, round_up(n, kAmxStep), group_rows(g), d_v, first,
                   raised && !first ? alpha : nullptr,
                   acc + static_cast<int64_t>(g) * kAmxRows * layout.out_ld, layout.out_ld, ahead);
  }

  int steps_of_tile(int n) const {
    int steps = 0;
    for (int g = 0; g < num_groups(); ++g)
      steps += amx_score_steps(n, group_rows(g), d_qk) + amx_accumulate_steps(n, group_rows(g), d_v);
    return steps;
  }

  void attend() {
    const AmxRegisters registers;
    begin();
    const int size = tile_keys(), steps = steps_of_tile(size);
    for (int key = item.key_begin; key < item.key_end; key += size) {
      const int n = std::min(size, item.key_end - key);
      const bool first = key == item.key_begin;
      load(key, n);
      ahead.start(key + n, std::min(key + n + size, item.key_end), steps);
      bool raised = false;
      for (int g = 0; g <= num_groups(); ++g) {
        // Scores of a group and weights of the one before at the same time, which then goes on.
        if (g < num_groups() && g > 0) {
          const AmxWeights before = weights_of(g - 1, n, first);
          score(g, n, &before);
        } else if (g == 0) {
          score(g, n, nullptr);
        } else {
          amx_weights(weights_of(g - 1, n, first));
        }
        if (g > 0) accumulate(g - 1, n, first, raised);
        if (g == num_groups()) break;
        if (n % kAmxStep != 0 || key + n > item.prefix_len) mask(g, key, n);
        raised = maxima(g, n, first);
      }
      for (int o = 0; o < num_odd; ++o) add_odd_key(key + odd[o]);
    }
    write();
  }

  void repeat(SimdStage stage, int times) {
    const AmxRegisters registers;
    const int n = std::min(kAmxKeys, item.key_end - item.key_begin);
    const auto run = [&](SimdStage s, bool first) {
      if (s == SimdStage::kLoad) return load(item.key_begin, n);
      for (int g = 0; g < num_groups(); ++g) {
        if (s == SimdStage::kScore) score(g, n, nullptr);
        if (s == SimdStage::kSoftmax) {
          maxima(g, n, first);
          amx_weights(weights_of(g, n, first));
        }
        if (s == SimdStage::kAccumulate) accumulate(g, n, first, false);
      }
    };
    begin();
    for (const SimdStage s :
         {SimdStage::kLoad, SimdStage::kScore, SimdStage::kSoftmax, SimdStage::kAccumulate})
      run(s, true);
    for (int i = 0; i < times; ++i) run(stage, false);
  }
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace treemla
HWY_AFTER_NAMESPACE();

#endif  // TREEMLA_BACKEND_CPU_AMX_WORKER_INL_
