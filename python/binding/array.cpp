#include "binding/array.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>

#include "binding/dlpack.hpp"

namespace treemla::python {
namespace {

// What this file asks of torch, looked up once it is imported. A tensor's own attributes cost a tenth of its __dlpack__(), which
// is Python code.
struct Torch {
  PyObject* tensor_type = nullptr;
  struct {
    PyObject* dtype;
    Element element;
  } dtypes[9] = {};
  int num_dtypes = 0;
};

const Torch* torch() {
  static Torch api;
  if (api.tensor_type) return &api;
  PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");  // borrowed
  if (!module || !PyObject_HasAttrString(module, "Tensor")) return nullptr;
  constexpr std::pair<const char*, Element> kNames[] = {
      {"float32", Element::kF32},   {"float16", Element::kF16},
      {"bfloat16", Element::kBF16}, {"float8_e4m3fn", Element::kF8E4M3},
      {"uint8", Element::kU8},      {"bool", Element::kBool},
      {"int32", Element::kI32},     {"uint32", Element::kU32},
      {"int64", Element::kI64}};
  for (auto [name, element] : kNames) {
    PyObject* dtype = PyObject_GetAttrString(module, name);  // kept
    if (dtype) {
      api.dtypes[api.num_dtypes++] = {dtype, element};
    } else {
      PyErr_Clear();  // an old torch without it
    }
  }
  api.tensor_type = PyObject_GetAttrString(module, "Tensor");  // kept: last, it says that all is there
  return api.tensor_type ? &api : nullptr;
}

// Interned once, kept for the life of the process.
#define TREEMLA_ATTRIBUTE(name)                                      \
  PyObject* name() {                                                 \
    static PyObject* const text = PyUnicode_InternFromString(#name); \
    return text;                                                     \
  }
namespace attribute {
TREEMLA_ATTRIBUTE(data_ptr)
TREEMLA_ATTRIBUTE(dtype)
TREEMLA_ATTRIBUTE(shape)
TREEMLA_ATTRIBUTE(stride)
TREEMLA_ATTRIBUTE(is_cuda)
TREEMLA_ATTRIBUTE(is_cpu)
TREEMLA_ATTRIBUTE(device)
TREEMLA_ATTRIBUTE(get_device)
TREEMLA_ATTRIBUTE(requires_grad)
TREEMLA_ATTRIBUTE(is_neg)
}  // namespace attribute
#undef TREEMLA_ATTRIBUTE

nb::object get(nb::handle object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name);
  if (!value) throw nb::python_error();
  return nb::steal(value);
}

nb::object call(nb::handle object, PyObject* name) {
  PyObject* value = PyObject_CallMethodObjArgs(object.ptr(), name, nullptr);
  if (!value) throw nb::python_error();
  return nb::steal(value);
}

int64_t as_int(nb::handle value) {
  const long long number = PyLong_AsLongLong(value.ptr());
  if (number == -1 && PyErr_Occurred()) throw nb::python_error();
  return number;
}

// A tuple of ints into `to`; returns how many.
int read_tuple(nb::handle tuple, int64_t (&to)[Array::kMaxDims], const char* name) {
  const Py_ssize_t size = PyTuple_Size(tuple.ptr());
  if (size < 0) throw nb::python_error();
  if (size > Array::kMaxDims)
    fail(name, std::string(name) + " has " + std::to_string(size) + " axes: at most " +
                   std::to_string(Array::kMaxDims) + " are allowed");
  for (Py_ssize_t i = 0; i < size; ++i) to[i] = as_int(PyTuple_GetItem(tuple.ptr(), i));
  return static_cast<int>(size);
}

Element element_of(DLDataType t) {
  if (t.lanes != 1) return Element::kOther;
  switch (t.code) {
    case kDLFloat:
      return t.bits == 32 ? Element::kF32 : t.bits == 16 ? Element::kF16 : Element::kOther;
    case kDLBfloat:
      return t.bits == 16 ? Element::kBF16 : Element::kOther;
    case kDLFloat8E4M3FN:
      return t.bits == 8 ? Element::kF8E4M3 : Element::kOther;
    case kDLInt:
      return t.bits == 32 ? Element::kI32 : t.bits == 64 ? Element::kI64 : Element::kOther;
    case kDLUInt:
      return t.bits == 8    ? Element::kU8
             : t.bits == 16 ? Element::kU16
             : t.bits == 32 ? Element::kU32
             : t.bits == 64 ? Element::kU64
                            : Element::kOther;
    case kDLBool:
      return t.bits == 8 ? Element::kBool : Element::kOther;
    default:
      return Element::kOther;
  }
}

std::string type_of(nb::handle object) { return nb::cast<std::string>(nb::type_name(object.type())); }

}  // namespace

const char* element_name(Element e) {
  switch (e) {
    case Element::kF32:
      return "float32";
    case Element::kF16:
      return "float16";
    case Element::kBF16:
      return "bfloat16";
    case Element::kF8E4M3:
      return "float8_e4m3fn";
    case Element::kU8:
      return "uint8";
    case Element::kBool:
      return "bool";
    case Element::kU16:
      return "uint16";
    case Element::kI32:
      return "int32";
    case Element::kU32:
      return "uint32";
    case Element::kI64:
      return "int64";
    case Element::kU64:
      return "uint64";
    case Element::kOther:
      break;
  }
  return "of a dtype that TreeMLA has no use for";
}

void fail(const std::string& argument, const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, argument, message);
}

Array::Array(nb::handle object, const char* array_name, uintptr_t stream) : name(array_name) {
  try {
    if (!from_torch(object)) from_dlpack(object, stream);
  } catch (...) {
    release();
    throw;
  }
  normalise_strides();
}

Array& Array::operator=(Array&& other) noexcept {
  if (this == &other) return *this;
  release();
  name = other.name;
  data = other.data;
  element = other.element;
  ndim = other.ndim;
  std::memcpy(shape, other.shape, sizeof shape);
  std::memcpy(strides, other.strides, sizeof strides);
  memory = other.memory;
  device_id = other.device_id;
  read_only = other.read_only;
  owner_ = std::exchange(other.owner_, nullptr);
  managed_ = std::exchange(other.managed_, nullptr);
  managed_is_versioned_ = other.managed_is_versioned_;
  return *this;
}

void Array::release() noexcept {
  if (void* managed = std::exchange(managed_, nullptr)) {
    if (managed_is_versioned_) {
      auto* m = static_cast<DLManagedTensorVersioned*>(managed);
      if (m->deleter) m->deleter(m);
    } else {
      auto* m = static_cast<DLManagedTensor*>(managed);
      if (m->deleter) m->deleter(m);
    }
  }
  Py_CLEAR(owner_);
}

bool Array::from_torch(nb::handle object) {
  const Torch* api = torch();
  if (!api) return false;
  const int is_tensor = PyObject_IsInstance(object.ptr(), api->tensor_type);
  if (is_tensor < 0) throw nb::python_error();
  if (!is_tensor) return false;
  const std::string n = name;
  const nb::object on_cuda = get(object, attribute::is_cuda());
  if (on_cuda.is(Py_True)) {
    memory = Memory::kDevice;
    device_id = static_cast<int>(as_int(call(object, attribute::get_device())));
  } else if (!get(object, attribute::is_cpu()).is(Py_True)) {
    fail(n, n + " is on the device " + nb::cast<std::string>(nb::str(get(object, attribute::device()))) +
                ": must be on cpu or cuda");
  }
  if (get(object, attribute::requires_grad()).is(Py_True))
    fail(n, n + " requires grad, and TreeMLA has no backward: call it under torch.no_grad() with " + n +
                ".detach()");
  if (call(object, attribute::is_neg()).is(Py_True))
    fail(n, n + " is a lazily negated view: must be resolved, call resolve_neg()");
  const nb::object dtype = get(object, attribute::dtype());
  for (int i = 0; i < api->num_dtypes; ++i)
    if (dtype.is(api->dtypes[i].dtype)) element = api->dtypes[i].element;
  ndim = read_tuple(get(object, attribute::shape()), shape, name);
  read_tuple(call(object, attribute::stride()), strides, name);
  data = reinterpret_cast<void*>(
      static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(call(object, attribute::data_ptr()).ptr())));
  if (PyErr_Occurred()) throw nb::python_error();
  owner_ = nb::object(nb::borrow(object)).release().ptr();
  return true;
}

void Array::from_dlpack(nb::handle object, uintptr_t stream) {
  const std::string n = name;
  if (object.is_none()) fail(n, n + " is None: must be an array");
  if (!nb::hasattr(object, "__dlpack__") || !nb::hasattr(object, "__dlpack_device__"))
    fail(n, n + " is a " + type_of(object) +
                ": must be an array that speaks DLPack (NumPy, torch, CuPy, JAX, ...)");
  const nb::object device = object.attr("__dlpack_device__")();
  const auto device_type = as_int(device[0]);
  device_id = static_cast<int>(as_int(device[1]));
  if (device_type == kDLCUDA || device_type == kDLCUDAManaged) {
    memory = Memory::kDevice;
  } else if (device_type != kDLCPU && device_type != kDLCUDAHost) {
    fail(n, n + " is on a device of DLPack's type " + std::to_string(device_type) +
                ": must be on the host (1, 3) or a CUDA device (2, 13)");
  }
  nb::object capsule;
  Element known = Element::kOther;
  // In DLPack's Python protocol, 1 is the legacy default stream, and None on the host.
  nb::dict keywords;
  if (memory == Memory::kDevice) keywords["stream"] = stream == 0 ? uintptr_t{1} : stream;
  keywords["max_version"] = nb::make_tuple(1, 1);
  try {
    capsule = object.attr("__dlpack__")(**keywords);
  } catch (nb::python_error& error) {
    // Producers older than DLPack 1.0 know no max_version, and NumPy exports no dtype that is not its own.
    if (error.matches(PyExc_TypeError)) {
      nb::dict older;
      if (memory == Memory::kDevice) older["stream"] = keywords["stream"];
      capsule = object.attr("__dlpack__")(**older);
    } else {
      const std::string dtype = nb::hasattr(object, "dtype")
                                    ? nb::cast<std::string>(nb::str(nb::object(object.attr("dtype"))))
                                    : "";
      if (!nb::hasattr(object, "view") || (dtype != "bfloat16" && dtype != "float8_e4m3fn"))
        fail(n, n + " can't be had by DLPack: " + nb::cast<std::string>(nb::str(error.value())));
      known = dtype == "bfloat16" ? Element::kBF16 : Element::kF8E4M3;
      nb::dict view_keywords;
      view_keywords["max_version"] = keywords["max_version"];
      capsule = object.attr("view")(known == Element::kBF16 ? "uint16" : "uint8")
                    .attr("__dlpack__")(**view_keywords);
    }
  }
  from_capsule(capsule.ptr());
  if (known != Element::kOther) element = known;
  owner_ = nb::object(nb::borrow(object)).release().ptr();
}

void Array::from_capsule(PyObject* capsule) {
  const std::string n = name;
  const DLTensor* t = nullptr;
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    auto* m = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    if (m->version.major != 1)
      fail(n, n + " comes by DLPack " + std::to_string(m->version.major) + ": must be version 1");
    PyCapsule_SetName(capsule, "used_dltensor_versioned");
    managed_ = m;
    managed_is_versioned_ = true;
    read_only = (m->flags & kDLFlagReadOnly) != 0;
    t = &m->dl_tensor;
  } else if (PyCapsule_IsValid(capsule, "dltensor")) {
    auto* m = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    PyCapsule_SetName(capsule, "used_dltensor");
    managed_ = m;
    t = &m->dl_tensor;
  } else {
    fail(n, n + ": its __dlpack__() gave no DLPack capsule");
  }
  if (t->ndim < 0 || t->ndim > kMaxDims)
    fail(n, n + " has " + std::to_string(t->ndim) + " axes: at most " + std::to_string(kMaxDims) +
                " are allowed");
  ndim = t->ndim;
  element = element_of(t->dtype);
  int64_t compact = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    shape[i] = t->shape[i];
    strides[i] = t->strides ? t->strides[i] : compact;
    compact *= shape[i];
  }
  data = static_cast<char*>(t->data) + (t->data ? t->byte_offset : 0);
}

void Array::normalise_strides() {
  int64_t count = 1, compact = 1;
  for (int i = 0; i < ndim; ++i)
    if (shape[i] < 0 || __builtin_mul_overflow(count, std::max<int64_t>(shape[i], 1), &count))
      fail(name,
           std::string(name) + " has shape " + shape_text() + ": must have extents that 64 bits can count");
  for (int i = ndim - 1; i >= 0; --i) {
    if (shape[i] <= 1) strides[i] = compact;
    if (shape[i] > 0) compact = shape[i] * strides[i];
  }
}

std::string Array::shape_text() const {
  std::string s = "[";
  for (int i = 0; i < ndim; ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + "]";
}

std::string Array::place() const {
  return memory == Memory::kHost ? "cpu" : "cuda:" + std::to_string(device_id);
}

int64_t Array::size() const {
  int64_t n = 1;
  for (int i = 0; i < ndim; ++i) n *= shape[i];
  return n;
}

bool Array::is_compact() const {
  if (size() == 0) return true;
  int64_t compact = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    if (strides[i] != compact) return false;
    compact *= shape[i];
  }
  return true;
}

void Array::need_element(std::initializer_list<Element> allowed) const {
  std::string list;
  for (Element e : allowed) {
    if (e == element) return;
    list += (list.empty() ? "" : ", ") + std::string(element_name(e));
  }
  fail(name, std::string(name) + " is " + element_name(element) + ": must be " + list);
}

void Array::need_shape(std::initializer_list<int64_t> wanted, const char* symbols) const {
  bool same = ndim == static_cast<int>(wanted.size());
  int i = 0;
  std::string list;
  for (int64_t extent : wanted) {
    same = same && (extent < 0 || extent == shape[i]);
    list += (i ? ", " : "") + (extent < 0 ? std::string("any") : std::to_string(extent));
    ++i;
  }
  if (!same)
    fail(name,
         std::string(name) + " has shape " + shape_text() + ": must be " + symbols + " = [" + list + "]");
}

void Array::need_compact() const {
  if (is_compact()) return;
  std::string list;
  for (int i = 0; i < ndim; ++i) list += (i ? ", " : "") + std::to_string(strides[i]);
  fail(name, std::string(name) + " of shape " + shape_text() + " has strides [" + list +
                 "] elements: must be contiguous, row-major");
}

void Array::need_writable() const {
  if (read_only) fail(name, std::string(name) + " is read-only: must be writable");
}

DType number_dtype(const Array& a) {
  switch (a.element) {
    case Element::kF32:
      return DType::kF32;
    case Element::kF16:
      return DType::kF16;
    case Element::kBF16:
      return DType::kBF16;
    case Element::kF8E4M3:
      return DType::kF8E4M3;
    default:
      a.need_element({Element::kF32, Element::kF16, Element::kBF16, Element::kF8E4M3});
  }
  return DType::kF32;
}

}  // namespace treemla::python
