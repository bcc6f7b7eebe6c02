#include "quant/scheme.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <optional>
#include <string_view>

#include "core/error.hpp"

namespace shardq {
namespace {

constexpr int64_t kDefaultGroup = 128;

/// Takes `prefix` off the front of `text` if it is there.
bool take(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

std::optional<int64_t> take_number(std::string_view& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{}) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

/// "-gN" or "-channel" or nothing, up to the end.
std::optional<int64_t> group_of_suffix(std::string_view text) {
  if (text.empty()) return kDefaultGroup;
  if (text == "-channel") return -1;
  if (!take(text, "-g")) return std::nullopt;
  const std::optional<int64_t> group = take_number(text);
  return group && *group > 0 && text.empty() ? group : std::nullopt;
}

std::optional<QuantScheme> parse(std::string_view text) {
  QuantScheme scheme;
  scheme.name = text;
  if (!take(text, "W")) return std::nullopt;
  const std::optional<int64_t> bits = take_number(text);
  if (!bits || *bits < 2 || *bits > 8 || !take(text, "A16")) return std::nullopt;
  scheme.grid.bits = static_cast<int>(*bits);
  scheme.grid.symmetric = !take(text, "_ASYM");
  const std::optional<int64_t> group = group_of_suffix(text);
  if (!group) return std::nullopt;
  scheme.group_size = *group;
  return scheme;
}

}  // namespace

QuantScheme scheme_preset(const std::string& name) {
  const std::optional<QuantScheme> scheme = parse(name);
  SHARDQ_CHECK(scheme, ExitCode::usage,
               "unknown scheme \"{}\": expected one of {}, with -gN or -channel for other groups", name,
               fmt::join(scheme_preset_names(), ", "));
  return *scheme;
}

std::vector<std::string> scheme_preset_names() {
  std::vector<std::string> names;
  for (const char* suffix : {"", "_ASYM"})
    for (int bits = 2; bits <= 8; ++bits) names.push_back(fmt::format("W{}A16{}", bits, suffix));
  return names;
}

}  // namespace shardq
