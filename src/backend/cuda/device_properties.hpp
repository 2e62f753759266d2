// The present GPU.
#pragma once

#include <string>

#include "plan/device_model.hpp"

namespace treemla {

struct CudaDevice {
  bool usable = false;
  std::string reason;  // why not; or the card's name, compute capability and memory
  int ordinal = -1;    // the one that was current when this was asked
  int cc = 0;          // compute capability, 90 for 9.0
  DeviceModel
      model;  // limits as the driver reports them; rates of the card's entry in device_models(), if it has one
};

// Of the calling thread's current device. Asked of the driver once a device, then remembered. Never throws for want of a GPU.
const CudaDevice& current_cuda_device();

}  // namespace treemla
