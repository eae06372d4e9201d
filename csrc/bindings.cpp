// Exports only: every function here converts arguments and calls framework-free code.
#include <pybind11/pybind11.h>

#include "abi_version.h"
#include "cpu/cpu_features.h"

namespace py = pybind11;

namespace trace_fast {
void bind_prefix_attention(py::module_& m);
void bind_policy_loss(py::module_& m);
void bind_turn_credit(py::module_& m);
#if defined(TRACE_FAST_CUDA)
void bind_turn_credit_cuda(py::module_& m);
#endif
}  // namespace trace_fast

namespace {

py::dict cpu_features() {
  const trace_fast::CpuFeatures f = trace_fast::detect_cpu_features();
  py::dict d;
  d["avx"] = f.avx;
  d["f16c"] = f.f16c;
  d["fma"] = f.fma;
  d["avx2"] = f.avx2;
  d["avx_vnni"] = f.avx_vnni;
  d["avx512f"] = f.avx512f;
  d["avx512bw"] = f.avx512bw;
  d["avx512dq"] = f.avx512dq;
  d["avx512vl"] = f.avx512vl;
  d["avx512_vnni"] = f.avx512_vnni;
  d["avx512_bf16"] = f.avx512_bf16;
  d["avx512_fp16"] = f.avx512_fp16;
  d["amx_tile"] = f.amx_tile;
  d["amx_int8"] = f.amx_int8;
  d["amx_bf16"] = f.amx_bf16;
  d["amx_fp16"] = f.amx_fp16;
  d["neon"] = f.neon;
  d["neon_fp16"] = f.neon_fp16;
  d["neon_dotprod"] = f.neon_dotprod;
  d["neon_bf16"] = f.neon_bf16;
  d["neon_i8mm"] = f.neon_i8mm;
  d["sve"] = f.sve;
  d["sve2"] = f.sve2;
  return d;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native part of trace_fast; use it through trace_fast.native.";
  m.def("abi_version", [] { return trace_fast::kAbiVersion; }, "Version of this module's interface.");
  m.def("cpu_features", &cpu_features,
        "Instruction sets that processor and operating system allow now, by name; all names on every architecture.");
  trace_fast::bind_prefix_attention(m);
  trace_fast::bind_policy_loss(m);
  trace_fast::bind_turn_credit(m);
#if defined(TRACE_FAST_CUDA)
  trace_fast::bind_turn_credit_cuda(m);
#endif
}
