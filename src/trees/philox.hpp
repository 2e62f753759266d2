// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011): random numbers as a function
// of a counter and a key.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"

namespace treemla {

struct Philox4 {
  uint32_t x[4];
};

TREEMLA_HD inline Philox4 philox4x32(Philox4 counter, uint64_t key) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  Philox4 c = counter;
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(kMultiplier0) * c.x[0];
    const uint64_t b = static_cast<uint64_t>(kMultiplier1) * c.x[2];
    c = {{static_cast<uint32_t>(b >> 32) ^ c.x[1] ^ key0, static_cast<uint32_t>(b),
          static_cast<uint32_t>(a >> 32) ^ c.x[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return c;
}

enum class CoinPurpose : uint32_t { kJudge = 0, kDraw = 1 };

// The 64-bit coin of a decision: see accept.hpp.
TREEMLA_HD inline uint64_t philox_coin(uint64_t seed, uint64_t offset, int node, CoinPurpose purpose) {
  const Philox4 r = philox4x32({{static_cast<uint32_t>(node), static_cast<uint32_t>(purpose),
                                 static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)}},
                               seed);
  return static_cast<uint64_t>(r.x[1]) << 32 | r.x[0];
}

}  // namespace treemla
