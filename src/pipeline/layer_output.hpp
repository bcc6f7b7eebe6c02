#pragma once
#include <array>
#include <deque>
#include <exception>
#include <future>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "io/output_writer.hpp"
#include "pipeline/host_tap.hpp"

namespace shardq {

/// Turns solved taps into output shards. Layer k of n goes to shard k + 1 of n + 1, written by rank k mod ranks in the
/// background; the last shard holds everything that belongs to no layer. Source: formats.md 5 (pack-quantized).
class LayerOutput {
 public:
  LayerOutput(Job& job, OutputWriter& writer);
  ~LayerOutput();
  bool owns(const LayerSpec& layer) const { return layer.index % job_.host.size() == job_.host.rank(); }
  int64_t shard_count() const { return job_.spec.layers + 1; }
  bool has_shard(const LayerSpec& layer) const { return writer_.has_shard(layer.index + 1, shard_count()); }
  std::filesystem::path shard_path(const LayerSpec& layer) const;
  /// Takes a finished tap, whole (owner only).
  void add(const LayerSpec& layer, Tap tap, std::shared_ptr<const HostTap> host);
  /// Packs and writes the layer's shard in the background (owner only), beside those of the layers before as far as
  /// memory allows: disks are not steady, and a job should not wait for a slow second.
  void write(const LayerSpec& layer);
  /// Starts writing the shard of everything that is in no layer (rank 0 only), unless an earlier run has: nothing in it
  /// depends on what is solved.
  void start_rest();
  /// Waits for the writes of layers in flight; throws their first Error, or that of the rest where it has ended.
  void wait();
  /// Takes note of writes that have ended meanwhile. An Error of theirs is kept for write() and wait().
  void poll();
  /// Digest of a tap's codes, scales and zero points, once they are durable in a shard that this rank wrote since it
  /// started; 0 otherwise, and on all other ranks.
  uint64_t digest(int64_t layer, Tap tap) const;
  /// A whole tap out of its layer's shard; rows of ignored linears are 0. Errors: Error(disk) naming the shard where it
  /// is missing, damaged, or holds something else than `digest` says.
  HostTap read(const LayerSpec& layer, Tap tap, uint64_t digest) const;
  /// Waits for everything that is being written.
  void finish();
  /// Config, index and copied files, then the final name. Rank 0, after all ranks have waited.
  void publish();

 private:
  using HostTaps = std::array<std::shared_ptr<const HostTap>, 4>;
  using Digests = std::array<uint64_t, 4>;
  std::vector<OutputTensor> layer_tensors(const LayerSpec& layer, const HostTaps& taps) const;
  /// Tensors that quantized linears of this layer (or of all layers) replace.
  std::set<std::string> consumed(const LayerSpec& layer) const;
  void append_plain(std::vector<OutputTensor>& out, const std::string& name) const;
  void append_linear(std::vector<OutputTensor>& out, const LayerSpec& layer, const LinearSpec& linear,
                     const HostTap& tap) const;
  void read_linear(const SafetensorsFile& shard, const LayerSpec& layer, const LinearSpec& linear, HostTap& tap) const;
  /// Calls body(linear) for the tap's quantized linears, on all threads where they are many.
  template <class Body>
  void for_quantized(const LayerSpec& layer, Tap tap, const Body& body) const;
  uint64_t digest_of(const LayerSpec& layer, Tap tap, const HostTap& host) const;
  /// Waits for the oldest write in flight.
  void collect();
  void throw_failure();

  Job& job_;
  OutputWriter& writer_;
  HostTaps taps_;
  struct Pending {
    int64_t layer, bytes;
    std::future<Digests> digests;
  };
  std::deque<Pending> pending_;         ///< oldest first
  std::exception_ptr failure_;          ///< the first
  std::map<int64_t, Digests> digests_;  ///< by layer
  std::future<void> rest_;
};

}  // namespace shardq
