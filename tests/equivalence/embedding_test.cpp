// Embedding: a device gathers from a table of its own, the host from the mapped file; the values are the same.
#include "core/error.hpp"
#include "equivalence/equivalence.hpp"
#include "unit/model/golden_case.hpp"

namespace shardq::equivalence {
namespace {

using EmbeddingEquivalence = Equivalence;

TEST_F(EmbeddingEquivalence, RowsAreEqual) {
  const GoldenCase golden("llama");
  const ModelSpec spec = read_model_spec(golden.checkpoint);
  std::vector<int32_t> ids = {95, 0, 7, 7};
  for (int32_t i = 0; i < 1000; ++i) ids.push_back(i * 37 % 96);
  for (DType dtype : {DType::bf16, DType::f32}) {
    const Tensor want = Embedding(cpu(), golden.checkpoint, spec, dtype)(ids),
                 got = Embedding(gpu(), golden.checkpoint, spec, dtype)(ids);
    EXPECT_TRUE(same(values_of(gpu(), got), values_of(cpu(), want))) << safetensors_name(dtype);
  }
  const std::vector<int32_t> bad = {1, 96};
  EXPECT_THROW(Embedding(gpu(), golden.checkpoint, spec, DType::bf16)(bad), Error);
  EXPECT_EQ(Embedding(gpu(), golden.checkpoint, spec, DType::bf16)({}).size(), 0);
}

}  // namespace
}  // namespace shardq::equivalence
