#include <array>
#include <utility>

#include "core/error.hpp"
#include "quant/solver.hpp"

namespace shardq {
namespace {

constexpr std::array<std::pair<Verdict, const char*>, 6> kVerdicts = {{
    {Verdict::gptq, "gptq"},
    {Verdict::gptq_damped, "gptq+damped"},
    {Verdict::rtn, "rtn"},
    {Verdict::rtn_few_tokens, "rtn:few_tokens"},
    {Verdict::rtn_not_positive_definite, "rtn:not_positive_definite"},
    {Verdict::rtn_nonfinite, "rtn:nonfinite"},
}};

}  // namespace

std::string to_string(Verdict verdict) {
  for (const auto& [value, text] : kVerdicts)
    if (value == verdict) return text;
  fail(ExitCode::internal, "verdict {} has no name", static_cast<int>(verdict));
}

Verdict verdict_from_string(const std::string& text) {
  for (const auto& [value, name] : kVerdicts)
    if (name == text) return value;
  fail(ExitCode::internal, "unknown verdict \"{}\"", text);
}

bool is_fallback(Verdict verdict) {
  return verdict == Verdict::rtn_few_tokens || verdict == Verdict::rtn_not_positive_definite ||
         verdict == Verdict::rtn_nonfinite;
}

}  // namespace shardq
