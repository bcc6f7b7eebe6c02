#include "pipeline/layer_output.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>

#include "core/error.hpp"
#include "core/parallel.hpp"
#include "io/files.hpp"
#include "io/packing.hpp"

namespace shardq {
namespace {

template <class T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

OutputTensor owned_tensor(std::string name, DType dtype, Shape shape, std::vector<std::byte> bytes) {
  OutputTensor tensor{std::move(name), dtype, std::move(shape), {}, std::move(bytes)};
  tensor.data = tensor.owned;  // a moved vector keeps its storage, so the span stays good
  return tensor;
}

/// Scales are representable in their stored dtype already, so this rounds nothing.
std::vector<std::byte> stored_scales(const float* scales, int64_t count, DType dtype) {
  std::vector<std::byte> bytes(count * size_of(dtype));
  convert_elements(scales, DType::f32, bytes.data(), dtype, count);
  return bytes;
}

/// Experts are many and small: one thread each. A few large linears are treated by all threads one after another.
bool many(int64_t linears) {
  return linears >= 32;
}

int64_t first_row_of(const ModelSpec& spec, const LayerSpec& layer, const LinearSpec& linear) {
  return std::max<int64_t>(linear.expert, 0) * spec.tap_shape(layer, linear.tap).rows + linear.row_offset;
}

}  // namespace

LayerOutput::LayerOutput(Job& job, OutputWriter& writer) : job_(job), writer_(writer) {}

LayerOutput::~LayerOutput() {
  for (const Pending& one : pending_) one.digests.wait();
  if (rest_.valid()) rest_.wait();
}

std::filesystem::path LayerOutput::shard_path(const LayerSpec& layer) const {
  return writer_.partial() / OutputWriter::shard_name(layer.index + 1, shard_count());
}

void LayerOutput::add(const LayerSpec& layer, Tap tap, std::shared_ptr<const HostTap> host) {
  if (owns(layer)) taps_[static_cast<size_t>(tap)] = std::move(host);
}

void LayerOutput::append_linear(std::vector<OutputTensor>& out, const LayerSpec& layer, const LinearSpec& linear,
                                const HostTap& tap) const {
  const Grid& grid = job_.recipe.scheme.grid;
  const int64_t first = first_row_of(job_.spec, layer, linear);
  const auto codes = std::span(tap.codes_at(first), linear.rows * tap.cols);
  out.push_back(owned_tensor(linear.module + ".weight_packed", DType::i32,
                             {linear.rows, packed_words(tap.cols, grid.bits)},
                             bytes_of(pack_rows(codes, linear.rows, tap.cols, grid.bits))));
  out.push_back(owned_tensor(linear.module + ".weight_scale", grid.scale_dtype, {linear.rows, tap.groups},
                             stored_scales(tap.scales_at(first), linear.rows * tap.groups, grid.scale_dtype)));
  out.push_back(owned_tensor(linear.module + ".weight_shape", DType::i64, {2},
                             bytes_of(std::vector<int64_t>{linear.rows, tap.cols})));
  if (!tap.symmetric) {
    const auto zeros = std::span(tap.zeros_at(first), linear.rows * tap.groups);
    out.push_back(owned_tensor(linear.module + ".weight_zero_point", DType::i32,
                               {packed_words(linear.rows, grid.bits), tap.groups},
                               bytes_of(pack_columns(zeros, linear.rows, tap.groups, grid.bits))));
  }
}

void LayerOutput::append_plain(std::vector<OutputTensor>& out, const std::string& name) const {
  const TensorEntry& entry = job_.checkpoint.entry(name);
  out.push_back({job_.spec.output_name(name), entry.dtype, entry.shape, job_.checkpoint.bytes(name), {}});
}

std::set<std::string> LayerOutput::consumed(const LayerSpec& layer) const {
  std::set<std::string> names;
  for (size_t i = 0; i < layer.linears.size(); ++i) {
    const LinearSpec& linear = layer.linears[i];
    const bool quantized = job_.selection.quantized[layer.index][i];
    if (quantized) names.insert(linear.tensor);
    SHARDQ_CHECK(quantized || linear.fused_index < 0, ExitCode::usage,
                 "{} is ignored, but it is a slice of the fused tensor {}, which can only be quantized or ignored "
                 "whole: ignore all of its experts",
                 linear.module, linear.tensor);
  }
  return names;
}

std::vector<OutputTensor> LayerOutput::layer_tensors(const LayerSpec& layer, const HostTaps& taps) const {
  const auto count = static_cast<int64_t>(layer.linears.size());
  std::vector<std::vector<OutputTensor>> parts(layer.linears.size());
  parallel_for(count, many(count), [&](int64_t i) {
    if (job_.selection.quantized[layer.index][i])
      append_linear(parts[i], layer, layer.linears[i], *taps[static_cast<size_t>(layer.linears[i].tap)]);
  });
  std::vector<OutputTensor> out;
  for (std::vector<OutputTensor>& part : parts) std::ranges::move(part, std::back_inserter(out));
  const std::set<std::string> replaced = consumed(layer);
  for (const std::string& name : job_.checkpoint.names())
    if (name.starts_with(layer.prefix) && !replaced.contains(name)) append_plain(out, name);
  return out;
}

template <class Body>
void LayerOutput::for_quantized(const LayerSpec& layer, Tap tap, const Body& body) const {
  std::vector<size_t> linears;
  for (size_t i = 0; i < layer.linears.size(); ++i)
    if (layer.linears[i].tap == tap && job_.selection.quantized[layer.index][i]) linears.push_back(i);
  const auto count = static_cast<int64_t>(linears.size());
  parallel_for(count, many(count), [&](int64_t i) { body(linears[i]); });
}

uint64_t LayerOutput::digest_of(const LayerSpec& layer, Tap tap, const HostTap& host) const {
  std::vector<uint64_t> sums(3 * layer.linears.size(), 0);
  for_quantized(layer, tap, [&](size_t i) {
    const LinearSpec& linear = layer.linears[i];
    const int64_t first = first_row_of(job_.spec, layer, linear);
    sums[3 * i] = checksum(host.codes_at(first), linear.rows * host.cols);
    sums[3 * i + 1] = checksum(host.scales_at(first), linear.rows * host.groups * 4);
    if (!host.symmetric) sums[3 * i + 2] = checksum(host.zeros_at(first), linear.rows * host.groups);
  });
  const uint64_t digest = checksum(sums.data(), static_cast<int64_t>(sums.size() * sizeof(uint64_t)));
  return digest == 0 ? 1 : digest;  // 0 says that there is none
}

void LayerOutput::read_linear(const SafetensorsFile& shard, const LayerSpec& layer, const LinearSpec& linear,
                              HostTap& tap) const {
  const Grid& grid = job_.recipe.scheme.grid;
  const int64_t first = first_row_of(job_.spec, layer, linear);
  /// The tensor's elements; what does not fit is a foreign or damaged file.
  const auto load = [&](const char* kind, DType dtype, int64_t count, auto* target) {
    const std::string name = linear.module + kind;
    const TensorEntry* entry = shard.find(name);
    SHARDQ_CHECK(entry && entry->dtype == dtype && entry->bytes() == count * size_of(dtype), ExitCode::disk,
                 "{}: expected {} elements of {} as {}, found {}", shard.path().string(), count, name,
                 torch_name(dtype),
                 entry ? fmt::format("{} bytes of {}", entry->bytes(), torch_name(entry->dtype)) : "none");
    shard.read(*entry, 0, std::as_writable_bytes(std::span(target, count * size_of(dtype) / sizeof *target)));
  };
  std::vector<int32_t> packed(linear.rows * packed_words(tap.cols, grid.bits));
  load(".weight_packed", DType::i32, static_cast<int64_t>(packed.size()), packed.data());
  std::ranges::copy(unpack_rows(packed, linear.rows, tap.cols, grid.bits), tap.codes.as<int8_t>() + first * tap.cols);
  const int64_t scales = linear.rows * tap.groups;
  std::vector<std::byte> stored(scales * size_of(grid.scale_dtype));
  load(".weight_scale", grid.scale_dtype, scales, stored.data());
  convert_elements(stored.data(), grid.scale_dtype, tap.scales.as<float>() + first * tap.groups, DType::f32, scales);
  if (tap.symmetric) return;
  packed.resize(packed_words(linear.rows, grid.bits) * tap.groups);
  load(".weight_zero_point", DType::i32, static_cast<int64_t>(packed.size()), packed.data());
  std::ranges::copy(unpack_columns(packed, linear.rows, tap.groups, grid.bits),
                    tap.zeros.as<int8_t>() + first * tap.groups);
}

HostTap LayerOutput::read(const LayerSpec& layer, Tap tap, uint64_t digest) const {
  HostTap host = empty_tap(job_.backend, job_.spec.tap_shape(layer, tap), job_.recipe.scheme);
  try {
    const SafetensorsFile shard(shard_path(layer));
    for_quantized(layer, tap, [&](size_t i) { read_linear(shard, layer, layer.linears[i], host); });
  } catch (const Error& error) {
    fail(ExitCode::disk, "{}; start anew with --resume never", error.what());
  }
  SHARDQ_CHECK(digest_of(layer, tap, host) == digest, ExitCode::disk,
               "{} is damaged: its codes of {} are not those that were written; start anew with --resume never",
               shard_path(layer).string(), to_string(tap));
  return host;
}

void LayerOutput::write(const LayerSpec& layer) {
  if (!owns(layer)) return;
  poll();
  throw_failure();
  const HostTaps taps = std::exchange(taps_, {});
  int64_t bytes = 0;
  for (const auto& host : taps)
    if (host) bytes += host->row_count * host->cols;
  constexpr int64_t kMostBytes = int64_t{4} << 30;  // of codes in flight, and as much again for what they are packed to
  constexpr size_t kMostWrites = 3;
  const auto in_flight = [&] {
    int64_t sum = 0;
    for (const Pending& one : pending_) sum += one.bytes;
    return sum;
  };
  while (!pending_.empty() && (pending_.size() >= kMostWrites || in_flight() + bytes > kMostBytes)) collect();
  throw_failure();
  pending_.push_back({layer.index, bytes, std::async(std::launch::async, [this, &layer, taps] {
                        writer_.write_shard(layer.index + 1, shard_count(), layer_tensors(layer, taps));
                        Digests digests{};
                        for (Tap tap : kTaps) {
                          const auto t = static_cast<size_t>(tap);
                          if (taps[t]) digests[t] = digest_of(layer, tap, *taps[t]);
                        }
                        return digests;
                      })});
}

void LayerOutput::poll() {
  while (!pending_.empty() && pending_.front().digests.wait_for(std::chrono::seconds(0)) == std::future_status::ready)
    collect();
}

void LayerOutput::collect() {
  Pending done = std::move(pending_.front());
  pending_.pop_front();
  try {
    digests_[done.layer] = done.digests.get();
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
}

void LayerOutput::throw_failure() {
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

uint64_t LayerOutput::digest(int64_t layer, Tap tap) const {
  const auto found = digests_.find(layer);
  return found == digests_.end() ? 0 : found->second[static_cast<size_t>(tap)];
}

void LayerOutput::wait() {
  while (!pending_.empty()) collect();
  throw_failure();
  if (rest_.valid() && rest_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) rest_.get();
}

void LayerOutput::finish() {
  wait();
  if (rest_.valid()) rest_.get();
}

void LayerOutput::start_rest() {
  if (job_.host.rank() != 0 || writer_.has_shard(shard_count(), shard_count())) return;
  std::vector<OutputTensor> out;
  for (const std::string& name : job_.checkpoint.names()) {
    const bool in_layer =
        std::ranges::any_of(job_.spec.layer, [&](const LayerSpec& l) { return name.starts_with(l.prefix); });
    if (!in_layer) append_plain(out, name);
  }
  rest_ = std::async(std::launch::async, [this, tensors = std::move(out)]() mutable {
    writer_.write_shard(shard_count(), shard_count(), std::move(tensors));
  });
}

void LayerOutput::publish() {
  const QuantScheme& scheme = job_.recipe.scheme;
  OutputGroup group;
  group.targets = {"Linear"};
  group.bits = scheme.grid.bits;
  group.symmetric = scheme.grid.symmetric;
  group.group_size = scheme.group_size;
  group.actorder = scheme.method == Method::gptq && scheme.actorder == ActOrder::static_ ? "static" : "";
  group.observer = scheme.observer == Observer::minmax ? "memoryless_minmax" : "memoryless_mse";
  const std::string config = compressed_tensors_config(job_.checkpoint.config_text(), {group}, job_.selection.ignored);
  writer_.publish(shard_count(), config, job_.checkpoint.other_files(),
                  {{"recipe.yaml", recipe_text(job_.recipe, RecipeText::published)}});
}

}  // namespace shardq
