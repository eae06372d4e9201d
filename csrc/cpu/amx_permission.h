// AMX tile registers are 8 KiB a thread, which Linux saves only for processes that asked for them.
#pragma once

namespace trace_fast {

// Asks for this process, its threads of before and after included. False where the system does not grant it, and on
// systems other than Linux, where nobody is known to ask.
bool request_amx_tiles();

}  // namespace trace_fast
