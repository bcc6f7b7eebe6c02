#pragma once
#include <string_view>

namespace shardq {

/// Requests to stop at the next safe point: SIGTERM (scancel, preemption), SIGUSR1 (Slurm's warning before the time
/// limit, `--signal=USR1@N`) and SIGINT. The handlers only take a note; the pipeline asks between units of work, agrees
/// over the ranks, stores and exits 85. A second SIGINT ends the process at once, as an impatient user expects.
/// Repeated SIGTERM does not: Slurm sends it twice.
void install_stop_signals();
/// Puts the former handlers back and forgets what was requested.
void remove_stop_signals();

/// True from the first of these signals on. Cheap: one relaxed load.
bool stop_requested();
/// "SIGTERM", "SIGUSR1", "SIGINT": the first that came; empty when none did.
std::string_view stop_signal_name();

}  // namespace shardq
