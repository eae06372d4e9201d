// turn_credit: checks the form of the tensors, then runs without Python's lock (contents are checked there).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "bindings/named_arguments.h"
#include "bindings/tensor_view.h"
#include "bindings/turn_credit_args.h"
#include "cpu/elementwise.h"
#include "cpu/turn_credit.h"

namespace trace_fast {
namespace {

template <class T>
void run_as(const py::dict& tensors, const py::dict& settings, int n_threads, const std::string& kernel, Dtype dtype) {
  const TurnCreditArgs<T> args = turn_credit_args<T>(tensors, settings, n_threads, dtype, "cpu");
  const py::gil_scoped_release unlocked;
  turn_credit(args, kernel);
}

void run(const py::dict& tensors, const py::dict& settings, int n_threads, const std::string& kernel) {
  if (n_threads < 1) refuse("n_threads", "at least 1", std::to_string(n_threads));
  check_elementwise_kernel(kernel);
  const auto floats = {Dtype::kFloat32, Dtype::kFloat64};
  const Dtype dtype = view(item(tensors, "mean_logprobs_S"), "mean_logprobs_S", floats, 1).dtype;
  if (dtype == Dtype::kFloat32) {
    run_as<float>(tensors, settings, n_threads, kernel, dtype);
  } else {
    run_as<double>(tensors, settings, n_threads, kernel, dtype);
  }
}

}  // namespace

void bind_turn_credit(py::module_& m) {
  m.attr("TURN_CREDIT_LARGEST_SETTING") = kLargestCreditSetting;
  m.def("elementwise_kernels", &elementwise_kernels,
        "Instruction sets that this processor can use for turn_credit and policy_loss, fastest first.");
  m.def("turn_credit", &run, py::arg("tensors"), py::arg("settings"), py::arg("n_threads"), py::arg("kernel"),
        "Fills the output tensors named in `tensors`; see kernels/turn_credit/native_impl.py.");
}

}  // namespace trace_fast
