// The structs of DLPack, by which array libraries hand over their memory: the ABI of version 1, and of what came before it
// (https://dmlc.github.io/dlpack/latest/c_api.html). Written out here, so that building needs no header of another project.
#pragma once

#include <cstdint>

namespace treemla::python {

enum DLDeviceType : int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13 };

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

enum DLTypeCode : uint8_t {
  kDLInt = 0,
  kDLUInt = 1,
  kDLFloat = 2,
  kDLBfloat = 4,
  kDLBool = 6,
  kDLFloat8E4M3FN = 10
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;    // [ndim]
  int64_t* strides;  // [ndim] in elements, or null: compact and row-major
  uint64_t byte_offset;
};

// Capsule "dltensor".
struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};

// Capsule "dltensor_versioned".
struct DLManagedTensorVersioned {
  struct {
    uint32_t major, minor;
  } version;
  void* manager_ctx;
  void (*deleter)(DLManagedTensorVersioned*);
  uint64_t flags;
  DLTensor dl_tensor;
};
inline constexpr uint64_t kDLFlagReadOnly = 1;

}  // namespace treemla::python
