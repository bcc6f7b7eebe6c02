#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "model/layer_forward.hpp"
#include "model/tensor_reader.hpp"

namespace shardq {

/// The weights of one layer in host memory from which transfers run fast. Kept and reused for layer after layer, so
/// that page-locked memory is allocated once.  Requires: the backend outlives it.
class HostLayer {
 public:
  explicit HostLayer(Backend& backend) : backend_(backend) {}
  ~HostLayer();
  HostLayer(const HostLayer&) = delete;
  HostLayer& operator=(const HostLayer&) = delete;
  /// At least `bytes`; what was in it is lost when it grows.
  std::byte* reserve(int64_t bytes);
  std::byte* data() const { return data_; }

 private:
  Backend& backend_;
  std::byte* data_ = nullptr;
  int64_t capacity_ = 0;
};

/// Which weights of a layer one rank holds, and which of those it reads from the files itself. By default all.
struct WeightPart {
  /// Experts of MoE layers that the gate_up and down stacks hold, all of them read here; may be empty; absent: all.
  std::optional<Range> experts;
  /// Of the other stacks, seen as matrices [count * rows, cols], only part(count * rows, ranks, rank) is read; the rest
  /// of the tensor is left uninitialised, for the other ranks' shares. What is no stack every rank reads.
  int rank = 0, ranks = 1;

  /// The experts that the stacks of `layer` hold; {0, 0} in dense layers.
  Range experts_of(const ModelSpec& spec, const LayerSpec& layer) const;
  /// Whether the tap's stack is read in shares, and has to be put together afterwards.
  bool shared(const LayerSpec& layer, Tap tap) const;
};

/// Reads the weights of layers from a checkpoint, full-precision or quantized by us (then dequantized bit for bit as
/// the solver used them).
class WeightSource {
 public:
  WeightSource(const Checkpoint& checkpoint, const ModelSpec& spec);
  /// The layer, or a part of it, into backend memory, converted to `compute`: weights follow the dtype of the
  /// activations.
  /// `check_finite`: every weight that is read is scanned; Error(input) names tensor and index of the first NaN or Inf.
  LayerWeights load(Backend& backend, const LayerSpec& layer, DType compute, bool check_finite,
                    const WeightPart& part = {}) const;
  /// The two halves of load, for reading ahead: `read` touches files and host memory only, so that another thread may
  /// run it while the device computes; `upload` then takes what was read (same layer, dtype and part) to the backend.
  void read(const LayerSpec& layer, DType compute, bool check_finite, HostLayer& host,
            const WeightPart& part = {}) const;
  LayerWeights upload(Backend& backend, const LayerSpec& layer, DType compute, const HostLayer& host,
                      const WeightPart& part = {}) const;
  /// Bytes in `compute` of what is read of a layer, with norms, biases and router: what `read` reserves.
  int64_t layer_bytes(const LayerSpec& layer, DType compute, const WeightPart& part = {}) const;
  /// One tensor (norm, head) in `compute` dtype.
  Tensor load_tensor(Backend& backend, const std::string& name, DType compute, bool check_finite) const;
  /// Errors: Error(input) naming tensor and index where a tensor holds NaN or infinity.
  void check_finite(const std::string& name) const { reader_.check_finite(name); }
  bool quantized() const { return reader_.quantized(); }

 private:
  /// One tensor of a layer: its shape, where it belongs, and what of it is read from where.
  struct Piece {
    struct Item {
      ReadItem what;  ///< target is set when the memory is known
      int64_t place;  ///< its first element in the tensor
    };
    Shape shape;
    std::function<Tensor&(LayerWeights&)> slot;
    Range elements;  ///< of the tensor, that are read
    std::vector<Item> items = {};
    bool zeroed = false;  ///< items leave gaps, which are 0
    /// Appends what is to be read, for memory in which element `elements.begin` of the tensor lies at `memory`.
    void place(std::byte* memory, DType compute, std::vector<ReadItem>& all) const;
  };
  std::vector<Piece> pieces(const LayerSpec& layer, const WeightPart& part) const;
  Piece stack_piece(const LayerSpec& layer, Tap tap, const WeightPart& part) const;
  Piece bias_piece(const LayerSpec& layer, Tap tap) const;
  Piece plain_piece(const std::string& name, Tensor LayerWeights::*slot) const;
  const Checkpoint& checkpoint_;
  const ModelSpec& spec_;
  TensorReader reader_;
};

}  // namespace shardq
