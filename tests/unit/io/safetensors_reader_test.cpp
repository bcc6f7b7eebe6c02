#include <cstring>
#include <optional>

#include "io/safetensors.hpp"
#include "io/safetensors_header.hpp"
#include "unit/io/io_testing.hpp"

namespace shardq {
namespace {

using io_testing::TempFolder;
using io_testing::write_file;

/// A file of header text and data; `length` overrides the truthful header length.
std::string image(const std::string& header, size_t data_bytes, std::optional<uint64_t> length = std::nullopt) {
  uint64_t n = length.value_or(header.size());
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &n, 8);
  bytes += header;
  for (size_t i = 0; i < data_bytes; ++i) bytes += static_cast<char>(i);
  return bytes;
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}
std::string object(const std::vector<std::string>& members) {
  std::string text = "{";
  for (size_t i = 0; i < members.size(); ++i) text += (i ? "," : "") + members[i];
  return text + "}";
}
std::string ones(int rank) {
  std::string text = "[1";
  for (int i = 1; i < rank; ++i) text += ",1";
  return text + "]";
}
const std::string kOne = tensor("a", "F32", "[1]", "[0,4]");

struct Case {
  std::string name, bytes;
  std::vector<std::string> words = {};  ///< of the message; empty and accepted: a valid file
  bool valid = false;
};

std::vector<Case> valid_files() {
  std::vector<Case> cases{
      {"basic", image(object({tensor("a", "F32", "[2,2]", "[0,16]")}), 16)},
      {"keys_in_any_order", image(object({tensor("b", "F32", "[1]", "[4,8]"), kOne}), 8)},
      {"misaligned", image(object({tensor("a", "U8", "[3]", "[0,3]"), tensor("b", "F32", "[1]", "[3,7]")}), 7)},
      {"fields_in_any_order", image(R"({"a":{"data_offsets":[0,4],"shape":[1],"dtype":"F32"}})", 4)},
      {"unknown_fields",
       image(
           R"({"a":{"dtype":"F32","x":{"y":[1,{"z":-2.5}]},"shape":[1],"w":null,"v":"t","u":7,"data_offsets":[0,4]}})",
           4)},
      {"metadata_only", image(R"({"__metadata__":{"format":"pt"}})", 0)},
      {"metadata_null", image(object({R"("__metadata__":null)", kOne}), 4)},
      {"metadata_last", image(object({kOne, R"("__metadata__":{"k":"v"})"}), 4)},
      {"no_tensors", image("{}", 0)},
      {"leading_space", image(" " + object({kOne}), 4)},
      {"padding", image(object({kOne}) + "    ", 4)},
      {"eight_bit_float", image(object({tensor("a", "F8_E4M3", "[3]", "[0,3]")}), 3)},
      {"scalar", image(object({tensor("a", "F32", "[]", "[0,4]")}), 4)},
      {"zero_dim", image(object({tensor("a", "F32", "[0,5]", "[0,0]"), tensor("b", "F32", "[1]", "[0,4]")}), 4)},
      {"zero_dim_in_the_middle",
       image(object({kOne, tensor("z", "F32", "[0]", "[4,4]"), tensor("b", "F32", "[1]", "[4,8]")}), 8)},
      {"zero_dim_at_the_end", image(object({kOne, tensor("z", "F32", "[0]", "[4,4]")}), 4)},
      {"zero_dim_first_of_large_ones", image(object({tensor("a", "F32", "[0,4611686018427387904,4]", "[0,0]")}), 0)},
      {"rank_64", image(object({tensor("a", "F32", ones(64), "[0,4]")}), 4)},
      {"unicode_name", image(object({tensor("\\u00e9\\ud83d\\ude00", "F32", "[1]", "[0,4]")}), 4)},
      {"every_dtype", image(object({tensor("a", "BOOL", "[1]", "[0,1]"), tensor("b", "U8", "[1]", "[1,2]"),
                                    tensor("c", "I8", "[1]", "[2,3]"), tensor("d", "F8_E5M2", "[1]", "[3,4]"),
                                    tensor("e", "U16", "[1]", "[4,6]"), tensor("f", "I16", "[1]", "[6,8]"),
                                    tensor("g", "F16", "[1]", "[8,10]"), tensor("h", "BF16", "[1]", "[10,12]"),
                                    tensor("i", "U32", "[1]", "[12,16]"), tensor("j", "I32", "[1]", "[16,20]"),
                                    tensor("k", "U64", "[1]", "[20,28]"), tensor("l", "I64", "[1]", "[28,36]"),
                                    tensor("m", "F64", "[1]", "[36,44]")}),
                            44)}};
  for (Case& c : cases) c.valid = true;
  return cases;
}

std::vector<Case> malformed_files() {
  const std::string nested(200, '[');
  return {
      // geometry
      {"hole", image(object({kOne, tensor("b", "F32", "[1]", "[8,12]")}), 12), {"'b'", "hole", "expected 4"}},
      {"first_not_at_zero", image(object({tensor("a", "F32", "[1]", "[4,8]")}), 8), {"'a'", "hole"}},
      {"overlap",
       image(object({tensor("a", "F32", "[2]", "[0,8]"), tensor("b", "F32", "[2]", "[4,12]")}), 12),
       {"'b'", "overlaps"}},
      {"one_range_two_names", image(object({kOne, tensor("b", "F32", "[1]", "[0,4]")}), 4), {"overlaps"}},
      {"trailing_bytes", image(object({kOne}), 5), {"1 trailing"}},
      {"truncated", image(object({tensor("a", "F32", "[2]", "[0,8]")}), 7), {"'a'", "truncated"}},
      {"truncated_to_nothing", image(object({tensor("a", "F32", "[2]", "[0,8]")}), 0), {"'a'", "truncated"}},
      {"beyond_the_file", image(object({tensor("a", "F32", "[100]", "[0,400]")}), 4), {"'a'", "400"}},
      {"negative_offset", image(object({tensor("a", "F32", "[2]", "[-8,0]")}), 8), {"data_offsets", "unsigned"}},
      {"minus_zero", image(object({tensor("a", "F32", "[1]", "[-0,4]")}), 4), {"data_offsets", "unsigned"}},
      {"reversed", image(object({tensor("a", "F32", "[0]", "[4,0]")}), 4), {"reversed"}},
      {"three_offsets", image(object({tensor("a", "F32", "[1]", "[0,4,4]")}), 4), {"more than 2"}},
      {"one_offset", image(object({tensor("a", "F32", "[1]", "[0]")}), 4), {"2 numbers", "found 1"}},
      {"string_offsets", image(object({tensor("a", "F32", "[1]", "[\"0\",\"4\"]")}), 4), {"data_offsets", "a string"}},
      {"offset_beyond_u64",
       image(object({tensor("a", "F32", "[1]", "[18446744073709551612,18446744073709551616]")}), 4),
       {"data_offsets"}},
      {"offset_beyond_i64",
       image(object({tensor("a", "F32", "[1]", "[9223372036854775808,9223372036854775812]")}), 4),
       {"2^63"}},
      {"wrapping_offsets",
       image(object({tensor("a", "F32", "[0]", "[0,0]"),
                     tensor("b", "U8", "[18446744073709551615]", "[0,18446744073709551615]")}),
             0),
       {"'b'"}},
      // shape and dtype
      {"shape_too_small", image(object({tensor("a", "F32", "[1]", "[0,8]")}), 8), {"'a'", "needs 4", "hold 8"}},
      {"shape_too_large",
       image(object({tensor("a", "BF16", "[3,3]", "[0,16]")}), 16),
       {"[3, 3]", "needs 18", "hold 16"}},
      {"shape_overflow", image(object({tensor("a", "F32", "[4611686018427387904,2]", "[0,16]")}), 16), {"overflows"}},
      {"shape_overflow_zero_last",
       image(object({tensor("a", "F32", "[9223372036854775807,9223372036854775807,0]", "[0,0]")}), 0),
       {"overflows"}},
      {"dimension_beyond_i64", image(object({tensor("a", "F32", "[0,9223372036854775808]", "[0,0]")}), 0), {"2^63"}},
      {"float_dimension", image(object({tensor("a", "F32", "[1.0]", "[0,4]")}), 4), {"shape", "1.0"}},
      {"exponent_dimension", image(object({tensor("a", "F32", "[1e0]", "[0,4]")}), 4), {"shape", "1e0"}},
      {"boolean_dimension", image(object({tensor("a", "F32", "[true]", "[0,4]")}), 4), {"shape", "boolean"}},
      {"null_shape", image(object({tensor("a", "F32", "null", "[0,4]")}), 4), {"shape", "null"}},
      {"nested_shape", image(object({tensor("a", "F32", "[[1]]", "[0,4]")}), 4), {"shape", "an array"}},
      {"rank_65", image(object({tensor("a", "F32", ones(65), "[0,4]")}), 4), {"shape", "more than 64"}},
      {"lower_case_dtype", image(object({tensor("a", "f32", "[1]", "[0,4]")}), 4), {"'f32'", "not supported"}},
      {"unknown_dtype", image(object({tensor("a", "F128", "[1]", "[0,16]")}), 16), {"'F128'"}},
      {"int4_dtype", image(object({tensor("a", "I4", "[2]", "[0,1]")}), 1), {"'I4'"}},
      {"sub_byte_dtype", image(object({tensor("a", "F4", "[2,2]", "[0,2]")}), 2), {"'F4'", "not supported"}},
      {"number_as_dtype",
       image(R"({"a":{"dtype":5,"shape":[1],"data_offsets":[0,4]}})", 4),
       {"dtype", "a string", "a number"}},
      {"lacks_dtype", image(R"({"a":{"shape":[1],"data_offsets":[0,4]}})", 4), {"'a' lacks dtype"}},
      {"lacks_shape", image(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4), {"'a' lacks shape"}},
      {"lacks_offsets", image(R"({"a":{"dtype":"F32","shape":[1]}})", 4), {"'a' lacks data_offsets"}},
      // keys
      {"duplicate_tensor", image(object({kOne, kOne}), 4), {"duplicate key 'a'"}},
      {"duplicate_tensor_disjoint",
       image(object({kOne, tensor("a", "F32", "[1]", "[4,8]")}), 8),
       {"duplicate key 'a'"}},
      {"duplicate_tensor_escaped",
       image(object({kOne, tensor("\\u0061", "I32", "[1]", "[0,4]")}), 4),
       {"duplicate key 'a'"}},
      {"duplicate_dtype",
       image(R"({"a":{"dtype":"F32","dtype":"I32","shape":[1],"data_offsets":[0,4]}})", 4),
       {"duplicate field 'dtype'"}},
      {"duplicate_shape",
       image(R"({"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}})", 4),
       {"duplicate field 'shape'"}},
      {"duplicate_offsets",
       image(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"data_offsets":[0,4]}})", 4),
       {"duplicate field"}},
      {"duplicate_metadata",
       image(object({R"("__metadata__":{"x":"1"})", R"("__metadata__":{"x":"2"})", kOne}), 4),
       {"duplicate key '__metadata__'"}},
      {"duplicate_metadata_null",
       image(object({R"("__metadata__":null)", R"("__metadata__":{"x":"2"})", kOne}), 4),
       {"duplicate key"}},
      {"duplicate_metadata_key",
       image(object({R"("__metadata__":{"x":"1","x":"2"})", kOne}), 4),
       {"duplicate key 'x'"}},
      {"metadata_number", image(R"({"__metadata__":{"x":1}})", 0), {"__metadata__", "'x'"}},
      {"metadata_object", image(R"({"__metadata__":{"x":{}}})", 0), {"__metadata__"}},
      {"metadata_string", image(R"({"__metadata__":"pt"})", 0), {"'__metadata__'", "an object"}},
      {"empty_name", image(object({tensor("", "F32", "[1]", "[0,4]")}), 4), {"empty name"}},
      {"nul_in_name", image(object({tensor("a\\u0000b", "F32", "[1]", "[0,4]")}), 4), {"NUL", "a\\x00b"}},
      {"control_characters_in_name", image(object({tensor("a\\nb", "F32", "[2]", "[0,4]")}), 4), {"a\\x0ab"}},
      {"long_name", image(object({tensor(std::string(100000, 'n'), "F32", "[2]", "[0,4]")}), 4), {"100000 characters"}},
      // JSON
      {"array_root", image("[]", 0), {"must be a JSON object", "an array"}},
      {"number_root", image("5", 0), {"must be a JSON object"}},
      {"tensor_is_array", image("{\"a\":[]}", 0), {"'a'", "an array"}},
      {"tensor_is_null", image("{\"a\":null}", 0), {"'a'", "null"}},
      {"deep_nesting", image("{\"a\":" + nested + std::string(200, ']') + "}", 0), {"'a'"}},
      {"deep_nesting_in_unknown_field",
       image("{\"a\":{\"x\":" + nested + std::string(200, ']') + "}}", 0),
       {"deeper than 128"}},
      {"text_after_json", image(object({kOne}) + " x", 4), {"not valid JSON"}},
      {"two_objects", image(object({kOne}) + "{}", 4), {"not valid JSON"}},
      {"nul_padding", image(object({kOne}) + std::string(2, '\0'), 4), {"not valid JSON"}},
      {"hidden_behind_nul", image(object({kOne}) + std::string(1, '\0') + "garbage", 4), {"not valid JSON"}},
      {"byte_order_mark", image("\xef\xbb\xbf{}", 0), {"byte-order mark"}},
      {"not_utf8", image(object({tensor("a\xff", "F32", "[1]", "[0,4]")}), 4), {"not valid JSON"}},
      {"lone_surrogate", image(object({tensor("\\ud800", "F32", "[1]", "[0,4]")}), 4), {"not valid JSON"}},
      {"comment", image("/*x*/" + object({kOne}), 4), {"not valid JSON"}},
      {"trailing_comma", image("{" + kOne + ",}", 4), {"not valid JSON"}},
      {"cut_json", image(object({kOne}).substr(0, 20), 0), {"not valid JSON"}},
      {"infinity", image(R"({"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}})", 4), {}},
      // length
      {"header_length_zero", image("", 0, 0), {"header is empty"}},
      {"header_beyond_file", image("{}", 0, 1000), {"header of 1000 bytes is longer than the file of 10 bytes"}},
      {"header_beyond_limit", image("{}", 0, 100000001), {"beyond the format's limit"}},
      {"header_u64_max", image("{}", 0, UINT64_MAX), {"beyond the format's limit"}},
      {"seven_bytes", std::string(7, '\0'), {"at least 8"}},
      {"empty_file", "", {"at least 8"}},
  };
}

class SafetensorsTable : public testing::TestWithParam<Case> {};

TEST_P(SafetensorsTable, IsAcceptedOrRefusedInOneLine) {
  const TempFolder folder;
  const auto path = folder / "file.safetensors";
  write_file(path, GetParam().bytes);
  if (GetParam().valid) {
    EXPECT_NO_THROW(SafetensorsFile{path});
    return;
  }
  std::vector<std::string> words = GetParam().words;
  words.push_back(path.string());
  EXPECT_EQ(io_testing::error_mismatch(ExitCode::input, words, [&] { SafetensorsFile file(path); }), "");
}
std::string case_name(const testing::TestParamInfo<Case>& info) {
  return info.param.name;
}
INSTANTIATE_TEST_SUITE_P(Valid, SafetensorsTable, testing::ValuesIn(valid_files()), case_name);
INSTANTIATE_TEST_SUITE_P(Malformed, SafetensorsTable, testing::ValuesIn(malformed_files()), case_name);

TEST(SafetensorsReader, GivesEntriesMetadataAndBytes) {
  const TempFolder folder;
  write_file(folder / "x", image(object({R"("__metadata__":{"format":"pt","k":"v"})",
                                         tensor("b", "I16", "[2]", "[2,6]"), tensor("a", "U8", "[2]", "[0,2]")}),
                                 6));
  const SafetensorsFile file(folder / "x");
  ASSERT_EQ(file.entries().size(), 2u);
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"k", "v"}}));
  const TensorEntry* b = file.find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->name, "b");
  EXPECT_EQ(b->dtype, DType::i16);
  EXPECT_EQ(b->shape, (Shape{2}));
  EXPECT_EQ(file.find("c"), nullptr);
  const auto bytes = file.bytes(*b);
  ASSERT_EQ(bytes.size(), 4u);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(static_cast<int>(bytes[i]), 2 + i);

  std::vector<std::byte> part(3);
  file.read(*b, 1, part);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(static_cast<int>(part[i]), 3 + i);
  EXPECT_ERROR(ExitCode::internal, ({"'b'", "[2, 5)"}), file.read(*b, 2, part));
}

TEST(SafetensorsReader, NamesWhatIsNoFile) {
  const TempFolder folder;
  EXPECT_ERROR(ExitCode::input, ({"cannot open", "absent", "No such file"}), SafetensorsFile(folder / "absent"));
  EXPECT_ERROR(ExitCode::input, ({"not a regular file"}), SafetensorsFile(folder.path()));
}

TEST(SafetensorsReader, AFileCutWhileInUseIsAnErrorOfRead) {
  const TempFolder folder;
  write_file(folder / "x", image(object({tensor("a", "U8", "[100]", "[0,100]")}), 100));
  const SafetensorsFile file(folder / "x");
  std::filesystem::resize_file(folder / "x", std::filesystem::file_size(folder / "x") - 10);
  std::vector<std::byte> all(100);
  EXPECT_ERROR(ExitCode::input, ({"10 bytes early", "cut while in use"}), file.read(*file.find("a"), 0, all));
}

// A header of one long list must not be turned into something much larger than itself.
TEST(SafetensorsReader, HostileHeaderIsRefusedEarly) {
  const TempFolder folder;
  write_file(folder / "x", image(object({tensor("a", "F32", ones(2'000'000), "[0,4]")}), 4));
  EXPECT_ERROR(ExitCode::input, ({"more than 64"}), SafetensorsFile(folder / "x"));
}

// Any single changed or missing byte of a header either keeps the file valid or is one clean error: never a crash or
// another exception.
TEST(SafetensorsReader, SurvivesMutations) {
  const TempFolder folder;
  const std::string good = image(object({R"("__metadata__":{"format":"pt"})", tensor("a", "BF16", "[2,3]", "[0,12]"),
                                         tensor("b", "I64", "[1]", "[12,20]")}),
                                 20);
  int refused = 0, accepted = 0;
  const auto attempt = [&](const std::string& bytes) {
    write_file(folder / "x", bytes);
    try {
      SafetensorsFile file(folder / "x");
      ++accepted;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::input);
      EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos);
      ++refused;
    }
  };
  for (size_t at = 0; at < good.size() - 20; ++at) {
    for (const unsigned char c : {0x00, 0x20, 0x22, 0x2d, 0x30, 0x39, 0x5b, 0x5d, 0x7b, 0x7d, 0x80, 0xff}) {
      std::string bytes = good;
      bytes[at] = static_cast<char>(c);
      attempt(bytes);
    }
    std::string shorter = good;
    shorter.erase(at, 1);
    attempt(shorter);
    attempt(good.substr(0, at));
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(accepted, 0);  // e.g. a changed letter of a name
}

}  // namespace
}  // namespace shardq
