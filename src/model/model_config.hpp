#pragma once
#include <string>
#include <vector>

#include "model/model_spec.hpp"

namespace shardq {

/// What config.json says, with the defaults of transformers filled in, before any tensor is looked at.
struct ModelConfig {
  ModelSpec spec;                ///< scalar fields only
  std::vector<int64_t> windows;  ///< [layers] sliding window, 0: full attention
  std::vector<bool> moe;         ///< [layers]
  bool qkv_bias = false, o_bias = false, mlp_bias = false, qk_norm = false;
};

/// Errors: Error(input) naming `where` and the key.
ModelConfig parse_model_config(const std::string& text, const std::string& where);

/// Fills spec.other_linears, under the names that the output will have.
void list_other_linears(ModelSpec& spec);

}  // namespace shardq
