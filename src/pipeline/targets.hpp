#pragma once
#include <string>
#include <vector>

#include "model/model_spec.hpp"

namespace shardq {

/// True when one of `patterns` names the module: an exact module name, "re:" + regular expression anchored at the
/// start, or the class name "Linear" (every module here is one). Source: compressed-tensors match.py. Errors:
/// Error(usage) for an invalid regular expression.
bool matches_any(const std::vector<std::string>& patterns, const std::string& module);

/// Which linears are quantized.
struct Selection {
  std::vector<std::vector<bool>> quantized;  ///< [layer][index into LayerSpec::linears]
  std::vector<std::string>
      ignored;  ///< full names of every linear that is not, in module order (with routers and lm_head)
  int64_t count = 0;
  bool any(const LayerSpec& layer, Tap tap) const;
};

/// Applies targets and ignore lists. Errors: Error(usage) when nothing is left, or when a pattern that is no "re:"
/// matches nothing.
Selection select_linears(const ModelSpec& spec, const std::vector<std::string>& targets,
                         const std::vector<std::string>& ignore);

}  // namespace shardq
