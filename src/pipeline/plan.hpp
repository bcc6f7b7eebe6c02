#pragma once
#include <string>
#include <vector>

#include "pipeline/preflight.hpp"

namespace shardq {

/// What a plan is made for: the job's size and the machine's rates. Rates are measured ones (see bench/README.md) and
/// only scale the time estimate.
struct PlanMachine {
  int ranks = 1;
  bool cuda = false;
  int64_t device_memory = 0;  ///< bytes a rank may use; 0: unknown
  double gemm_rate = 60e9;    ///< FLOP/s a rank, forward
  double gram_rate = 60e9;    ///< FLOP/s a rank counted as 2 T n^2
  double solve_rate = 40e9;   ///< FLOP/s a rank of factorisation and updates
  double disk_rate = 0.5e9;   ///< bytes/s of the node
  double wire_rate = 2e9;     ///< bytes/s a rank sends in a collective
};

/// Rates of one H200 as bench/ measured them (a guess for other devices), or of two CPU cores. device_memory: bytes a
/// rank may use, 0 where unknown.
PlanMachine plan_machine(int ranks, bool cuda, int64_t device_memory);

/// Memory and work of one kind of layer (layers alike are merged).
struct PlanLayer {
  std::string kind;  ///< "dense" or "moe"
  int64_t count = 0;
  int64_t weight_bytes = 0, hessian_bytes = 0, wave_count = 1;
  double forward_flops = 0, hessian_flops = 0, solve_flops = 0;  ///< one layer, all ranks together
  /// Bytes a rank sends per layer for Hessians or tokens, by plan; and to share out weights and codes, whatever the
  /// plan. All are 0 on one rank.
  int64_t sent_all_reduce = 0, sent_reduce_scatter = 0, sent_all_to_all = 0;
  int64_t sent_weights = 0, sent_weights_owned = 0;  ///< read: share; the same when experts stay with their owners
  int64_t sent_codes = 0;
};

/// How activations fit a rank's memory.
struct Fit {
  int64_t chunk_tokens = 0;
  bool offload = false;
};
/// The recipe's chunks and place of activations. Where it leaves them open and the device's memory is known, the first
/// of these whose planned peak fits: large chunks, smaller ones, activations in host memory with ever smaller chunks.
/// Chunks are left as they are where sums are order-free, since they decide the bits. Meant for devices: the host's own
/// memory is no place to go to.
Fit fit_to_memory(const Recipe& recipe, const Inputs& inputs, const PlanMachine& machine, ReducePlan reduce);

/// The recipe's plan, or where it says auto the one that costs least: bytes sent at the wire's rate, and every walk
/// over the chunks that the memory budget forces at the forward pass's and the Hessian's. Tokens go to owners only
/// where routed experts are quantized and every rank can own one.
ReducePlan choose_reduce(const Recipe& recipe, const Inputs& inputs, const PlanMachine& machine);
/// The recipe's way of reading, or where it says auto: share on several GPUs.
ReadMode choose_read(const Recipe& recipe, const PlanMachine& machine);
std::string to_string(ReducePlan plan);

struct Plan {
  std::string model_type, scheme, reduce, read;
  int64_t parameters = 0, quantized_linears = 0, ignored_linears = 0;
  int64_t samples = 0, tokens = 0, longest = 0, chunk_tokens = 0;
  int ranks = 1;
  std::vector<PlanLayer> layers;
  bool offload = false;
  int64_t host_bytes = 0;  ///< page-locked host memory for activations, a rank
  int64_t hidden_bytes = 0, kept_bytes = 0, weight_bytes = 0, hessian_bytes = 0, solve_bytes = 0, scratch_bytes = 0,
          peak_bytes = 0;  ///< a rank
  int64_t input_bytes = 0, output_bytes = 0, stage_bytes = 0, disk_free = 0;
  double forward_seconds = 0, hessian_seconds = 0, solve_seconds = 0, read_seconds = 0, reduce_seconds = 0,
         total_seconds = 0;
  std::vector<std::string> tensor_parallel;  ///< "moe down_proj (768 inputs): loads at TP 1, 2"
  std::vector<std::string> warnings;
};

/// Everything that can be predicted before the first forward pass. Errors: those of check_inputs.
Plan make_plan(const Recipe& recipe, const Inputs& inputs, const PlanMachine& machine);
std::string readable_plan(const Plan& plan);
std::string plan_json(const Plan& plan);

}  // namespace shardq
