#include "model/layer_forward.hpp"

#include <cmath>
#include <cstring>

#include "core/error.hpp"
#include "io/checkpoint.hpp"

namespace shardq {

namespace {

/// Scratch of at least `rows` rows; grows, never shrinks.
MatrixView scratch_rows(Backend& backend, Tensor& tensor, DType dtype, int64_t rows, int64_t cols, const char* what) {
  if (!tensor || tensor.dtype() != dtype || tensor.shape()[1] != cols || tensor.shape()[0] < rows) {
    tensor = Tensor();  // released first: the new one may need its memory
    tensor = Tensor(backend, dtype, {rows, cols}, what);
  }
  return tensor.matrix().row_range(0, rows);
}

void check_step(const ChunkState& chunk, std::optional<Tap> before, Tap step) {
  const auto name = [](std::optional<Tap> tap) { return tap ? to_string(*tap) : "none"; };
  SHARDQ_CHECK(chunk.at == before || chunk.at == step, ExitCode::internal,
               "forward: step to {} from {}, expected from {}", to_string(step), name(chunk.at), name(before));
}

}  // namespace

LayerForward::LayerForward(Backend& backend, const ModelSpec& spec, const LayerSpec& layer, const LayerWeights& weights,
                           const RopeTable& rope, DType compute, ExpertExchange* exchange)
    : backend_(backend), spec_(spec), layer_(layer), weights_(weights), compute_(compute), exchange_(exchange) {
  const int64_t half = spec.head_dim / 2;
  rope_length_ = static_cast<int64_t>(rope.cosine.size()) / half;
  cosine_ = Tensor(backend, DType::f32, {rope_length_, half}, "rope cosine");
  sine_ = Tensor(backend, DType::f32, {rope_length_, half}, "rope sine");
  backend.upload(cosine_.data(), rope.cosine.data(), cosine_.bytes());
  backend.upload(sine_.data(), rope.sine.data(), sine_.bytes());
}

MatrixView LayerForward::normed(const ChunkState& chunk, const Tensor& weight) {
  const MatrixView hidden = chunk.hidden.matrix();
  const MatrixView x = scratch_rows(backend_, x_, compute_, hidden.rows, hidden.cols, "normed hidden states");
  backend_.rms_norm(hidden, weight.data(), weight.dtype(), static_cast<float>(spec_.rms_norm_eps), x);
  return x;
}

const int32_t* LayerForward::positions(const ChunkState& chunk) {
  if (positions_ && positions_starts_ == chunk.starts) return positions_.as<int32_t>();
  std::vector<int32_t> host(chunk.starts.back());
  for (size_t s = 0; s + 1 < chunk.starts.size(); ++s) {
    const int64_t length = chunk.starts[s + 1] - chunk.starts[s];
    SHARDQ_CHECK(length <= rope_length_, ExitCode::internal, "forward: a sequence of {} tokens, rotary tables for {}",
                 length, rope_length_);
    for (int64_t t = 0; t < length; ++t) host[chunk.starts[s] + t] = static_cast<int32_t>(t);
  }
  positions_ = Tensor(backend_, DType::i32, {chunk.starts.back()}, "positions");
  backend_.upload(positions_.data(), host.data(), positions_.bytes());
  positions_starts_ = chunk.starts;
  return positions_.as<int32_t>();
}

/// One path for dense and routed layers, but for biases, which only dense layers have.
void LayerForward::run_linear(Tap tap, MatrixView x, const std::vector<int64_t>& offsets, MatrixView y,
                              bool accumulate) {
  const Tensor& weight = weights_.taps[static_cast<int>(tap)];
  const Tensor& bias = weights_.biases[static_cast<int>(tap)];
  if (offsets.size() == 2)
    backend_.linear(x, weight.stack()[0], bias ? bias.data() : nullptr, y, accumulate);
  else
    backend_.linear_stack(x, weight.stack(), offsets, y);
}

namespace {
/// Part `offsets` of stacked rows as an input of its own, offsets from 0.
TapInput part_of(MatrixView rows, const std::vector<int64_t>& offsets) {
  TapInput part{rows.row_range(offsets.front(), offsets.back()), offsets};
  for (int64_t& offset : part.offsets) offset -= offsets.front();
  return part;
}
}  // namespace

void LayerForward::run_owned(Tap tap, const OwnedRows& owned, MatrixView x, MatrixView y) {
  for (const std::vector<int64_t>& offsets : owned.offsets) {
    const TapInput part = part_of(x, offsets);
    backend_.linear_stack(part.x, weights_.taps[static_cast<int>(tap)].stack(), part.offsets,
                          y.row_range(offsets.front(), offsets.back()));
  }
}

TapInput LayerForward::to_qkv(ChunkState& chunk) {
  check_step(chunk, std::nullopt, Tap::qkv);
  SHARDQ_CHECK(!chunk.starts.empty() && chunk.starts.back() == chunk.hidden.matrix().rows &&
                   chunk.hidden.matrix().cols == spec_.hidden && chunk.hidden.dtype() == compute_,
               ExitCode::internal, "forward: hidden states {} of {} for sequences of {} tokens",
               to_string(chunk.hidden.shape()), torch_name(chunk.hidden.dtype()),
               chunk.starts.empty() ? 0 : chunk.starts.back());
  chunk.at = Tap::qkv;
  chunk.offsets = {0, chunk.starts.back()};
  return {normed(chunk, weights_.input_norm), chunk.offsets};
}

TapInput LayerForward::to_o(ChunkState& chunk) {
  check_step(chunk, Tap::qkv, Tap::o);
  const int64_t tokens = chunk.starts.back(), head_dim = spec_.head_dim;
  if (chunk.at == Tap::o) return {chunk.tap.matrix(), {0, tokens}};
  const MatrixView x = normed(chunk, weights_.input_norm);
  // q, k and v stand apart, not side by side, so that the heads of each are a plain matrix for the norm over head_dim.
  const int64_t q_cols = spec_.heads * head_dim, kv_cols = spec_.kv_heads * head_dim;
  const Tensor qkv(backend_, compute_, {tokens * (q_cols + 2 * kv_cols)}, "q, k and v");
  char* base = qkv.as<char>();
  const MatrixView q{base, compute_, tokens, q_cols, q_cols};
  const MatrixView k{base + tokens * q_cols * size_of(compute_), compute_, tokens, kv_cols, kv_cols};
  const MatrixView v{k.bytes() + tokens * kv_cols * size_of(compute_), compute_, tokens, kv_cols, kv_cols};
  const StackView weight = weights_.taps[static_cast<int>(Tap::qkv)].stack();
  const Tensor& bias = weights_.biases[static_cast<int>(Tap::qkv)];
  int64_t row = 0;
  for (const MatrixView& y : {q, k, v}) {
    const void* part = bias ? bias.as<char>() + row * size_of(bias.dtype()) : nullptr;
    backend_.linear(x, weight.row_range(row, row + y.cols)[0], part, y, false);
    row += y.cols;
  }
  if (weights_.q_norm) {
    const float eps = static_cast<float>(spec_.rms_norm_eps);
    const MatrixView q_heads{q.data, compute_, tokens * spec_.heads, head_dim, head_dim};
    const MatrixView k_heads{k.data, compute_, tokens * spec_.kv_heads, head_dim, head_dim};
    backend_.rms_norm(q_heads, weights_.q_norm.data(), weights_.q_norm.dtype(), eps, q_heads);
    backend_.rms_norm(k_heads, weights_.k_norm.data(), weights_.k_norm.dtype(), eps, k_heads);
  }
  const int32_t* at = positions(chunk);
  backend_.rope(q, head_dim, cosine_.as<float>(), sine_.as<float>(), at);
  backend_.rope(k, head_dim, cosine_.as<float>(), sine_.as<float>(), at);
  chunk.tap = Tensor(backend_, compute_, {tokens, q_cols}, "attention output");
  const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
  backend_.attention(q, k, v, head_dim, chunk.starts, scale, layer_.window, chunk.tap.matrix());
  chunk.at = Tap::o;
  return {chunk.tap.matrix(), {0, tokens}};
}

void LayerForward::route(ChunkState& chunk, MatrixView x) {
  const int64_t tokens = x.rows, slots = tokens * spec_.top_k;
  const RouterSpec router{spec_.experts, spec_.top_k, spec_.normalize_top_k};
  const Tensor logits(backend_, compute_, {tokens, spec_.experts}, "router logits");
  const Tensor ids(backend_, DType::i32, {tokens, spec_.top_k}, "expert choices");
  Tensor weights(backend_, DType::f32, {tokens, spec_.top_k}, "expert weights");
  Tensor order(backend_, DType::i32, {slots}, "order by expert"),
      place(backend_, DType::i32, {slots}, "place by token");
  std::vector<int64_t> offsets(spec_.experts + 1, 0);
  backend_.linear(x, weights_.router.matrix(), nullptr, logits.matrix(), false);
  backend_.route(logits.matrix(), router, ids.as<int32_t>(), weights.as<float>());
  backend_.sort_by_expert(ids.as<int32_t>(), slots, spec_.experts, order.as<int32_t>(), place.as<int32_t>(), offsets);
  // All or nothing: memory that runs out half-way must leave a chunk that can be routed again.
  chunk.route_weights = std::move(weights);
  chunk.order = std::move(order);
  chunk.place = std::move(place);
  chunk.offsets = std::move(offsets);
}

TapInput LayerForward::gate_up_input(ChunkState& chunk) {
  const MatrixView x = normed(chunk, weights_.post_attention_norm);
  if (!layer_.moe) return {x, chunk.offsets};
  if (!chunk.order) route(chunk, x);
  const MatrixView gathered =
      scratch_rows(backend_, gathered_, compute_, x.rows * spec_.top_k, spec_.hidden, "hidden states by expert");
  backend_.dispatch_rows(x, chunk.order.as<int32_t>(), chunk.place.as<int32_t>(), spec_.top_k, gathered);
  return {gathered, chunk.offsets};
}

TapInput LayerForward::to_gate_up(ChunkState& chunk) {
  check_step(chunk, Tap::o, Tap::gate_up);
  if (chunk.at == Tap::o) {
    const int64_t tokens = chunk.starts.back();
    run_linear(Tap::o, chunk.tap.matrix(), {0, tokens}, chunk.hidden.matrix(), true);
    chunk.tap = Tensor();
    chunk.offsets = {0, tokens};
    chunk.at = Tap::gate_up;
  }
  if (!exchanged(Tap::gate_up)) return gate_up_input(chunk);
  if (chunk.owned.offsets.empty()) {
    const TapInput input = gate_up_input(chunk);
    chunk.owned = exchange_->dispatch(backend_, input.x, input.offsets);
  }
  const MatrixView rows = chunk.owned.rows.matrix();
  return {rows, {0, rows.rows}};
}

TapInput LayerForward::to_down(ChunkState& chunk) {
  check_step(chunk, Tap::gate_up, Tap::down);
  if (chunk.at == Tap::gate_up) {
    const bool away = exchanged(Tap::gate_up);
    const TapInput input = away ? to_gate_up(chunk) : gate_up_input(chunk);
    const int64_t inner = spec_.tap_shape(layer_, Tap::down).cols;
    const Tensor both(backend_, compute_, {input.x.rows, 2 * inner}, "gate and up");
    if (away)
      run_owned(Tap::gate_up, chunk.owned, input.x, both.matrix());
    else
      run_linear(Tap::gate_up, input.x, input.offsets, both.matrix(), false);
    chunk.owned.rows = Tensor();
    chunk.tap = Tensor(backend_, compute_, {input.x.rows, inner}, "input of down");
    backend_.silu_mul(both.matrix().col_range(0, inner), both.matrix().col_range(inner, 2 * inner), chunk.tap.matrix());
    chunk.at = Tap::down;
  }
  if (exchanged(Tap::down)) return {chunk.tap.matrix(), {0, chunk.tap.shape()[0]}};
  return {chunk.tap.matrix(), chunk.offsets};
}

void LayerForward::start_return(ChunkState& chunk) {
  check_step(chunk, Tap::down, Tap::down);
  if (!exchanged(Tap::down) || chunk.returning) return;
  chunk.outgoing = Tensor(backend_, compute_, {chunk.tap.shape()[0], spec_.hidden}, "output of own experts");
  run_owned(Tap::down, chunk.owned, chunk.tap.matrix(), chunk.outgoing.matrix());
  chunk.tap = Tensor();
  chunk.returned = Tensor(backend_, compute_, {chunk.offsets.back(), spec_.hidden}, "output of experts, returned");
  exchange_->combine(backend_, chunk.outgoing.matrix(), chunk.owned.offsets, chunk.offsets, chunk.returned.matrix());
  chunk.returning = true;
}

void LayerForward::finish(ChunkState& chunk) {
  check_step(chunk, Tap::down, Tap::down);
  const auto add_experts = [&](const Tensor& out) {
    backend_.combine_rows(out.matrix(), chunk.place.as<int32_t>(), chunk.route_weights.as<float>(), spec_.top_k,
                          chunk.hidden.matrix());
  };
  if (exchanged(Tap::down)) {
    start_return(chunk);
    add_experts(chunk.returned);
  } else if (layer_.moe) {
    const Tensor out(backend_, compute_, {chunk.tap.shape()[0], spec_.hidden}, "output of experts");
    run_linear(Tap::down, chunk.tap.matrix(), chunk.offsets, out.matrix(), false);
    add_experts(out);
  } else {
    run_linear(Tap::down, chunk.tap.matrix(), chunk.offsets, chunk.hidden.matrix(), true);
  }
  for (Tensor* spent : {&chunk.tap, &chunk.order, &chunk.place, &chunk.route_weights, &chunk.outgoing, &chunk.returned})
    *spent = Tensor();
  chunk.owned = {};
  chunk.returning = false;
  chunk.offsets.clear();
  chunk.at.reset();
}

std::vector<TapInput> LayerForward::inputs(Tap tap, ChunkState& chunk) {
  TapInput whole = to(tap, chunk);
  if (!exchanged(tap)) return {std::move(whole)};
  std::vector<TapInput> parts;
  for (const std::vector<int64_t>& offsets : chunk.owned.offsets) parts.push_back(part_of(whole.x, offsets));
  return parts;
}

TapInput LayerForward::to(Tap tap, ChunkState& chunk) {
  switch (tap) {
    case Tap::qkv:
      return to_qkv(chunk);
    case Tap::o:
      return to_o(chunk);
    case Tap::gate_up:
      return to_gate_up(chunk);
    case Tap::down:
      return to_down(chunk);
  }
  fail(ExitCode::internal, "forward: no such tap");
}

MatrixView LayerForward::mlp_input(ChunkState& chunk) {
  check_step(chunk, Tap::gate_up, Tap::gate_up);
  return normed(chunk, weights_.post_attention_norm);
}

MatrixView LayerForward::down_input_of_expert(ChunkState& chunk, int64_t expert) {
  const MatrixView x = mlp_input(chunk);
  const int64_t inner = spec_.tap_shape(layer_, Tap::down).cols;
  const MatrixView both =
      scratch_rows(backend_, expert_scratch_, compute_, x.rows, 2 * inner, "gate and up of one expert");
  const MatrixView act = scratch_rows(backend_, expert_act_, compute_, x.rows, inner, "input of down of one expert");
  backend_.linear(x, weights_.taps[static_cast<int>(Tap::gate_up)].stack()[expert], nullptr, both, false);
  backend_.silu_mul(both.col_range(0, inner), both.col_range(inner, 2 * inner), act);
  return act;
}

}  // namespace shardq
