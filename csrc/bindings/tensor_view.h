// A torch.Tensor seen as pointer, shape and strides, without linking torch: its Python attributes are read and checked,
// so that kernels never see a wrong device, type or size. Every violation is a ValueError that names the argument.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

namespace trace_fast {

namespace py = pybind11;

enum class Dtype { kFloat64, kFloat32, kBfloat16, kFloat16, kInt64, kInt32, kBool };

inline const char* name_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64: return "torch.float64";
    case Dtype::kFloat32: return "torch.float32";
    case Dtype::kBfloat16: return "torch.bfloat16";
    case Dtype::kFloat16: return "torch.float16";
    case Dtype::kInt64: return "torch.int64";
    case Dtype::kInt32: return "torch.int32";
    case Dtype::kBool: return "torch.bool";
  }
  return "?";
}

struct TensorView {
  void* data = nullptr;
  Dtype dtype = Dtype::kFloat32;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // in elements
  std::string name;

  template <class T>
  T* as() const { return static_cast<T*>(data); }
  std::int64_t size(int axis) const { return shape[static_cast<std::size_t>(axis)]; }
  std::int64_t stride(int axis) const { return strides[static_cast<std::size_t>(axis)]; }
};

[[noreturn]] inline void refuse(const std::string& name, const std::string& expected, const std::string& got) {
  throw py::value_error(name + ": expected " + expected + ", got " + got);
}

inline std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return "shape " + text + (shape.size() == 1 ? ",)" : ")");
}

// device: "cpu" or "cuda", compared with tensor.device.type.
inline TensorView view(const py::handle& tensor, const std::string& name, std::initializer_list<Dtype> dtypes, int ndim,
                       const std::string& device = "cpu") {
  for (const char* attribute : {"data_ptr", "shape", "stride", "dtype", "device"}) {
    if (!py::hasattr(tensor, attribute)) refuse(name, "a torch.Tensor", py::str(py::type::handle_of(tensor)));
  }
  const std::string where = py::str(tensor.attr("device").attr("type"));
  if (where != device) refuse(name, "a tensor on " + device, where);
  const std::string type = py::str(tensor.attr("dtype"));
  TensorView found;
  found.name = name;
  bool known = false;
  std::string allowed;
  for (Dtype dtype : dtypes) {
    allowed += (allowed.empty() ? "" : " or ") + std::string(name_of(dtype));
    if (type == name_of(dtype)) {
      found.dtype = dtype;
      known = true;
    }
  }
  if (!known) refuse(name, allowed, type);
  for (const py::handle& extent : tensor.attr("shape")) found.shape.push_back(py::cast<std::int64_t>(extent));
  for (const py::handle& step : tensor.attr("stride")()) found.strides.push_back(py::cast<std::int64_t>(step));
  if (static_cast<int>(found.shape.size()) != ndim) {
    refuse(name, std::to_string(ndim) + " dimension" + (ndim == 1 ? "" : "s"), shape_text(found.shape));
  }
  const auto address = py::cast<std::uintptr_t>(tensor.attr("data_ptr")());
  const auto element = py::cast<std::uintptr_t>(tensor.attr("element_size")());
  if (address % element != 0) {
    refuse(name, "memory aligned to its elements of " + std::to_string(element) + " bytes",
           "an address that is " + std::to_string(address % element) + " beyond");
  }
  found.data = reinterpret_cast<void*>(address);
  return found;
}

// A dense tensor: strides are those of its shape (extents of one may have any).
inline TensorView dense(const py::handle& tensor, const std::string& name, std::initializer_list<Dtype> dtypes,
                        const std::vector<std::int64_t>& shape, const std::string& device = "cpu") {
  TensorView found = view(tensor, name, dtypes, static_cast<int>(shape.size()), device);
  if (found.shape != shape) refuse(name, shape_text(shape), shape_text(found.shape));
  std::int64_t step = 1;
  for (std::int64_t extent : shape) {
    if (extent == 0) return found;  // nothing to step over
  }
  for (int axis = static_cast<int>(shape.size()) - 1; axis >= 0; --axis) {
    if (found.size(axis) > 1 && found.stride(axis) != step) {
      refuse(name, "a contiguous tensor", "stride " + std::to_string(found.stride(axis)) + " on axis " + std::to_string(axis));
    }
    step *= found.size(axis);
  }
  return found;
}

// A flat contiguous tensor of any length.
inline TensorView flat(const py::handle& tensor, const std::string& name, std::initializer_list<Dtype> dtypes,
                       const std::string& device = "cpu") {
  const TensorView found = view(tensor, name, dtypes, 1, device);
  return dense(tensor, name, dtypes, found.shape, device);
}

}  // namespace trace_fast
