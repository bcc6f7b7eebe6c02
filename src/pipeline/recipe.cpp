#include "pipeline/recipe.hpp"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "core/error.hpp"

namespace shardq {
namespace {

/// One recipe key: how it is read from a YAML node and written back. The table below is the recipe's schema.
struct Key {
  std::string name;
  std::function<void(Recipe&, const YAML::Node&)> set;
  std::function<void(const Recipe&, YAML::Emitter&)> emit;
};

template <class T>
T scalar(const YAML::Node& node, const char* expected) {
  try {
    if (!node.IsScalar()) throw YAML::Exception(node.Mark(), "");
    return node.as<T>();
  } catch (const YAML::Exception&) {
    fail(ExitCode::usage, "expected {}, found '{}'", expected, node.IsScalar() ? node.Scalar() : YAML::Dump(node));
  }
}

/// `low`, `high`: inclusive bounds.
template <class Member>
Key number(const char* name, Member member, double low, double high) {
  using T = std::remove_reference_t<decltype(member(std::declval<Recipe&>()))>;
  return {name,
          [=](Recipe& r, const YAML::Node& node) {
            const T value = scalar<T>(node, std::is_integral_v<T> ? "an integer" : "a number");
            SHARDQ_CHECK(double(value) >= low && double(value) <= high, ExitCode::usage,
                         "expected a value in [{}, {}], found {}", low, high, value);
            member(r) = value;
          },
          [=](const Recipe& r, YAML::Emitter& out) { out << member(const_cast<Recipe&>(r)); }};
}

template <class Member>
Key text(const char* name, Member member, std::vector<std::string> allowed = {}) {
  return {name,
          [=](Recipe& r, const YAML::Node& node) {
            std::string value = scalar<std::string>(node, "a text");
            SHARDQ_CHECK(
                allowed.empty() || std::ranges::find(allowed, value) != allowed.end(), ExitCode::usage,
                "expected one of {}, found '{}'",
                fmt::join(allowed.begin() + (allowed.empty() || !allowed.front().empty() ? 0 : 1), allowed.end(), ", "),
                value);
            member(r) = value;
          },
          [=](const Recipe& r, YAML::Emitter& out) { out << member(const_cast<Recipe&>(r)); }};
}

template <class Member>
Key flag(const char* name, Member member) {
  return {name, [=](Recipe& r, const YAML::Node& node) { member(r) = scalar<bool>(node, "true or false"); },
          [=](const Recipe& r, YAML::Emitter& out) { out << member(const_cast<Recipe&>(r)); }};
}

template <class Member>
Key bytes(const char* name, Member member) {
  return {name,
          [=](Recipe& r, const YAML::Node& node) {
            member(r) = parse_bytes(scalar<std::string>(node, "a size like 8GiB"));
          },
          [=](const Recipe& r, YAML::Emitter& out) { out << member(const_cast<Recipe&>(r)); }};
}

template <class Member>
Key list(const char* name, Member member) {
  return {name,
          [=](Recipe& r, const YAML::Node& node) {
            std::vector<std::string> values;
            if (node.IsScalar()) {
              values.push_back(node.Scalar());
            } else {
              SHARDQ_CHECK(node.IsSequence(), ExitCode::usage, "expected a list of texts, found '{}'",
                           YAML::Dump(node));
              for (const YAML::Node& item : node) values.push_back(scalar<std::string>(item, "a text"));
            }
            member(r) = values;
          },
          [=](const Recipe& r, YAML::Emitter& out) {
            out << YAML::Flow << YAML::BeginSeq;
            for (const std::string& value : member(const_cast<Recipe&>(r))) out << YAML::DoubleQuoted << value;
            out << YAML::EndSeq;
          }};
}

template <class Enum, class Member>
Key choice(const char* name, Member member, std::vector<std::pair<std::string, Enum>> values) {
  return {name,
          [=](Recipe& r, const YAML::Node& node) {
            const std::string given = node.IsNull() ? "none" : scalar<std::string>(node, "a text");
            std::string known;
            for (const auto& [spelling, value] : values) {
              if (spelling == given) {
                member(r) = value;
                return;
              }
              known += (known.empty() ? "" : ", ") + spelling;
            }
            fail(ExitCode::usage, "expected one of {}, found '{}'", known, given);
          },
          [=](const Recipe& r, YAML::Emitter& out) {
            for (const auto& [spelling, value] : values)
              if (value == member(const_cast<Recipe&>(r))) {
                out << spelling;
                return;
              }
          }};
}

#define SHARDQ_MEMBER(path) \
  [](Recipe & r) -> auto& { \
    return r.path;          \
  }

const std::vector<Key>& keys() {
  static const std::vector<Key> table = {
      text("model", SHARDQ_MEMBER(model)),
      text("tokens", SHARDQ_MEMBER(tokens)),
      text("output", SHARDQ_MEMBER(output)),
      text("work", SHARDQ_MEMBER(work)),
      text("device", SHARDQ_MEMBER(device), {"", "cpu", "cuda"}),
      text("compute", SHARDQ_MEMBER(compute), {"", "bf16", "f32"}),
      choice<ResumeMode>("resume", SHARDQ_MEMBER(resume),
                         {{"auto", ResumeMode::auto_}, {"never", ResumeMode::never}, {"require", ResumeMode::require}}),
      {"scheme",
       [](Recipe& r, const YAML::Node& node) { r.scheme = scheme_preset(scalar<std::string>(node, "a preset name")); },
       [](const Recipe& r, YAML::Emitter& out) { out << r.scheme.name; }},
      number("quantization.num_bits", SHARDQ_MEMBER(scheme.grid.bits), 2, 8),
      flag("quantization.symmetric", SHARDQ_MEMBER(scheme.grid.symmetric)),
      number("quantization.group_size", SHARDQ_MEMBER(scheme.group_size), -1, 1 << 20),
      choice<Method>("quantization.method", SHARDQ_MEMBER(scheme.method),
                     {{"gptq", Method::gptq}, {"rtn", Method::rtn}}),
      choice<ActOrder>("quantization.actorder", SHARDQ_MEMBER(scheme.actorder),
                       {{"none", ActOrder::none}, {"static", ActOrder::static_}}),
      choice<Observer>("quantization.observer", SHARDQ_MEMBER(scheme.observer),
                       {{"minmax", Observer::minmax}, {"mse", Observer::mse}, {"hessian", Observer::hessian}}),
      list("targets", SHARDQ_MEMBER(targets)),
      list("ignore", SHARDQ_MEMBER(ignore)),
      number("solver.block_size", SHARDQ_MEMBER(solver.block_size), 1, 1 << 20),
      number("solver.dampening_frac", SHARDQ_MEMBER(solver.damping_fraction), 0, 10),
      number("solver.damping_retries", SHARDQ_MEMBER(solver.damping_retries), 0, 20),
      number("solver.kappa_factor", SHARDQ_MEMBER(solver.kappa_factor), 0, 1e6),
      number("solver.min_tokens", SHARDQ_MEMBER(solver.min_tokens), -1, 1e15),
      choice<bool>("solver.nonfinite", SHARDQ_MEMBER(solver.nonfinite_is_error), {{"error", true}, {"rtn", false}}),
      number("solver.loss_sample_rows", SHARDQ_MEMBER(solver.loss_sample_rows), 0, 1 << 20),
      number("solver.max_rtn_fraction", SHARDQ_MEMBER(max_rtn_fraction), 0, 1),
      number("calibration.max_samples", SHARDQ_MEMBER(max_samples), 0, 1e12),
      number("calibration.max_length", SHARDQ_MEMBER(max_length), 0, 1e9),
      number("calibration.chunk_tokens", SHARDQ_MEMBER(chunk_tokens), 0, 1e9),
      choice<Sequential>("calibration.sequential", SHARDQ_MEMBER(sequential),
                         {{"sublayer", Sequential::sublayer}, {"layer", Sequential::layer}}),
      choice<ExpertTokens>("calibration.experts", SHARDQ_MEMBER(experts),
                           {{"routed", ExpertTokens::routed}, {"all", ExpertTokens::all}}),
      flag("calibration.check_finite", SHARDQ_MEMBER(check_finite)),
      text("parallel.reproducible", SHARDQ_MEMBER(reproducible), {"auto", "true", "false"}),
      choice<ReducePlan>("parallel.reduce", SHARDQ_MEMBER(reduce),
                         {{"auto", ReducePlan::auto_},
                          {"all_reduce", ReducePlan::all_reduce},
                          {"reduce_scatter", ReducePlan::reduce_scatter},
                          {"all_to_all", ReducePlan::all_to_all}}),
      choice<ReadMode>("parallel.read", SHARDQ_MEMBER(read),
                       {{"auto", ReadMode::auto_}, {"all", ReadMode::all}, {"share", ReadMode::share}}),
      bytes("memory.hessian_budget", SHARDQ_MEMBER(hessian_budget)),
      choice<Offload>("memory.offload", SHARDQ_MEMBER(offload),
                      {{"auto", Offload::auto_}, {"never", Offload::never}, {"always", Offload::always}}),
      number("checkpoint.interval_seconds", SHARDQ_MEMBER(checkpoint_interval), 0, 1e9),
      number("checkpoint.tap_seconds", SHARDQ_MEMBER(tap_seconds), 0, 1e9),
      number("checkpoint.keep_last", SHARDQ_MEMBER(keep_last), 1, 100),
      number("watchdog_seconds", SHARDQ_MEMBER(watchdog_seconds), 0, 1e9),
  };
  return table;
}

int edit_distance(const std::string& a, const std::string& b) {
  std::vector<int> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = above;
    }
  }
  return row[b.size()];
}

const Key* find_key(const std::string& name) {
  for (const Key& key : keys())
    if (key.name == name) return &key;
  return nullptr;
}

bool is_section(const std::string& name) {
  return std::ranges::any_of(keys(), [&](const Key& key) { return key.name.starts_with(name + "."); });
}

/// The known key (or section) nearest to `name`; keys are compared whole and by their last part, since users forget the
/// section.
std::string nearest_key(const std::string& name) {
  const auto last = [](const std::string& s) { return s.substr(s.rfind('.') + 1); };
  std::string best;
  int least = 1 << 20;
  for (const Key& key : keys()) {
    const int distance = std::min(edit_distance(name, key.name), edit_distance(last(name), last(key.name)) + 1);
    if (distance < least) {
      least = distance;
      best = key.name;
    }
  }
  return best;
}

void apply(Recipe& recipe, const std::string& name, const YAML::Node& node, const std::string& where) {
  const Key* key = find_key(name);
  SHARDQ_CHECK(key, ExitCode::usage, "{}: unknown recipe key '{}'; did you mean '{}'?", where, name, nearest_key(name));
  try {
    key->set(recipe, node);
  } catch (const Error& error) {
    fail(ExitCode::usage, "{}: {}: {}", where, name, error.what());
  }
}

void apply_map(Recipe& recipe, const std::string& prefix, const YAML::Node& map, const std::string& file,
               const std::set<std::string>& skip) {
  for (const auto& entry : map) {
    const std::string name = prefix + entry.first.Scalar();
    if (skip.contains(name)) continue;
    const std::string where = fmt::format("{}:{}", file, entry.first.Mark().line + 1);
    if (entry.second.IsMap() && is_section(name)) {
      apply_map(recipe, name + ".", entry.second, file, skip);
    } else {
      apply(recipe, name, entry.second, where);
    }
  }
}

}  // namespace

int64_t parse_bytes(const std::string& text) {
  static const std::map<std::string, int64_t> units = {{"", 1},          {"B", 1},           {"KB", 1000},
                                                       {"MB", 1000000},  {"GB", 1000000000}, {"KiB", 1 << 10},
                                                       {"MiB", 1 << 20}, {"GiB", 1 << 30}};
  try {
    size_t used = 0;
    const double value = std::stod(text, &used);
    while (used < text.size() && text[used] == ' ') ++used;
    const auto unit = units.find(text.substr(used));
    if (unit != units.end() && value >= 0 && value * static_cast<double>(unit->second) < 9e18)
      return static_cast<int64_t>(value * unit->second);
  } catch (const std::logic_error&) {
  }
  fail(ExitCode::usage, "expected a size like 8GiB or 500MB, found '{}'", text);
}

Recipe read_recipe(const std::filesystem::path& file,
                   const std::vector<std::pair<std::string, std::string>>& overrides) {
  Recipe recipe;
  recipe.scheme = scheme_preset("W4A16");
  // A preset sets several keys at once, so presets go first wherever they stand: file, then flags, each scheme before
  // its details.
  YAML::Node root;
  if (!file.empty()) {
    try {
      root = YAML::LoadFile(file.string());
    } catch (const YAML::BadFile&) {
      fail(ExitCode::usage, "{}: cannot read the recipe", file.string());
    } catch (const YAML::Exception& error) {
      fail(ExitCode::usage, "{}:{}: not valid YAML: {}", file.string(), error.mark.line + 1, error.msg);
    }
    SHARDQ_CHECK(root.IsMap() || root.IsNull(), ExitCode::usage, "{}: expected a map of keys at the top",
                 file.string());
  }
  const std::string* scheme_override = nullptr;
  for (const auto& [name, value] : overrides)
    if (name == "scheme") scheme_override = &value;
  if (root.IsMap() && root["scheme"]) apply(recipe, "scheme", root["scheme"], file.string());
  if (scheme_override) apply(recipe, "scheme", YAML::Node(*scheme_override), "--scheme");
  if (root.IsMap()) {
    // --scheme replaces what the file says about the format: a file's num_bits must not survive a preset given by hand.
    std::set<std::string> done{"scheme"};
    if (scheme_override) done.insert({"quantization.num_bits", "quantization.symmetric", "quantization.group_size"});
    apply_map(recipe, "", root, file.string(), done);
  }
  for (const auto& [name, value] : overrides) {
    if (name == "scheme") continue;
    YAML::Node node;
    try {
      node = YAML::Load(value);
    } catch (const YAML::Exception&) {
      node = YAML::Node(value);
    }
    apply(recipe, name, node.IsNull() && value != "null" && value != "~" ? YAML::Node(value) : node, "--set " + name);
  }
  return recipe;
}

std::string recipe_text(const Recipe& recipe, RecipeText kind) {
  // How a run is carried out is nobody's business but its own.
  static const std::set<std::string> unpublished = {"output",
                                                    "work",
                                                    "resume",
                                                    "parallel.reduce",
                                                    "parallel.read",
                                                    "memory.hessian_budget",
                                                    "memory.offload",
                                                    "checkpoint.interval_seconds",
                                                    "checkpoint.tap_seconds",
                                                    "checkpoint.keep_last",
                                                    "watchdog_seconds"};
  static const std::set<std::string> no_influence = {"model",
                                                     "tokens",
                                                     "output",
                                                     "work",
                                                     "resume",
                                                     "device",
                                                     "parallel.reduce",
                                                     "parallel.read",
                                                     "memory.hessian_budget",
                                                     "memory.offload",
                                                     "solver.max_rtn_fraction",
                                                     "calibration.check_finite",
                                                     "checkpoint.interval_seconds",
                                                     "checkpoint.tap_seconds",
                                                     "checkpoint.keep_last",
                                                     "watchdog_seconds"};
  YAML::Emitter out;
  out << YAML::BeginMap;
  std::string section;
  for (const Key& key : keys()) {
    if (kind == RecipeText::published && unpublished.contains(key.name)) continue;
    if (kind == RecipeText::fingerprint && no_influence.contains(key.name)) continue;
    const size_t dot = key.name.find('.');
    const std::string own = dot == std::string::npos ? "" : key.name.substr(0, dot);
    if (own != section) {
      if (!section.empty()) out << YAML::EndMap;
      if (!own.empty()) out << YAML::Key << own << YAML::Value << YAML::BeginMap;
      section = own;
    }
    out << YAML::Key << (dot == std::string::npos ? key.name : key.name.substr(dot + 1)) << YAML::Value;
    key.emit(recipe, out);
  }
  if (!section.empty()) out << YAML::EndMap;
  out << YAML::EndMap;
  return std::string(out.c_str()) + "\n";
}

}  // namespace shardq
