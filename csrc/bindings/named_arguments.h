// Ops with many arguments take them by name: one dictionary of tensors, one of settings.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "bindings/tensor_view.h"
#include "cpu/elementwise.h"

namespace trace_fast {

inline py::object item(const py::dict& from, const char* name) {
  if (!from.contains(name)) refuse(name, "an entry of that name", "none");
  return from[name];
}

template <class Value>
Value setting(const py::dict& settings, const char* name, const char* expected) {
  const py::object found = item(settings, name);
  try {
    return py::cast<Value>(found);
  } catch (const py::cast_error&) {
    refuse(name, expected, py::str(found));
  }
}

// Raises unless this processor can run elementwise code path `kernel`.
inline void check_elementwise_kernel(const std::string& kernel) {
  std::string names;
  for (const std::string& name : elementwise_kernels()) {
    if (name == kernel) return;
    names += (names.empty() ? "" : ", ") + name;
  }
  refuse("kernel", "one that this processor runs (" + names + ")", kernel);
}

}  // namespace trace_fast
