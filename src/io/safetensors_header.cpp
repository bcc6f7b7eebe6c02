#include "io/safetensors_header.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "core/error.hpp"

namespace shardq {
namespace {

constexpr int kDeepestNesting = 128;
constexpr size_t kLargestRank =
    64;  // PyTorch's own limit; also keeps a header of nothing but dimensions from growing eightfold

/// Reads the header as a stream of events. A document object would be simpler but keeps only the last of two equal
/// keys, and two readers that disagree on which tensor a name means are exactly what a checkpoint must not allow.
class HeaderEvents {
 public:
  HeaderEvents(const std::filesystem::path& path, SafetensorsHeader& header) : path_(path), header_(header) {}

  // ---- the interface nlohmann's sax_parse expects ----
  bool null() {
    if (place_ == Place::value && key_ == "__metadata__" && depth_ == 1) return true;
    return scalar("null");
  }
  bool boolean(bool) { return scalar("a boolean"); }
  bool number_integer(int64_t) { return scalar("a negative number"); }  // also -0
  bool number_unsigned(uint64_t value) {
    if (skipping_) return scalar("");
    if (place_ != Place::dims && place_ != Place::offsets) return scalar("a number");
    SHARDQ_CHECK(value <= INT64_MAX, ExitCode::input, "{}: {} of tensor '{}' holds {}, which is beyond 2^63 - 1",
                 file(), field_, tensor(), value);
    auto& list = place_ == Place::dims ? entry_.shape : offsets_;
    const size_t limit = place_ == Place::dims ? kLargestRank : 2;
    SHARDQ_CHECK(list.size() < limit, ExitCode::input, "{}: {} of tensor '{}' holds more than {} numbers", file(),
                 field_, tensor(), limit);
    list.push_back(static_cast<int64_t>(value));
    return true;
  }
  bool number_float(double, const std::string& text) { return scalar("the number " + printable(text)); }
  bool string(std::string& value) {
    if (skipping_) return scalar("");
    if (place_ == Place::metadata) {
      SHARDQ_CHECK(header_.metadata.emplace(key_, std::move(value)).second, ExitCode::input,
                   "{}: duplicate key '{}' in __metadata__", file(), printable(key_));
      return true;
    }
    if (place_ == Place::field && field_ == "dtype") {
      dtype_text_ = std::move(value);
      return true;
    }
    return scalar("a string");
  }
  bool binary(std::vector<uint8_t>&) { return scalar("binary data"); }

  bool start_object(size_t) {
    enter();
    if (skipping_) return true;
    if (depth_ == 1) {
      place_ = Place::value;
    } else if (depth_ == 2 && place_ == Place::value && key_ == "__metadata__") {
      place_ = Place::metadata;
    } else if (depth_ == 2 && place_ == Place::value) {
      place_ = Place::field;
      entry_ = {};
      offsets_.clear();
      dtype_text_.reset();
      has_shape_ = has_offsets_ = false;
    } else {
      wrong("an object");
    }
    return true;
  }
  bool key(std::string& name) {
    if (skipping_) return true;
    if (place_ == Place::value) {
      key_ = std::move(name);
      SHARDQ_CHECK(!key_.empty(), ExitCode::input, "{}: a tensor with an empty name", file());
      SHARDQ_CHECK(key_.find('\0') == std::string::npos, ExitCode::input, "{}: tensor name '{}' holds a NUL character",
                   file(), tensor());
      const bool duplicate =
          key_ == "__metadata__" ? std::exchange(has_metadata_, true) : header_.entries.contains(key_);
      SHARDQ_CHECK(!duplicate, ExitCode::input, "{}: duplicate key '{}' in the header", file(), tensor());
    } else if (place_ == Place::metadata) {
      key_ = std::move(name);
    } else {
      field_ = std::move(name);
      const bool duplicate = (field_ == "dtype" && dtype_text_) || (field_ == "shape" && has_shape_) ||
                             (field_ == "data_offsets" && has_offsets_);
      SHARDQ_CHECK(!duplicate, ExitCode::input, "{}: duplicate field '{}' of tensor '{}'", file(), field_, tensor());
      if (field_ != "dtype" && field_ != "shape" && field_ != "data_offsets")
        skipping_ = depth_ + 1;  // unknown fields are allowed
    }
    return true;
  }
  bool end_object() {
    if (leave()) return true;
    if (place_ == Place::field) finish_tensor();
    place_ = Place::value;
    return true;
  }
  bool start_array(size_t) {
    enter();
    if (skipping_) return true;
    if (place_ == Place::field && field_ == "shape") {
      place_ = Place::dims;
      has_shape_ = true;
    } else if (place_ == Place::field && field_ == "data_offsets") {
      place_ = Place::offsets;
      has_offsets_ = true;
    } else {
      wrong("an array");
    }
    return true;
  }
  bool end_array() {
    if (leave()) return true;
    place_ = Place::field;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) {
    fail(ExitCode::input, "{}: the header is not valid JSON (byte {} of it)", file(), position);
  }

 private:
  enum class Place { root, value, metadata, field, dims, offsets };

  std::string file() const { return path_.string(); }
  std::string tensor() const { return printable(key_); }

  void enter() {
    ++depth_;
    SHARDQ_CHECK(depth_ <= kDeepestNesting, ExitCode::input, "{}: the header nests deeper than {} levels", file(),
                 kDeepestNesting);
  }
  /// Ends a container; true while inside an unknown field.
  bool leave() {
    --depth_;
    if (!skipping_) return false;
    if (depth_ < skipping_) skipping_ = 0;
    return true;
  }

  bool scalar(const std::string& what) {
    if (skipping_) {
      if (depth_ < skipping_) skipping_ = 0;  // the unknown field's value was this scalar
      return true;
    }
    wrong(what);
  }
  [[noreturn]] void wrong(const std::string& found) const {
    switch (place_) {
      case Place::root:
        fail(ExitCode::input, "{}: the header must be a JSON object, found {}", file(), found);
      case Place::metadata:
        fail(ExitCode::input, "{}: __metadata__ must map strings to strings, found {} under '{}'", file(), found,
             printable(key_));
      case Place::value:
        fail(ExitCode::input, "{}: '{}' must be an object, found {}", file(), tensor(), found);
      default:
        fail(ExitCode::input, "{}: {} of tensor '{}' must be {}, found {}", file(), field_, tensor(),
             field_ == "dtype" ? "a string" : "an array of unsigned integers", found);
    }
  }

  void finish_tensor() {
    SHARDQ_CHECK(dtype_text_ && has_shape_ && has_offsets_, ExitCode::input, "{}: tensor '{}' lacks {}", file(),
                 tensor(),
                 !dtype_text_  ? "dtype"
                 : !has_shape_ ? "shape"
                               : "data_offsets");
    const std::optional<DType> dtype = dtype_from_safetensors(*dtype_text_);
    SHARDQ_CHECK(dtype.has_value(), ExitCode::input, "{}: tensor '{}' has dtype '{}', which is not supported", file(),
                 tensor(), printable(*dtype_text_));
    SHARDQ_CHECK(offsets_.size() == 2, ExitCode::input, "{}: data_offsets of tensor '{}' must hold 2 numbers, found {}",
                 file(), tensor(), offsets_.size());
    SHARDQ_CHECK(offsets_[0] <= offsets_[1], ExitCode::input, "{}: data_offsets [{}, {}] of tensor '{}' are reversed",
                 file(), offsets_[0], offsets_[1], tensor());
    int64_t bytes = size_of(*dtype);
    bool overflow = false;
    for (const int64_t dim : entry_.shape) overflow = overflow || __builtin_mul_overflow(bytes, dim, &bytes);
    SHARDQ_CHECK(!overflow, ExitCode::input, "{}: shape {} of tensor '{}' overflows 64 bits", file(),
                 to_string(entry_.shape), tensor());
    SHARDQ_CHECK(bytes == offsets_[1] - offsets_[0], ExitCode::input,
                 "{}: tensor '{}' of {} {} needs {} bytes, its data_offsets [{}, {}] hold {}", file(), tensor(),
                 *dtype_text_, to_string(entry_.shape), bytes, offsets_[0], offsets_[1], offsets_[1] - offsets_[0]);
    entry_.name = key_;
    entry_.dtype = *dtype;
    entry_.begin = offsets_[0];
    entry_.end = offsets_[1];
    header_.entries.emplace(key_, std::move(entry_));
  }

  const std::filesystem::path& path_;
  SafetensorsHeader& header_;
  Place place_ = Place::root;
  int depth_ = 0;
  int skipping_ = 0;  // depth at which the value of an unknown field lies; 0: none
  std::string key_, field_;
  bool has_metadata_ = false;
  TensorEntry entry_;
  std::vector<int64_t> offsets_;
  std::optional<std::string> dtype_text_;
  bool has_shape_ = false, has_offsets_ = false;
};

/// The data must be covered exactly, without holes or overlaps; turns offsets into the data into offsets into the file.
void check_cover(const std::filesystem::path& path, SafetensorsHeader& header, int64_t data_begin, int64_t file_bytes) {
  std::vector<TensorEntry*> order;
  order.reserve(header.entries.size());
  for (auto& [name, entry] : header.entries) order.push_back(&entry);
  std::sort(order.begin(), order.end(), [](const TensorEntry* a, const TensorEntry* b) {
    return a->begin != b->begin ? a->begin < b->begin : a->end < b->end;
  });
  const int64_t data_bytes = file_bytes - data_begin;
  int64_t covered = 0;
  for (TensorEntry* entry : order) {
    SHARDQ_CHECK(entry->end <= data_bytes, ExitCode::input,
                 "{}: tensor '{}' ends at byte {} of the data, the file holds {} (truncated or out of range)",
                 path.string(), printable(entry->name), entry->end, data_bytes);
    SHARDQ_CHECK(entry->begin == covered, ExitCode::input,
                 "{}: tensor '{}' begins at byte {} of the data, expected {} ({})", path.string(),
                 printable(entry->name), entry->begin, covered,
                 entry->begin < covered ? "it overlaps another tensor" : "a hole before it");
    covered = entry->end;
    entry->begin += data_begin;
    entry->end += data_begin;
  }
  SHARDQ_CHECK(covered == data_bytes, ExitCode::input,
               "{}: the tensors cover {} bytes of data, the file holds {} ({} trailing)", path.string(), covered,
               data_bytes, data_bytes - covered);
}

}  // namespace

SafetensorsHeader parse_safetensors_header(const std::filesystem::path& path, std::string_view json, int64_t data_begin,
                                           int64_t file_bytes) {
  // The parser takes a NUL for the end of its input and skips a byte-order mark; both would let something unseen pass.
  SHARDQ_CHECK(json.find('\0') == std::string_view::npos, ExitCode::input,
               "{}: the header is not valid JSON (NUL at byte {} of it)", path.string(), json.find('\0'));
  SHARDQ_CHECK(!json.starts_with("\xef\xbb\xbf"), ExitCode::input,
               "{}: the header begins with a byte-order mark, expected '{{'", path.string());
  SafetensorsHeader header;
  HeaderEvents events(path, header);
  nlohmann::json::sax_parse(json.begin(), json.end(), &events);
  check_cover(path, header, data_begin, file_bytes);
  return header;
}

std::string printable(std::string_view name) {
  constexpr size_t kLongest = 120;
  std::string text;
  for (const char c : name.substr(0, kLongest)) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      text += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    else
      text += c;
  }
  if (name.size() > kLongest) text += fmt::format("... ({} characters)", name.size());
  return text;
}

}  // namespace shardq
