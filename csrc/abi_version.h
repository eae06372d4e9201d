// Version of the interface between this module and trace_fast/native.py. Raise it, and EXPECTED_ABI_VERSION there,
// whenever an exported name, its arguments or their meaning change.
#pragma once

namespace trace_fast {

inline constexpr int kAbiVersion = 3;

}  // namespace trace_fast
