#include "pipeline/targets.hpp"

#include <algorithm>
#include <regex>
#include <set>

#include "core/error.hpp"

namespace shardq {
namespace {
/// Compiled patterns: experts make tens of thousands of modules, so each regex is compiled once.
class Matcher {
 public:
  explicit Matcher(const std::vector<std::string>& patterns) {
    for (const std::string& pattern : patterns) {
      if (pattern == "Linear") {
        all_ = true;
      } else if (pattern.starts_with("re:")) {
        try {
          regexes_.emplace_back(pattern.substr(3), std::regex::ECMAScript | std::regex::optimize);
        } catch (const std::regex_error& error) {
          fail(ExitCode::usage, "'{}' is not a valid regular expression: {}", pattern, error.what());
        }
      } else {
        exact_.insert(pattern);
      }
    }
  }
  bool operator()(const std::string& module) const {
    if (all_ || exact_.contains(module)) return true;
    return std::ranges::any_of(regexes_, [&](const std::regex& regex) {
      return std::regex_search(module, regex, std::regex_constants::match_continuous);
    });
  }
  const std::set<std::string>& exact() const { return exact_; }

 private:
  bool all_ = false;
  std::set<std::string> exact_;
  std::vector<std::regex> regexes_;
};
}  // namespace

bool matches_any(const std::vector<std::string>& patterns, const std::string& module) {
  return Matcher(patterns)(module);
}

bool Selection::any(const LayerSpec& layer, Tap tap) const {
  for (size_t i = 0; i < layer.linears.size(); ++i)
    if (layer.linears[i].tap == tap && quantized[layer.index][i]) return true;
  return false;
}

Selection select_linears(const ModelSpec& spec, const std::vector<std::string>& targets,
                         const std::vector<std::string>& ignore) {
  const Matcher wanted(targets), unwanted(ignore);
  Selection selection;
  std::set<std::string> unseen = wanted.exact();
  unseen.insert(unwanted.exact().begin(), unwanted.exact().end());
  for (const LayerSpec& layer : spec.layer) {
    std::vector<bool>& row = selection.quantized.emplace_back();
    for (const LinearSpec& linear : layer.linears) {
      row.push_back(wanted(linear.module) && !unwanted(linear.module));
      if (row.back())
        ++selection.count;
      else
        selection.ignored.push_back(linear.module);
      unseen.erase(linear.module);
    }
    for (const std::string& other : spec.other_linears)
      if (other.starts_with(layer.prefix)) selection.ignored.push_back(other);
  }
  for (const std::string& other : spec.other_linears) {
    unseen.erase(other);
    const bool in_layer =
        std::ranges::any_of(spec.layer, [&](const LayerSpec& l) { return other.starts_with(l.prefix); });
    if (!in_layer) selection.ignored.push_back(other);
  }
  unseen.erase("lm_head");  // the conventional entry, also for models whose head is tied away
  SHARDQ_CHECK(unseen.empty(), ExitCode::usage, "targets/ignore name '{}', which is no linear of this {} model",
               *unseen.begin(), spec.model_type);
  SHARDQ_CHECK(selection.count > 0, ExitCode::usage, "targets and ignore leave no linear to quantize");
  return selection;
}

}  // namespace shardq
