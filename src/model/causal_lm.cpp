#include "model/causal_lm.hpp"

#include <algorithm>
#include <cmath>

#include "core/error.hpp"
#include "model/embedding.hpp"
#include "model/layer_forward.hpp"
#include "model/layer_reader.hpp"
#include "model/weight_source.hpp"

namespace shardq {

namespace {

constexpr int64_t kChunkTokens = 4096;             ///< tokens that go through a layer together
constexpr int64_t kLogitBytes = int64_t{1} << 27;  ///< memory for one block of logits

/// Samples that go together, whole.
struct Chunk {
  ChunkState state;
  std::vector<int64_t> which;  ///< indices into the list of samples asked for
};

std::vector<Chunk> embed_samples(Backend& backend, const Checkpoint& checkpoint, const ModelSpec& spec,
                                 const TokenSet& tokens, std::span<const int64_t> samples, DType compute) {
  const Embedding embed(backend, checkpoint, spec, compute);
  std::vector<Chunk> chunks;
  std::vector<int32_t> ids;
  Chunk current;
  current.state.starts = {0};
  const auto close = [&] {
    if (ids.empty()) return;
    current.state.hidden = embed(ids);
    chunks.push_back(std::move(current));
    current = Chunk();
    current.state.starts = {0};
    ids.clear();
  };
  for (size_t i = 0; i < samples.size(); ++i) {
    const auto sample = tokens[samples[i]];
    if (!ids.empty() && static_cast<int64_t>(ids.size() + sample.size()) > kChunkTokens) close();
    ids.insert(ids.end(), sample.begin(), sample.end());
    current.state.starts.push_back(static_cast<int64_t>(ids.size()));
    current.which.push_back(static_cast<int64_t>(i));
  }
  close();
  return chunks;
}

/// Losses of one sample from its last hidden states.
class Head {
 public:
  Head(Backend& backend, const ModelSpec& spec, const WeightSource& source, DType compute)
      : backend_(backend),
        spec_(spec),
        norm_(source.load_tensor(backend, spec.final_norm, compute, true)),
        weight_(source.load_tensor(backend, spec.lm_head, compute, true)),
        block_(std::clamp<int64_t>(kLogitBytes / (spec.vocab * size_of(compute)), 1, kChunkTokens)),
        scratch_(backend, compute, {block_, spec.hidden}, "normed hidden states"),
        logits_(backend, compute, {block_, spec.vocab}, "logits") {}

  double score(MatrixView hidden, std::span<const int32_t> ids, std::vector<int32_t>& best) {
    const int64_t predicted = static_cast<int64_t>(ids.size()) - 1;
    best.resize(std::max<int64_t>(predicted, 0));
    double sum = 0;
    std::vector<double> losses(block_);
    for (int64_t begin = 0; begin < predicted; begin += block_) {
      const int64_t end = std::min(begin + block_, predicted);
      const MatrixView logits = logits_.matrix().row_range(0, end - begin);
      head_logits(backend_, spec_, norm_, weight_, hidden.row_range(begin, end),
                  scratch_.matrix().row_range(0, end - begin), logits);
      backend_.cross_entropy(logits, ids.data() + begin + 1, losses.data(), best.data() + begin);
      for (int64_t i = 0; i < end - begin; ++i) sum += losses[i];
    }
    return sum;
  }

 private:
  Backend& backend_;
  const ModelSpec& spec_;
  Tensor norm_, weight_;
  int64_t block_;
  Tensor scratch_, logits_;
};

}  // namespace

double EvalResult::perplexity() const {
  return tokens > 0 ? std::exp(loss_sum / static_cast<double>(tokens)) : 0;
}

void head_logits(Backend& backend, const ModelSpec& spec, const Tensor& final_norm, const Tensor& lm_head,
                 MatrixView hidden, MatrixView scratch, MatrixView logits) {
  backend.rms_norm(hidden, final_norm.data(), final_norm.dtype(), static_cast<float>(spec.rms_norm_eps), scratch);
  backend.linear(scratch, lm_head.matrix(), nullptr, logits, false);
}

EvalResult evaluate(Backend& backend, const Checkpoint& checkpoint, const ModelSpec& spec, const TokenSet& tokens,
                    std::span<const int64_t> samples, DType compute, const EvalProgress& progress) {
  const WeightSource source(checkpoint, spec);
  const RopeTable rope = rope_table(spec, std::max<int64_t>(tokens.longest(), 1));
  std::vector<Chunk> chunks = embed_samples(backend, checkpoint, spec, tokens, samples, compute);
  LayerReader layers(backend, source, spec, compute, true);
  for (const LayerSpec& layer : spec.layer) {
    const LayerWeights weights = layers.get(layer.index);
    LayerForward forward(backend, spec, layer, weights, rope, compute);
    for (Chunk& chunk : chunks) {
      for (Tap tap : kTaps) forward.to(tap, chunk.state);
      forward.finish(chunk.state);
    }
    if (progress) progress(layer.index + 1, spec.layers + 1);
  }
  EvalResult result;
  result.sample_losses.resize(samples.size());
  result.best.resize(samples.size());
  Head head(backend, spec, source, compute);
  for (const Chunk& chunk : chunks) {
    for (size_t s = 0; s < chunk.which.size(); ++s) {
      const int64_t i = chunk.which[s];
      const auto hidden = chunk.state.hidden.matrix().row_range(chunk.state.starts[s], chunk.state.starts[s + 1]);
      result.sample_losses[i] = head.score(hidden, tokens[samples[i]], result.best[i]);
      result.loss_sum += result.sample_losses[i];
      result.tokens += static_cast<int64_t>(result.best[i].size());
    }
  }
  if (progress) progress(spec.layers + 1, spec.layers + 1);
  return result;
}

double agreement(const EvalResult& a, const EvalResult& b) {
  SHARDQ_CHECK(a.tokens == b.tokens && a.best.size() == b.best.size(), ExitCode::internal,
               "agreement of results over {} and {} tokens", a.tokens, b.tokens);
  int64_t same = 0;
  for (size_t i = 0; i < a.best.size(); ++i)
    for (size_t t = 0; t < a.best[i].size(); ++t) same += a.best[i][t] == b.best[i].at(t);
  return a.tokens > 0 ? static_cast<double>(same) / static_cast<double>(a.tokens) : 0;
}

}  // namespace shardq
