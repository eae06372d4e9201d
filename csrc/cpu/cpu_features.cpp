#include "cpu/cpu_features.h"

#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#define TRACE_FAST_X86_64 1
#if defined(_MSC_VER)
#include <immintrin.h>
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

#include <cstddef>
#endif

namespace trace_fast {
namespace {

#if defined(TRACE_FAST_X86_64)

struct CpuidRegisters {
  std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// All zero where the processor does not know the leaf or subleaf.
CpuidRegisters cpuid(std::uint32_t leaf, std::uint32_t subleaf) {
  CpuidRegisters r;
#if defined(_MSC_VER)
  int v[4];
  __cpuid(v, 0);
  if (static_cast<std::uint32_t>(v[0]) < leaf) return r;
  __cpuidex(v, static_cast<int>(leaf), static_cast<int>(subleaf));
  r.eax = static_cast<std::uint32_t>(v[0]);
  r.ebx = static_cast<std::uint32_t>(v[1]);
  r.ecx = static_cast<std::uint32_t>(v[2]);
  r.edx = static_cast<std::uint32_t>(v[3]);
#else
  if (!__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx)) return CpuidRegisters{};
#endif
  return r;
}

// XCR0: the register states that the operating system saves. Call only when CPUID reports OSXSAVE.
std::uint64_t read_xcr0() {
#if defined(_MSC_VER)
  return _xgetbv(0);
#else
  std::uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<std::uint64_t>(high) << 32) | low;
#endif
}

bool bit(std::uint32_t value, int index) { return ((value >> index) & 1u) != 0; }

CpuFeatures detect() {
  CpuFeatures f;
  const CpuidRegisters leaf1 = cpuid(1, 0);
  if (!bit(leaf1.ecx, 27)) return f;  // no OSXSAVE: no state beyond SSE is saved

  constexpr std::uint64_t kAvxState = 0x6;       // XMM, YMM
  constexpr std::uint64_t kAvx512State = 0xe6;   // and opmask, ZMM0-15 upper halves, ZMM16-31
  constexpr std::uint64_t kAmxState = 0x60000;   // tile configuration, tile data
  const std::uint64_t xcr0 = read_xcr0();
  const bool os_avx = (xcr0 & kAvxState) == kAvxState;
  const bool os_avx512 = (xcr0 & kAvx512State) == kAvx512State;
  const bool os_amx = (xcr0 & kAmxState) == kAmxState;

  const CpuidRegisters leaf7 = cpuid(7, 0);
  const CpuidRegisters leaf7_1 = leaf7.eax >= 1 ? cpuid(7, 1) : CpuidRegisters{};

  f.avx = os_avx && bit(leaf1.ecx, 28);
  f.f16c = f.avx && bit(leaf1.ecx, 29);
  f.fma = f.avx && bit(leaf1.ecx, 12);
  f.avx2 = f.avx && bit(leaf7.ebx, 5);
  f.avx_vnni = f.avx && bit(leaf7_1.eax, 4);

  f.avx512f = os_avx512 && bit(leaf7.ebx, 16);
  f.avx512dq = f.avx512f && bit(leaf7.ebx, 17);
  f.avx512bw = f.avx512f && bit(leaf7.ebx, 30);
  f.avx512vl = f.avx512f && bit(leaf7.ebx, 31);
  f.avx512_vnni = f.avx512f && bit(leaf7.ecx, 11);
  f.avx512_fp16 = f.avx512f && bit(leaf7.edx, 23);
  f.avx512_bf16 = f.avx512f && bit(leaf7_1.eax, 5);

  f.amx_tile = os_amx && bit(leaf7.edx, 24);
  f.amx_int8 = f.amx_tile && bit(leaf7.edx, 25);
  f.amx_bf16 = f.amx_tile && bit(leaf7.edx, 22);
  f.amx_fp16 = f.amx_tile && bit(leaf7_1.eax, 21);
  return f;
}

#elif defined(__aarch64__) && defined(__linux__)

// Bit numbers of the kernel's AArch64 ABI, spelled out because older C libraries lack the newer names.
CpuFeatures detect() {
  const unsigned long hwcap = getauxval(AT_HWCAP);
  const unsigned long hwcap2 = getauxval(AT_HWCAP2);
  const auto bit = [](unsigned long value, int index) { return ((value >> index) & 1ul) != 0; };
  CpuFeatures f;
  f.neon = bit(hwcap, 1);           // HWCAP_ASIMD
  f.neon_fp16 = bit(hwcap, 10);     // HWCAP_ASIMDHP
  f.neon_dotprod = bit(hwcap, 20);  // HWCAP_ASIMDDP
  f.sve = bit(hwcap, 22);           // HWCAP_SVE
  f.sve2 = bit(hwcap2, 1);          // HWCAP2_SVE2
  f.neon_i8mm = bit(hwcap2, 13);    // HWCAP2_I8MM
  f.neon_bf16 = bit(hwcap2, 14);    // HWCAP2_BF16
  return f;
}

#elif defined(__aarch64__) && defined(__APPLE__)

bool sysctl_flag(const char* name) {
  int value = 0;
  std::size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}

CpuFeatures detect() {
  CpuFeatures f;
  f.neon = true;  // part of the architecture's base on this system
  f.neon_fp16 = sysctl_flag("hw.optional.arm.FEAT_FP16");
  f.neon_dotprod = sysctl_flag("hw.optional.arm.FEAT_DotProd");
  f.neon_bf16 = sysctl_flag("hw.optional.arm.FEAT_BF16");
  f.neon_i8mm = sysctl_flag("hw.optional.arm.FEAT_I8MM");
  return f;
}

#else

CpuFeatures detect() { return CpuFeatures{}; }

#endif

}  // namespace

CpuFeatures detect_cpu_features() { return detect(); }

}  // namespace trace_fast
