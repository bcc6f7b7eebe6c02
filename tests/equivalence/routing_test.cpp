// Expert routing, sorting, gathering and combining: CUDA against the CPU backend.
#include <numeric>

#include "equivalence/strided.hpp"

namespace shardq::equivalence {
namespace {

class Routing : public Equivalence {
 protected:
  struct Routed {
    std::vector<int32_t> ids;
    std::vector<float> weights;
  };
  Routed route(Backend& backend, DType dtype, const Layout& layout, const std::vector<float>& logits,
               const RouterSpec& router) {
    const Tensor buffer = to_tensor(backend, dtype, {layout.rows, layout.stride}, logits);
    const Tensor ids = poisoned(backend, DType::i32, {layout.rows, router.top_k});
    const Tensor weights = poisoned(backend, DType::f32, {layout.rows, router.top_k});
    backend.route(view_of(buffer, layout), router, ids.as<int32_t>(), weights.as<float>());
    return {raw_of<int32_t>(backend, ids), values_of(backend, weights)};
  }
  void compare(DType dtype, const Layout& layout, const std::vector<float>& logits, const RouterSpec& router) {
    const Routed want = route(cpu(), dtype, layout, logits, router), got = route(gpu(), dtype, layout, logits, router);
    const std::string what = to_string(layout) + " top " + std::to_string(router.top_k);
    EXPECT_TRUE(same(got.ids, want.ids)) << what;
    // The CPU sums the experts in sequence: one rounding each; exponentials and divisions are good to a few units.
    const double relative = (16.0 + static_cast<double>(router.experts)) * kEps32;
    EXPECT_TRUE(close(got.weights, want.weights, [&](int64_t i) { return relative * want.weights[i]; })) << what;
  }
};

TEST_F(Routing, RouteRandomLogits) {
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const int64_t experts : {1, 2, 8, 31, 32, 33, 60, 128, 160, 256, 257, 512, 1024})
      for (const int64_t top_k : {1, 2, 6, 8, 16, 33}) {
        if (top_k > experts) continue;
        for (const Layout& layout :
             {dense(0, experts), dense(1, experts), dense(61, experts), Layout{13, experts, experts + 5, 3}}) {
          // 4x the usual spread, so that no two probabilities of a row are equal by rounding.
          const std::vector<float> logits = normal(layout.elements(), dtype, 4.0f);
          compare(dtype, layout, logits, {experts, top_k, true});
          compare(dtype, layout, logits, {experts, top_k, false});
        }
      }
}

TEST_F(Routing, TiesGoToTheLowerIndex) {
  for (const int64_t experts : {8, 64, 128, 300}) {
    const Layout layout = dense(200, experts);
    std::vector<float> logits(layout.elements());
    for (float& logit : logits) logit = static_cast<float>(static_cast<int>(random() % 3) - 1);  // -1, 0, 1
    compare(DType::f32, layout, logits, {experts, 8, true});
    for (float& logit : logits) logit = random() % 2 != 0 ? 0.0f : -0.0f;
    compare(DType::f32, layout, logits, {experts, 8, false});
    compare(DType::f32, layout, std::vector<float>(layout.elements(), 7.0f), {experts, 8, true});
  }
}

TEST_F(Routing, NotANumberStillGivesDistinctExperts) {
  if (gpu().is_host()) GTEST_SKIP() << "promised by the CUDA backend only, where a wrong id would write out of bounds";
  const Layout layout = dense(3, 64);
  std::vector<float> logits = normal(layout.elements());
  for (int64_t i = 0; i < 64; ++i) logits[i] = NAN;
  logits[64 + 5] = NAN;
  const Routed got = route(gpu(), DType::f32, layout, logits, {64, 8, true});
  for (int64_t t = 0; t < 3; ++t) {
    std::vector<int32_t> ids(got.ids.begin() + t * 8, got.ids.begin() + (t + 1) * 8);
    std::ranges::sort(ids);
    EXPECT_TRUE(std::ranges::adjacent_find(ids) == ids.end());
    EXPECT_GE(ids.front(), 0);
    EXPECT_LT(ids.back(), 64);
  }
}

TEST_F(Routing, SortByExpertIsStable) {
  for (const int64_t experts : {1, 2, 8, 60, 128, 512, 1024})
    for (const int64_t slots : {0, 1, 31, 32, 33, 1023, 1024, 1025, 8191, 8193, 40007, 300000}) {
      std::vector<int32_t> ids(slots);
      // Squared uniform numbers: low experts get many slots, high ones few or none.
      for (int32_t& id : ids) {
        const double u = static_cast<double>(random() % 100003) / 100003.0;
        id = static_cast<int32_t>(u * u * static_cast<double>(experts));
      }
      if (slots > 100) std::fill(ids.begin() + slots / 2, ids.begin() + slots / 2 + 40, 0);
      std::vector<int32_t> order[2], place[2];
      std::vector<int64_t> offsets[2];
      for (int b = 0; b < 2; ++b) {
        Backend& backend = b == 0 ? cpu() : gpu();
        const Tensor device_ids = to_tensor_raw(backend, DType::i32, {slots}, ids);
        const Tensor device_order = poisoned(backend, DType::i32, {slots}),
                     device_place = poisoned(backend, DType::i32, {slots});
        offsets[b].assign(experts + 1, -1);
        backend.sort_by_expert(device_ids.as<int32_t>(), slots, experts, device_order.as<int32_t>(),
                               device_place.as<int32_t>(), offsets[b]);
        order[b] = raw_of<int32_t>(backend, device_order);
        place[b] = raw_of<int32_t>(backend, device_place);
      }
      const std::string what = std::to_string(slots) + " slots, " + std::to_string(experts) + " experts";
      EXPECT_TRUE(same(offsets[1], offsets[0])) << what;
      EXPECT_TRUE(same(order[1], order[0])) << what;
      EXPECT_TRUE(same(place[1], place[0])) << what;
    }
}

TEST_F(Routing, SortRefusesIdsOutside) {
  for (const int32_t wrong : {-1, 8, 1 << 30}) {
    std::vector<int32_t> ids(100, 3);
    ids[71] = wrong;
    const Tensor device_ids = to_tensor_raw(gpu(), DType::i32, {100}, ids);
    const Tensor order = poisoned(gpu(), DType::i32, {100}), place = poisoned(gpu(), DType::i32, {100});
    std::vector<int64_t> offsets(9);
    EXPECT_THROW(
        gpu().sort_by_expert(device_ids.as<int32_t>(), 100, 8, order.as<int32_t>(), place.as<int32_t>(), offsets),
        Error);
  }
}

TEST_F(Routing, GatherRows) {
  for (const DType dtype : {DType::bf16, DType::f32, DType::i8, DType::i64})
    for (const Layout& layout : row_layouts())
      for (const int64_t divisor : {1, 8}) {
        const Layout source = {layout.rows / divisor + 1, layout.cols, layout.stride, layout.offset};
        const int64_t source_bytes = source.elements() * size_of(dtype);
        std::vector<uint8_t> bytes(source_bytes);
        for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
        std::vector<int32_t> order = permutation(layout.rows);
        Pair target;
        for (int b = 0; b < 2; ++b) {
          Backend& backend = b == 0 ? cpu() : gpu();
          const Tensor from = to_tensor_raw(backend, dtype, {source.rows, source.stride}, bytes);
          const Tensor device_order = to_tensor_raw(backend, DType::i32, {layout.rows}, order);
          Tensor to = poisoned(backend, dtype, {layout.rows, layout.stride});
          backend.gather_rows(view_of(from, source), device_order.as<int32_t>(), divisor, view_of(to, layout));
          backend.synchronize();
          (b == 0 ? target.cpu : target.gpu) = std::move(to);
        }
        EXPECT_TRUE(same(raw_of<uint8_t>(gpu(), target.gpu), raw_of<uint8_t>(cpu(), target.cpu)))
            << to_string(layout) << " divisor " << divisor << " " << safetensors_name(dtype);
      }
}

TEST_F(Routing, DispatchRows) {
  for (const DType dtype : {DType::bf16, DType::f32, DType::i8, DType::i64})
    for (const Layout& layout : row_layouts())
      for (const int64_t copies : {1, 3, 8}) {
        if (layout.rows > 600) continue;
        const int64_t slots = layout.rows * copies;
        std::vector<uint8_t> bytes(layout.elements() * size_of(dtype));
        for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
        const std::vector<int32_t> order = permutation(slots);
        std::vector<int32_t> place(slots);
        for (int64_t i = 0; i < slots; ++i) place[order[i]] = static_cast<int32_t>(i);
        const Layout spread = {slots, layout.cols, layout.stride, layout.offset};
        Pair target;
        for (int b = 0; b < 2; ++b) {
          Backend& backend = b == 0 ? cpu() : gpu();
          const Tensor from = to_tensor_raw(backend, dtype, {layout.rows, layout.stride}, bytes);
          const Tensor device_order = to_tensor_raw(backend, DType::i32, {slots}, order);
          const Tensor device_place = to_tensor_raw(backend, DType::i32, {slots}, place);
          Tensor to = poisoned(backend, dtype, {slots, layout.stride});
          backend.dispatch_rows(view_of(from, layout), device_order.as<int32_t>(), device_place.as<int32_t>(), copies,
                                view_of(to, spread));
          backend.synchronize();
          (b == 0 ? target.cpu : target.gpu) = std::move(to);
        }
        EXPECT_TRUE(same(raw_of<uint8_t>(gpu(), target.gpu), raw_of<uint8_t>(cpu(), target.cpu)))
            << to_string(layout) << " copies " << copies << " " << safetensors_name(dtype);
      }
}

TEST_F(Routing, CombineRowsIsBitEqual) {
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const Layout& layout : row_layouts()) {
      if (layout.rows > 600) continue;
      for (const int64_t top_k : {1, 2, 5, 8}) {
        const Layout source = {layout.rows * top_k, layout.cols, layout.stride, layout.offset};
        const std::vector<float> rows = normal(source.elements(), dtype), before = normal(layout.elements(), dtype);
        const std::vector<int32_t> place = permutation(source.rows);
        std::vector<float> weights(source.rows);
        for (float& weight : weights) weight = static_cast<float>(random() % 1000) / 1000.0f;
        Pair target;
        for (int b = 0; b < 2; ++b) {
          Backend& backend = b == 0 ? cpu() : gpu();
          const Tensor from = to_tensor(backend, dtype, {source.rows, source.stride}, rows);
          Tensor to = to_tensor(backend, dtype, {layout.rows, layout.stride}, before);
          const Tensor device_place = to_tensor_raw(backend, DType::i32, {source.rows}, place);
          const Tensor device_weights = to_tensor(backend, DType::f32, {source.rows}, weights);
          backend.combine_rows(view_of(from, source), device_place.as<int32_t>(), device_weights.as<float>(), top_k,
                               view_of(to, layout));
          backend.synchronize();
          (b == 0 ? target.cpu : target.gpu) = std::move(to);
        }
        EXPECT_TRUE(same(raw_of<uint8_t>(gpu(), target.gpu), raw_of<uint8_t>(cpu(), target.cpu)))
            << to_string(layout) << " top " << top_k << " " << torch_name(dtype);
      }
    }
}

}  // namespace
}  // namespace shardq::equivalence
