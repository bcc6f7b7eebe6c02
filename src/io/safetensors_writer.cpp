#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.hpp"
#include "io/durable_file.hpp"
#include "io/safetensors.hpp"
#include "io/safetensors_header.hpp"

namespace shardq {
namespace {

void check_tensors(const std::filesystem::path& path, const std::vector<OutputTensor>& tensors) {
  std::set<std::string_view> names;
  for (const OutputTensor& tensor : tensors) {
    SHARDQ_CHECK(!tensor.name.empty() && tensor.name != "__metadata__", ExitCode::internal,
                 "{}: '{}' is no tensor name", path.string(), tensor.name);
    SHARDQ_CHECK(names.insert(tensor.name).second, ExitCode::internal, "{}: tensor '{}' is to be written twice",
                 path.string(), tensor.name);
    const int64_t bytes = element_count(tensor.shape) * size_of(tensor.dtype);
    SHARDQ_CHECK(bytes == static_cast<int64_t>(tensor.data.size()), ExitCode::internal,
                 "{}: tensor '{}' of {} {} needs {} bytes, {} were handed over", path.string(), tensor.name,
                 safetensors_name(tensor.dtype), to_string(tensor.shape), bytes, tensor.data.size());
  }
}

/// The header text, padded with spaces so that the data begins at a multiple of 8. Key order is the order of the data.
std::string header_text(const std::vector<OutputTensor>& tensors) {
  nlohmann::ordered_json header;
  header["__metadata__"] = {{"format", "pt"}};
  int64_t begin = 0;
  // ordered_json looks keys up one by one; names are known to be distinct, so append unseen.
  auto& object = header.get_ref<nlohmann::ordered_json::object_t&>();
  for (const OutputTensor& tensor : tensors) {
    const auto end = begin + static_cast<int64_t>(tensor.data.size());
    object.push_back(
        {tensor.name,
         {{"dtype", safetensors_name(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}}});
    begin = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

}  // namespace

int64_t write_safetensors(const std::filesystem::path& path, std::vector<OutputTensor> tensors) {
  check_tensors(path, tensors);
  // Wide dtypes first keep every tensor naturally aligned without holes, which the format forbids.
  std::sort(tensors.begin(), tensors.end(), [](const OutputTensor& a, const OutputTensor& b) {
    return size_of(a.dtype) != size_of(b.dtype) ? size_of(a.dtype) > size_of(b.dtype) : a.name < b.name;
  });
  const std::string header = header_text(tensors);
  SHARDQ_CHECK(static_cast<int64_t>(header.size()) <= kLargestSafetensorsHeader, ExitCode::internal,
               "{}: the header of {} tensors takes {} bytes, the format's limit is {}", path.string(), tensors.size(),
               header.size(), kLargestSafetensorsHeader);
  int64_t bytes = 8 + static_cast<int64_t>(header.size());
  for (const OutputTensor& tensor : tensors) bytes += static_cast<int64_t>(tensor.data.size());

  DurableFile file(path, bytes);
  std::byte length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<std::byte>(header.size() >> (8 * i));
  file.write(length);
  file.write(std::as_bytes(std::span(header)));
  for (const OutputTensor& tensor : tensors) file.write(tensor.data);
  file.commit();
  return bytes;
}

}  // namespace shardq
