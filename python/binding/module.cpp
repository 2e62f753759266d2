// The extension module treemla._core. It takes arrays as they come and writes into arrays that the Python side allocated; what
// people call, with keywords and documentation, is Python code.

#include <nanobind/nanobind.h>

#include <exception>

#include "binding/trees.hpp"
#include "binding/verify.hpp"
#include "treemla/error.hpp"

namespace nb = nanobind;

namespace {

// treemla::Error becomes the class of its code in treemla._errors, which knows how it is made.
void raise(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const treemla::Error& e) {
    const nb::object make = nb::module_::import_("treemla._errors").attr("make");
    const nb::object error = make(static_cast<int>(e.code()), e.argument().c_str(), e.what());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  }
}

}  // namespace

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // a planner that lives until the interpreter ends is no mistake
  nb::register_exception_translator(raise);
  treemla::python::add_verify(m);
  treemla::python::add_trees(m);
}
