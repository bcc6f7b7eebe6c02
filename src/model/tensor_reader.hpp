#pragma once
#include <string>
#include <vector>

#include "io/checkpoint.hpp"
#include "io/output_writer.hpp"
#include "model/model_spec.hpp"

namespace shardq {

/// Something to be read into host memory: rows of a linear, or elements of a tensor that is none (norm, bias, router).
struct ReadItem {
  const LinearSpec* linear = nullptr;   ///< null: `tensor`
  const std::string* tensor = nullptr;  ///< its name
  Range range;                          ///< rows of the linear, or elements of the tensor
  std::byte* target = nullptr;          ///< row-major and without gaps, in the dtype asked for
};

/// Reads weights of a checkpoint with pread, which is faster than faults of the map, and turns I/O errors into Errors:
/// tensors of their own, slices of fused ones (also transposed), and linears that we quantized, which are reconstructed
/// bit for bit as the solver used them.  Requires: the checkpoint outlives it.
class TensorReader {
 public:
  explicit TensorReader(const Checkpoint& checkpoint);
  /// Fills the targets of all items, converted to `compute`. Many small items are read one a thread, large ones by all
  /// OpenMP threads in pieces; weights stored in `compute` go straight to their place. Nothing outside the ranges is
  /// looked at, nor read from the file (except in a transposed slice, which is read whole).
  /// `check_finite`: Error(input) names tensor and index of the first NaN or infinity.
  /// Errors: of several, that of the first item and, within it, of the lowest piece.
  void read(const std::vector<ReadItem>& items, DType compute, bool check_finite) const;
  /// Scans a tensor of floating point (others pass) without keeping it. Errors: as read with `check_finite`.
  void check_finite(const std::string& name) const;
  bool quantized() const { return config_.quantized; }

 private:
  struct Format {
    DType compute;
    bool check_finite;
  };
  void cut(const ReadItem& item, DType compute, std::vector<ReadItem>& pieces) const;
  void read_piece(const ReadItem& piece, Format format) const;
  void read_elements(const std::string& name, Range elements, std::byte* target, Format format) const;
  void read_transposed(const LinearSpec& linear, Range rows, std::byte* target, Format format) const;
  void read_packed(const LinearSpec& linear, Range rows, std::byte* target, Format format) const;
  std::vector<int8_t> read_zeros(const LinearSpec& linear, Range rows, int64_t groups, int bits) const;
  bool packed(const LinearSpec& linear) const;
  void check_all_finite(const TensorEntry& entry, std::span<const std::byte> bytes, int64_t first) const;
  [[noreturn]] void fail_nonfinite(const TensorEntry& entry, int64_t flat) const;

  const Checkpoint& checkpoint_;
  QuantizedConfig config_;
};

}  // namespace shardq
