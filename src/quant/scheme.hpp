#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/grid.hpp"

namespace shardq {

enum class Method { gptq, rtn };
enum class ActOrder { none, static_ };
/// minmax: range of the group. mse: shrunken ranges, unweighted, norm 2.4. hessian: shrunken ranges weighted by
/// diag(H), norm 2.
enum class Observer { minmax, mse, hessian };

/// How one set of modules is quantized. Key names in recipes follow compressed-tensors / llm-compressor.
struct QuantScheme {
  std::string name = "W4A16";  ///< preset it came from, for display
  Grid grid;                   ///< num_bits, symmetric, stored scale dtype
  int64_t group_size = 128;    ///< -1: per channel
  Method method = Method::gptq;
  ActOrder actorder = ActOrder::static_;
  Observer observer = Observer::hessian;
};

/// "W4A16", "W4A16_ASYM", with 2 to 8 bits, optionally followed by "-gN" (N columns a group) or "-channel".
/// Errors: Error(usage) naming the known presets.
/// Source: compressed-tensors quant_scheme.py (weights-only presets: symmetric, group 128).
QuantScheme scheme_preset(const std::string& name);
std::vector<std::string> scheme_preset_names();

/// Columns a group for a layer of `cols` inputs.
inline int64_t group_size_for(const QuantScheme& scheme, int64_t cols) {
  return scheme.group_size < 0 ? cols : scheme.group_size;
}

}  // namespace shardq
