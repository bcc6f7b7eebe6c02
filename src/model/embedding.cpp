#include "model/embedding.hpp"

#include "core/error.hpp"

namespace shardq {

Embedding::Embedding(Backend& backend, const Checkpoint& checkpoint, const ModelSpec& spec, DType compute)
    : backend_(backend), checkpoint_(checkpoint), spec_(spec), compute_(compute) {
  if (backend.is_host()) return;
  try {
    table_ = WeightSource(checkpoint, spec).load_tensor(backend, spec.embedding, compute, false);
  } catch (const OutOfMemory&) {
    // The host gathers rows one chunk at a time then: slower, and the same values.
  }
}

void Embedding::gather_on_host(std::span<const int32_t> ids, std::byte* target) const {
  const DType stored = checkpoint_.entry(spec_.embedding).dtype;
  const std::byte* table = checkpoint_.bytes(spec_.embedding).data();
  const int64_t source_bytes = spec_.hidden * size_of(stored), target_bytes = spec_.hidden * size_of(compute_);
  const auto count = static_cast<int64_t>(ids.size());
#pragma omp parallel for schedule(static) if (count * target_bytes > (1 << 20))
  for (int64_t i = 0; i < count; ++i)
    convert_elements(table + ids[i] * source_bytes, stored, target + i * target_bytes, compute_, spec_.hidden);
}

Tensor Embedding::operator()(std::span<const int32_t> ids) const {
  const auto count = static_cast<int64_t>(ids.size());
  for (int64_t i = 0; i < count; ++i)
    SHARDQ_CHECK(0 <= ids[i] && ids[i] < spec_.vocab, ExitCode::input,
                 "token id {} at position {}: the vocabulary has {}", ids[i], i, spec_.vocab);
  Tensor hidden(backend_, compute_, {count, spec_.hidden}, "hidden states");
  if (count == 0) return hidden;
  if (table_) {
    const Tensor rows(backend_, DType::i32, {count}, "token ids");
    backend_.upload(rows.data(), ids.data(), rows.bytes());
    backend_.gather_rows(table_.matrix(), rows.as<int32_t>(), 1, hidden.matrix());
  } else if (backend_.is_host()) {
    gather_on_host(ids, hidden.as<std::byte>());
  } else {
    std::vector<std::byte> host(hidden.bytes());
    gather_on_host(ids, host.data());
    backend_.upload(hidden.data(), host.data(), hidden.bytes());
  }
  return hidden;
}

}  // namespace shardq
