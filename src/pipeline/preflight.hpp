#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "io/checkpoint.hpp"
#include "io/token_set.hpp"
#include "model/model_spec.hpp"
#include "pipeline/recipe.hpp"
#include "pipeline/targets.hpp"

namespace shardq {

/// Inputs that have passed every check that needs no forward pass.
struct Inputs {
  std::unique_ptr<Checkpoint> checkpoint;
  ModelSpec spec;
  std::unique_ptr<TokenSet> tokens;  ///< empty set for method rtn without tokens
  Selection selection;
  DType compute = DType::bf16;
};

/// Opens and checks model, tokens and recipe against each other. The scheme's scale dtype is set from the checkpoint.
/// Errors: Error(usage) for a missing path key, a group size that does not divide layers (all of them listed), an
/// unsupported combination; Error(input) from the readers.
Inputs check_inputs(Recipe& recipe);

/// Errors of a scheme against the model: group sizes that do not divide, formats that the output cannot hold. Throws
/// Error(usage).
void check_scheme(const QuantScheme& scheme, const ModelSpec& spec, const Selection& selection);

/// What must be the same for a run to be resumed: "model", "tokens", "recipe", "version". Values are short hashes.
std::map<std::string, std::string> run_fingerprint(const Recipe& recipe, const Inputs& inputs);

/// Work directory of a recipe: `work`, or `<output>.work`.
std::string work_directory(const Recipe& recipe);
/// Tokens a chunk: the recipe's, or 2048 on the CPU (fixed chunks should be small enough to share among ranks) and
/// 65536 on CUDA.
int64_t default_chunk_tokens(const Recipe& recipe, bool cuda);
/// The whole recipe's compute dtype for a checkpoint.
DType compute_dtype(const Recipe& recipe, const ModelSpec& spec);

}  // namespace shardq
