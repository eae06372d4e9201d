// What the processor and the operating system allow at run time. Kernels dispatch on this, never on compile flags,
// so that one build runs on every processor of its architecture.
#pragma once

namespace trace_fast {

// One flag an instruction set. All flags exist on every architecture; those of others are false.
// A flag is true only when the processor has the instructions AND the operating system saves their registers.
struct CpuFeatures {
  // x86-64
  bool avx = false;
  bool f16c = false;
  bool fma = false;
  bool avx2 = false;
  bool avx_vnni = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512dq = false;
  bool avx512vl = false;
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool avx512_fp16 = false;
  // Linux hands the AMX tile registers out a process at a time: a kernel must ask for them
  // (arch_prctl ARCH_REQ_XCOMP_PERM) before its first tile instruction; these flags say that they can be had.
  bool amx_tile = false;
  bool amx_int8 = false;
  bool amx_bf16 = false;
  bool amx_fp16 = false;
  // AArch64
  bool neon = false;
  bool neon_fp16 = false;
  bool neon_dotprod = false;
  bool neon_bf16 = false;
  bool neon_i8mm = false;
  bool sve = false;
  bool sve2 = false;
};

CpuFeatures detect_cpu_features();

}  // namespace trace_fast
