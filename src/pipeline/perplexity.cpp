#include "pipeline/perplexity.hpp"

#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "core/error.hpp"
#include "core/timer.hpp"
#include "io/token_set.hpp"
#include "model/causal_lm.hpp"
#include "model/model_spec.hpp"
#include "pipeline/progress.hpp"

namespace shardq {
namespace {

DType compute_of(const EvalOptions& options, const ModelSpec& spec) {
  SHARDQ_CHECK(options.compute.empty() || options.compute == "bf16" || options.compute == "f32", ExitCode::usage,
               "--compute: expected bf16 or f32, found '{}'", options.compute);
  if (options.compute == "bf16") return DType::bf16;
  if (options.compute == "f32") return DType::f32;
  return spec.dtype == DType::bf16 ? DType::bf16 : DType::f32;
}

EvalResult evaluate_share(const EvalOptions& options, const std::string& directory, Backend& backend,
                          Communicator& host) {
  EvalResult result;
  agree(host, [&] {
    const Checkpoint checkpoint(directory);
    const ModelSpec spec = read_model_spec(checkpoint);
    const TokenSet tokens(options.tokens, spec.vocab, options.samples);
    const Range mine = part(tokens.size(), host.size(), host.rank());
    std::vector<int64_t> samples(mine.size());
    std::iota(samples.begin(), samples.end(), mine.begin);
    Progress progress(host.rank() == 0, 1.0);
    result = evaluate(backend, checkpoint, spec, tokens, samples, compute_of(options, spec),
                      [&](int64_t done, int64_t total) {
                        report_progress("eval: a layer");
                        progress.show(static_cast<double>(done) / static_cast<double>(total), 0, "eval");
                      });
    progress.finish();
  });
  return result;
}

}  // namespace

std::string run_eval(const EvalOptions& options, Backend& backend, Communicator& host, bool json) {
  Stopwatch watch;
  const EvalResult result = evaluate_share(options, options.model, backend, host);
  double sums[] = {result.loss_sum, static_cast<double>(result.tokens), 0};
  if (!options.against.empty()) {
    const EvalResult other = evaluate_share(options, options.against, backend, host);
    SHARDQ_CHECK(other.tokens == result.tokens, ExitCode::input, "--against: {} predicted tokens, expected {}",
                 other.tokens, result.tokens);
    sums[2] = agreement(result, other) * static_cast<double>(result.tokens);
  }
  host.all_reduce_sum(sums, 3);
  SHARDQ_CHECK(sums[1] > 0, ExitCode::input, "{}: no token to predict (every sample has a single token)",
               options.tokens);
  const double perplexity = std::exp(sums[0] / sums[1]), agreed = sums[2] / sums[1];
  if (json) {
    nlohmann::ordered_json out{{"model", options.model},     {"perplexity", perplexity},
                               {"loss", sums[0] / sums[1]},  {"tokens", static_cast<int64_t>(sums[1])},
                               {"seconds", watch.seconds()}, {"device", backend.name()}};
    if (!options.against.empty()) out["top1_agreement"] = agreed;
    return out.dump(1);
  }
  std::string text = fmt::format("perplexity {:.4f} over {} tokens ({})", perplexity, static_cast<int64_t>(sums[1]),
                                 readable_seconds(watch.seconds()));
  if (!options.against.empty()) text += fmt::format(", top-1 agreement {:.2f} %", 100 * agreed);
  return text;
}

}  // namespace shardq
