#include "core/view.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace shardq {
std::string to_string(const Shape& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }
}  // namespace shardq
