// policy_loss: checks the form of the tensors, then runs without Python's lock (contents are checked there).
#include <pybind11/pybind11.h>

#include <string>

#include "bindings/named_arguments.h"
#include "bindings/tensor_view.h"
#include "cpu/policy_loss.h"

namespace trace_fast {
namespace {

void count(const py::handle& mask_N, const py::handle& cu_tokens_R1, const py::handle& n_tokens_R, int n_threads) {
  if (n_threads < 1) refuse("n_threads", "at least 1", std::to_string(n_threads));
  const TensorView mask = flat(mask_N, "mask_N", {Dtype::kBool});
  const TensorView counts = flat(n_tokens_R, "n_tokens_R", {Dtype::kInt64});
  const TensorView cu = dense(cu_tokens_R1, "cu_tokens_R1", {Dtype::kInt64}, {counts.size(0) + 1});
  const py::gil_scoped_release unlocked;
  count_tokens(mask.as<bool>(), mask.size(0), cu.as<std::int64_t>(), counts.size(0), n_threads,
               counts.as<std::int64_t>());
}

template <class T>
void run_as(const py::dict& tensors, const py::dict& settings, int n_threads, const std::string& kernel, Dtype dtype) {
  PolicyLossArgs<T> a{};
  a.n_threads = n_threads;
  a.sequence_ratio = setting<bool>(settings, "sequence_ratio", "a bool");
  a.clip_low = setting<double>(settings, "clip_low", "a number");
  a.clip_high = setting<double>(settings, "clip_high", "a number");
  a.max_log_ratio = setting<double>(settings, "max_log_ratio", "a number");
  a.tis_cap = setting<double>(settings, "tis_cap", "a number");

  const TensorView logprobs = flat(item(tensors, "logprobs_N"), "logprobs_N", {dtype});
  a.logprobs_N = logprobs.as<T>();
  a.n_tokens = logprobs.size(0);
  const TensorView counts = flat(item(tensors, "n_tokens_R"), "n_tokens_R", {Dtype::kInt64});
  a.n_tokens_R = counts.as<std::int64_t>();
  a.n_rollouts = counts.size(0);
  const auto get = [&](const char* name, Dtype type, std::int64_t length) {
    return dense(item(tensors, name), name, {type}, {length});
  };
  a.old_logprobs_N = get("old_logprobs_N", dtype, a.n_tokens).template as<T>();
  a.advantages_N = get("advantages_N", dtype, a.n_tokens).template as<T>();
  a.mask_N = get("mask_N", Dtype::kBool, a.n_tokens).template as<bool>();
  if (tensors.contains("sampler_logprobs_N")) {
    a.sampler_logprobs_N = get("sampler_logprobs_N", dtype, a.n_tokens).template as<T>();
  }
  a.cu_tokens_R1 = get("cu_tokens_R1", Dtype::kInt64, a.n_rollouts + 1).template as<std::int64_t>();
  a.weight_R = get("weight_R", Dtype::kFloat64, a.n_rollouts).template as<double>();
  a.grads_N = get("grads_N", dtype, a.n_tokens).template as<T>();
  a.sums = get("sums", Dtype::kFloat64, kSums).template as<double>();
  a.histogram = get("histogram", Dtype::kInt64, kLogRatioBins).template as<std::int64_t>();
  const py::gil_scoped_release unlocked;
  policy_loss(a, kernel);
}

void run(const py::dict& tensors, const py::dict& settings, int n_threads, const std::string& kernel) {
  if (n_threads < 1) refuse("n_threads", "at least 1", std::to_string(n_threads));
  check_elementwise_kernel(kernel);
  const Dtype dtype = view(item(tensors, "logprobs_N"), "logprobs_N", {Dtype::kFloat32, Dtype::kFloat64}, 1).dtype;
  if (dtype == Dtype::kFloat32) {
    run_as<float>(tensors, settings, n_threads, kernel, dtype);
  } else {
    run_as<double>(tensors, settings, n_threads, kernel, dtype);
  }
}

// Places in the sums by the names of kernels/policy_loss/metrics.py.
py::dict sum_places() {
  py::dict places;
  places["LOSS"] = static_cast<int>(kLoss);
  places["TOKENS"] = static_cast<int>(kTokens);
  places["CLIPPED_LOW"] = static_cast<int>(kClippedLow);
  places["CLIPPED_HIGH"] = static_cast<int>(kClippedHigh);
  places["KL"] = static_cast<int>(kKl);
  places["RATIO"] = static_cast<int>(kRatio);
  places["TIS"] = static_cast<int>(kTis);
  places["TIS_CLIPPED"] = static_cast<int>(kTisClipped);
  places["MIN_LOG_RATIO"] = static_cast<int>(kMinLogRatio);
  places["MAX_LOG_RATIO"] = static_cast<int>(kMaxLogRatio);
  return places;
}

}  // namespace

void bind_policy_loss(py::module_& m) {
  m.attr("POLICY_LOSS_SUMS") = static_cast<int>(kSums);
  m.attr("POLICY_LOSS_SUM_PLACES") = sum_places();
  m.attr("POLICY_LOSS_BINS") = kLogRatioBins;
  m.attr("POLICY_LOSS_BINS_PER_OCTAVE") = kLogRatioBinsPerOctave;
  m.attr("POLICY_LOSS_LOWEST_EXPONENT") = kLogRatioLowestExponent;
  m.def("policy_loss_counts", &count, py::arg("mask"), py::arg("cu_tokens"), py::arg("n_tokens"), py::arg("n_threads"),
        "Trained tokens of each rollout, into the last tensor.");
  m.def("policy_loss", &run, py::arg("tensors"), py::arg("settings"), py::arg("n_threads"), py::arg("kernel"),
        "Fills grads_N, sums and histogram in `tensors`; see kernels/policy_loss/native_impl.py.");
}

}  // namespace trace_fast
