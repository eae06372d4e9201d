// turn_credit on a CUDA device: checks the form of the tensors and puts the work on the stream. Contents are not looked
// at, which would wait for the device; the kernel holds every address within its tensor.
#if defined(TRACE_FAST_CUDA)

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "bindings/named_arguments.h"
#include "bindings/tensor_view.h"
#include "bindings/turn_credit_args.h"
#include "cuda/turn_credit.h"

namespace trace_fast {
namespace {

void expect_launched(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("turn_credit: ") + cudaGetErrorString(status));
}

template <class T>
void launch_as(const py::dict& tensors, const py::dict& settings, int shares, bool lengths, cudaStream_t stream,
               Dtype dtype) {
  const TurnCreditArgs<T> args = turn_credit_args<T>(tensors, settings, 1, dtype, "cuda");
  const auto get = [&](const char* name, Dtype type) -> TensorView {
    return dense(item(tensors, name), name, {type}, {args.n_rollouts}, "cuda");
  };
  if (lengths) {
    const TensorView length_R = get("answer_length_R", Dtype::kInt64);
    expect_launched(launch_answer_lengths(args, length_R.as<std::int64_t>(), stream));
    return;
  }
  const double* weight_R = nullptr;
  if (args.with_tokens) {
    const TensorView weights = get("answer_weight_R", Dtype::kFloat64);
    weight_R = weights.as<double>();
  }
  expect_launched(launch_turn_credit(args, weight_R, shares, stream));
}

void launch(const py::dict& tensors, const py::dict& settings, int shares, bool lengths, std::uintptr_t stream) {
  if (shares < 1 || shares > 65535) refuse("shares", "1 to 65535", std::to_string(shares));
  const Dtype dtype =
      view(item(tensors, "mean_logprobs_S"), "mean_logprobs_S", {Dtype::kFloat32, Dtype::kFloat64}, 1, "cuda").dtype;
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  if (dtype == Dtype::kFloat32) {
    launch_as<float>(tensors, settings, shares, lengths, on, dtype);
  } else {
    launch_as<double>(tensors, settings, shares, lengths, on, dtype);
  }
}

}  // namespace

void bind_turn_credit_cuda(py::module_& m) {
  m.def("turn_credit_cuda", &launch, py::arg("tensors"), py::arg("settings"), py::arg("shares"), py::arg("lengths"),
        py::arg("stream"), "Counts the answers (lengths) or fills the outputs; see kernels/turn_credit/cuda_impl.py.");
}

}  // namespace trace_fast

#endif
