#include "core/dtype.hpp"

#include <array>

namespace shardq {
namespace {
struct Row {
  DType dtype;
  int64_t size;
  std::string_view safetensors, torch;
};
constexpr std::array<Row, 15> kRows{{
    {DType::boolean, 1, "BOOL", "bool"},        {DType::u8, 1, "U8", "uint8"},
    {DType::i8, 1, "I8", "int8"},               {DType::f8_e4m3, 1, "F8_E4M3", "float8_e4m3fn"},
    {DType::f8_e5m2, 1, "F8_E5M2", "float8_e5m2"}, {DType::u16, 2, "U16", "uint16"},
    {DType::i16, 2, "I16", "int16"},            {DType::f16, 2, "F16", "float16"},
    {DType::bf16, 2, "BF16", "bfloat16"},       {DType::u32, 4, "U32", "uint32"},
    {DType::i32, 4, "I32", "int32"},            {DType::f32, 4, "F32", "float32"},
    {DType::u64, 8, "U64", "uint64"},           {DType::i64, 8, "I64", "int64"},
    {DType::f64, 8, "F64", "float64"},
}};
const Row& row(DType dtype) { return kRows[static_cast<size_t>(dtype)]; }
}  // namespace

int64_t size_of(DType dtype) { return row(dtype).size; }
std::string_view safetensors_name(DType dtype) { return row(dtype).safetensors; }
std::string_view torch_name(DType dtype) { return row(dtype).torch; }

std::optional<DType> dtype_from_safetensors(std::string_view name) {
  for (const Row& r : kRows)
    if (r.safetensors == name) return r.dtype;
  return std::nullopt;
}

std::optional<DType> dtype_from_torch(std::string_view name) {
  if (name.starts_with("torch.")) name.remove_prefix(6);
  for (const Row& r : kRows)
    if (r.torch == name) return r.dtype;
  return std::nullopt;
}

bool is_floating(DType dtype) {
  return dtype == DType::f8_e4m3 || dtype == DType::f8_e5m2 || dtype == DType::f16 || dtype == DType::bf16 ||
         dtype == DType::f32 || dtype == DType::f64;
}
}  // namespace shardq
