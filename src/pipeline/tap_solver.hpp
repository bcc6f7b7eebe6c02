#pragma once
#include <functional>
#include <string>
#include <vector>

#include "model/layer_forward.hpp"
#include "pipeline/chunk_store.hpp"
#include "pipeline/job.hpp"

namespace shardq {

/// A quantized tap, complete on every rank.
struct TapResult {
  Tensor codes, scales, zeros;            ///< [count, rows, cols], [count, rows, groups]; zeros empty when symmetric
  std::vector<MatrixOutcome> outcomes;    ///< [count]
  std::vector<float> losses, rtn_losses;  ///< [count * rows]
  /// What this rank solved itself, as rows of [count * rows], one range a wave (`wave` is the wave's rows): the part it
  /// stores.
  struct Piece {
    Range rows, wave;
  };
  std::vector<Piece> pieces;
  double seconds = 0;
};

/// Sums of x x^T (lower triangles) for a range of matrices of one tap, over this rank's tokens (of owned experts: over
/// all ranks' tokens).
struct TapHessian {
  Tensor sums;                  // f32 [count, cols, cols]
  Tensor packed, coarse, fine;  // reproducible: triangles of one chunk, and the order-free sums of them
  Tensor sending;               // triangles on their way between ranks
  bool started = false;         // start_reduction was called
  bool reduced = false;         // summed over ranks already, everywhere
  std::vector<int64_t> tokens;  // [count]
  Range matrices;               // which of the tap's matrices
};

/// The sum of all experts' Hessians, which lends to those with few tokens. Source: quality.md "shrinkage".
struct HessianPool {
  Tensor sum;           // f32 [cols, cols], lower triangle; empty: no pool
  Tensor coarse, fine;  // reproducible: the order-free sum it is read from
  int64_t tokens = 0;
  MatrixView view() const { return sum ? sum.matrix() : MatrixView{}; }
};

/// Walks all chunks to a tap, accumulates, reduces over ranks, solves this rank's share and gathers.
class TapSolver {
 public:
  /// safe_point: called between chunks, the same number of times on every rank; may throw to stop the run.
  TapSolver(Job& job, const LayerSpec& layer, std::function<void()> safe_point);

  /// Hessian of `tap` over `chunks`, each advanced to it. Experts beyond the memory budget go in waves, which revisit
  /// the inputs. weights: the tap's stack [own matrices, rows, cols], still original.
  TapResult solve(Tap tap, LayerForward& forward, ChunkStore& chunks, const StackView& weights);
  /// For `sequential: layer`: all four Hessians in one pass of copies of the chunks through the original weights.
  std::vector<TapHessian> accumulate_all(LayerForward& forward, ChunkStore& chunks);
  /// The solve of a tap whose Hessian is at hand (all matrices, one wave).
  TapResult solve_accumulated(Tap tap, TapHessian hessian, const StackView& weights);
  /// Sends a Hessian of all matrices on its way over ranks; solve_accumulated waits for it. Beside it another tap may
  /// be solved. (Taps that are solved one after another have nothing to do meanwhile: the next input depends on the
  /// codes.)
  void start_reduction(Tap tap, TapHessian& hessian);
  /// Plain rounding of this rank's share.
  TapResult round(Tap tap, const StackView& weights);
  /// Moves chunks to a tap without a Hessian.
  void advance(Tap tap, LayerForward& forward, ChunkStore& chunks);
  /// Moves chunks out of the layer.
  void finish(LayerForward& forward, ChunkStore& chunks);

  /// Matrices that share ONE Hessian: all experts of gate/up when every expert sees every token.
  bool shared_hessian(Tap tap) const;

 private:
  /// body and safe point for every chunk, then the safe points that ranks with more chunks still make. before_last:
  /// collectives, which all ranks make before the last safe point.
  void each_chunk(ChunkStore& chunks, const std::function<void(ChunkState&)>& body,
                  const std::function<void()>& before_last = {});
  TapHessian new_hessian(Tap tap, Range matrices);
  /// How the Hessians of a wave come to those who solve: scattered over its matrices, or everywhere.
  struct Reduction {
    bool scatter = false;
    std::vector<Range> owners;  // matrices of the wave, by rank
    int64_t slices = 1;         // sums go in so many collectives, each with a part of every owner's matrices
  };
  /// early: the sums are complete with this chunk and go on their way as they become so.
  void add(TapHessian& hessian, Tap tap, LayerForward& forward, ChunkStore& chunks, ChunkState& chunk,
           const Reduction* early = nullptr);
  void move(Tap tap, LayerForward& forward, ChunkStore& chunks, ChunkState& chunk);
  /// The tap's input, with another try when memory runs out where no other rank takes part.
  std::vector<TapInput> reach(Tap tap, LayerForward& forward, ChunkStore& chunks, ChunkState& chunk);
  /// Rows of matrices [first, first + offsets.size() - 1) of the stack.
  void add_rows(TapHessian& hessian, int64_t first, const MatrixView& x, const std::vector<int64_t>& offsets);
  /// In reproducible mode: sums over ranks everywhere (owned taps are complete already), read as floats.
  void reduce_exact(TapHessian& hessian, Tap tap);
  Reduction reduction(Tap tap, Range wave) const;
  /// Whether the sums of these matrices may leave while the last chunk is added.
  bool leaves_early(Tap tap, Range wave) const;
  void start(TapHessian& hessian, const Reduction& reduction);
  /// As add_rows for the last chunk, slice by slice, each sent when it is complete: packing and the collective run
  /// beside the sums of the slices after it.
  void add_rows_and_send(TapHessian& hessian, const MatrixView& x, const std::vector<int64_t>& offsets,
                         const Reduction& reduction);
  void prepare_sending(TapHessian& hessian);
  void send(TapHessian& hessian, const Reduction& reduction, int64_t slice);
  void complete(TapHessian& hessian, const Reduction& reduction);
  /// As each_chunk for owned taps: `begin` sends rows, which travel while `end` works on the chunk before. settle_each:
  /// `begin` of the next chunk needs memory that is being sent.
  void each_chunk_in_turns(ChunkStore& chunks, bool settle_each, const std::function<void(ChunkState&)>& begin,
                           const std::function<void(ChunkState&)>& end);
  /// Waits for rows on their way; what it takes is time that nothing hid.
  void settle();
  HessianPool new_pool(Tap tap);
  void add_to_pool(HessianPool& pool, const TapHessian& hessian);
  /// Completes the pool over ranks, where it is not complete already.
  void finish_pool(HessianPool& pool, Tap tap);
  /// The solve of matrices `wave`: of all ranks, or (owned taps) of this rank alone, which gather() then completes.
  void solve_wave(Tap tap, TapHessian& hessian, const HessianPool& pool, const StackView& weights, Range wave,
                  TapResult& result);
  TapResult new_result(Tap tap);
  /// Puts this rank's share into its place: rows [first_row, ...) of [count * rows], outcomes from `first_matrix`.
  void place(TapResult& result, Quantized mine, int64_t first_row, int64_t first_matrix);
  /// Completes `wave` over ranks, which have solved rows (by_rows: of the one matrix) or matrices of it.
  void gather(TapResult& result, Range wave, bool by_rows);
  MatrixNames names(Tap tap, Range matrices) const;
  /// Ranges of matrices whose Hessians fit the budget together; of owned taps, own ones, as many waves on every rank.
  std::vector<Range> waves(Tap tap) const;
  bool owned(Tap tap) const { return job_.owned(layer_, tap); }
  bool wants_pool(Tap tap) const;
  SolverOptions options_of(Tap tap) const;

  Job& job_;
  const LayerSpec& layer_;
  std::function<void()> safe_point_;
};

/// Bytes of expert Hessians that may be held at once (recipe, or a quarter of the device's memory).
int64_t hessian_budget(const Recipe& recipe, int64_t device_bytes);
/// Matrices a wave for a tap of `count` Hessians of `cols` columns: ranges that cover [0, count).
std::vector<Range> split_waves(int64_t count, int64_t cols, int64_t budget);

}  // namespace shardq
