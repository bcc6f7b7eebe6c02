#pragma once
#include "quant/hessian_statistics.hpp"

namespace shardq {

/// Scales and zeros of a stack, in backend memory.
struct ScaleTensors {
  Tensor scales;  // f32 [count, rows, groups]
  Tensor zeros;   // i8, same; empty when symmetric
  int8_t* zero_data() const { return zeros ? zeros.as<int8_t>() : nullptr; }
};

/// Throws Error(input) unless groups of the scheme divide `cols`.
void check_groups(const QuantScheme& scheme, int64_t cols);

/// Uninitialised tensors of the shape that `count` matrices of `rows` x `cols` need.
ScaleTensors allocate_scales(Backend& backend, const QuantScheme& scheme, int64_t count, int64_t rows, int64_t cols);

/// Fills `target` by the scheme's observer. `importance`: [count, cols] in backend memory, for Observer::hessian; where
/// it is null (no Hessian at hand) that observer weighs all columns alike.
void observe(Backend& backend, StackView weights, const QuantScheme& scheme, const float* importance,
             const ScaleTensors& target);

/// The diagonal of H as weights for the search, in backend memory; ones for matrices whose Hessian must not be used.
/// Empty for observers that do not look at it.
Tensor observer_importance(Backend& backend, const QuantScheme& scheme, const HessianStatistics& statistics,
                           const std::vector<MatrixOutcome>& outcomes);

/// Throws Error(input) naming matrix, row and group of the first scale that overflowed its stored dtype.
/// names: one a matrix, each with `rows` rows.
void check_scales(Backend& backend, const ScaleTensors& scales, const QuantScheme& scheme, const MatrixNames& names);

}  // namespace shardq
