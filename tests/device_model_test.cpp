#include "plan/device_model.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "treemla/error.hpp"

namespace treemla {
namespace {

using testing::HasSubstr;

TEST(DeviceModel, TheKnownDevicesInOrder) {
  std::vector<std::string> names;
  for (const DeviceModel& m : device_models()) names.push_back(m.name);
  EXPECT_THAT(names, testing::ElementsAre("cpu", "h200", "h100", "rtx_pro_6000", "rtx_5090", "a100", "l40s"));
}

TEST(DeviceModel, FindsByNameAndByArch) {
  EXPECT_EQ(find_device_model("rtx_5090").num_sms, 170);
  EXPECT_EQ(find_device_model("RTX-5090").name, "rtx_5090");
  EXPECT_EQ(find_device_model("sm_120").name, "rtx_pro_6000");  // the first of that arch
  EXPECT_EQ(find_device_model("sm_90a").name, "h200");
  EXPECT_EQ(find_device_model("sm_90").name, "h200");
  EXPECT_EQ(find_device_model("sm_80").name, "a100");
  EXPECT_EQ(find_device_model("cpu").arch, "cpu");
}

TEST(DeviceModel, UnknownNamesListTheKnownOnes) {
  for (const char* name : {"h300", "", "sm_", "sm_9", "a"}) {
    try {
      find_device_model(name);
      FAIL() << "found \"" << name << '"';
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(e.argument(), "arch");
      EXPECT_EQ(std::string(e.what()),
                std::string("arch = \"") + name +
                    "\" is unknown: allowed are cpu, h200 (sm_90a), h100 (sm_90a), rtx_pro_6000 (sm_120), "
                    "rtx_5090 (sm_120), a100 (sm_80), l40s (sm_89)");
    }
  }
}

TEST(DeviceModel, SharedMemoryLimits) {
  EXPECT_EQ(find_device_model("h200").smem_per_block_bytes, 232448);
  EXPECT_EQ(find_device_model("a100").smem_per_block_bytes, 166912);
  EXPECT_EQ(find_device_model("rtx_pro_6000").smem_per_block_bytes, 101376);
  EXPECT_EQ(find_device_model("l40s").smem_per_block_bytes, 101376);
  for (const DeviceModel& m : device_models()) {
    if (m.arch == "cpu") continue;
    EXPECT_EQ(m.smem_per_block_bytes + m.smem_reserved_per_block_bytes, m.smem_per_sm_bytes) << m.name;
  }
}

TEST(DeviceModel, EveryGpuIsComplete) {
  std::set<std::string> names;
  for (const DeviceModel& m : device_models()) {
    EXPECT_TRUE(names.insert(m.name).second) << m.name << " twice";
    EXPECT_FALSE(m.provenance.empty()) << m.name;
    if (m.arch == "cpu") continue;
    EXPECT_GT(m.num_sms, 0) << m.name;
    EXPECT_EQ(m.regs_per_sm, 65536) << m.name;
    EXPECT_GE(m.max_threads_per_sm, 1536) << m.name;
    EXPECT_GE(m.max_blocks_per_sm, 24) << m.name;
    EXPECT_GT(m.l2_bytes, 0) << m.name;
    EXPECT_GT(m.launch_us, 0) << m.name;
    EXPECT_GT(m.mma16_flops, m.fp32_flops) << m.name;
    // FLOP/byte at which bf16 turns from memory to compute: between a few tens and a few hundreds on any
    // card.
    const double balance = m.mma16_flops / m.mem_bytes_per_s;
    EXPECT_GT(balance, 100) << m.name;
    EXPECT_LT(balance, 450) << m.name;
  }
}

TEST(DeviceModel, ProvenanceIsHonest) {
  EXPECT_THAT(find_device_model("h200").provenance, HasSubstr("measured"));
  EXPECT_THAT(find_device_model("h100").provenance, HasSubstr("datasheet"));
  EXPECT_THAT(find_device_model("rtx_pro_6000").provenance, HasSubstr("reported"));
  EXPECT_THAT(find_device_model("cpu").provenance, HasSubstr("unknown"));
  EXPECT_EQ(find_device_model("cpu").mem_bytes_per_s, 0);
  EXPECT_EQ(find_device_model("cpu").fp32_flops, 0);
}

TEST(DeviceModel, PrintsItself) {
  const std::string h200 = describe(find_device_model("h200"));
  EXPECT_THAT(h200, HasSubstr("h200 (sm_90a), 132 SMs"));
  EXPECT_THAT(h200, HasSubstr("4.54 TB/s"));
  EXPECT_THAT(h200, HasSubstr("700 TFLOP/s"));
  EXPECT_THAT(h200, HasSubstr("227 KiB"));
  const std::string cpu = describe(find_device_model("cpu"));
  EXPECT_THAT(cpu, HasSubstr("read unknown, float32 FMA unknown"));
  for (const DeviceModel& m : device_models()) EXPECT_THAT(describe(m), HasSubstr(m.provenance));
}

}  // namespace
}  // namespace treemla
