#include "pipeline/plan.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.hpp"
#include "io/files.hpp"
#include "pipeline/job.hpp"
#include "pipeline/progress.hpp"
#include "pipeline/tap_solver.hpp"

namespace shardq {
namespace {

/// Bytes of one quantized linear in the output.
int64_t packed_bytes(const LinearSpec& linear, const QuantScheme& scheme) {
  const int64_t groups = linear.cols / std::max<int64_t>(1, group_size_for(scheme, linear.cols));
  int64_t bytes = linear.rows * ((linear.cols * scheme.grid.bits + 31) / 32) * 4 +
                  linear.rows * groups * size_of(scheme.grid.scale_dtype) + 16;
  if (!scheme.grid.symmetric) bytes += (linear.rows * scheme.grid.bits + 31) / 32 * 4 * groups;
  return bytes;
}

bool tokens_can_travel(const Recipe& recipe, const Inputs& inputs, int ranks) {
  if (ranks < 2 || recipe.experts != ExpertTokens::routed || recipe.scheme.method == Method::rtn) return false;
  return inputs.spec.experts >= ranks && std::ranges::any_of(inputs.spec.layer, [&](const LayerSpec& layer) {
           return layer.moe && (inputs.selection.any(layer, Tap::gate_up) || inputs.selection.any(layer, Tap::down));
         });
}

/// Matrices of a tap whose weights and Hessians are on the rank that has most.
int64_t matrices_here(const LayerSpec& layer, Tap tap, int64_t count, ReducePlan reduce, int ranks) {
  return reduce == ReducePlan::all_to_all && layer.routed(tap) ? part(count, ranks, 0).size() : count;
}

int64_t wave_count(const Recipe& recipe, const PlanMachine& machine, int64_t matrices, int64_t cols) {
  const int64_t budget = hessian_budget(recipe, machine.device_memory > 0 ? machine.device_memory : INT64_MAX);
  return static_cast<int64_t>(split_waves(matrices, cols, budget).size());
}

PlanLayer plan_layer(const Recipe& recipe, const Inputs& inputs, const LayerSpec& layer, const PlanMachine& machine,
                     double tokens, ReducePlan reduce) {
  const ModelSpec& spec = inputs.spec;
  PlanLayer out;
  out.kind = layer.moe ? "moe" : "dense";
  out.count = 1;
  const double length = tokens > 0 ? tokens / static_cast<double>(inputs.tokens->size()) : 0;
  out.forward_flops = tokens > 0 ? tokens * forward_flops_per_token(spec, layer, length) : 0;
  const double ranks = machine.ranks, others = (ranks - 1) / ranks;  // the share that is not one's own
  const double element = static_cast<double>(size_of(inputs.compute));
  for (Tap tap : kTaps) {
    const auto shape = spec.tap_shape(layer, tap);
    const double n = static_cast<double>(shape.cols), count = static_cast<double>(shape.count);
    const double weights = count * static_cast<double>(shape.rows) * n * element;
    const bool expert = layer.routed(tap);
    const int64_t here = matrices_here(layer, tap, shape.count, reduce, machine.ranks);
    out.weight_bytes += here * shape.rows * shape.cols * size_of(inputs.compute);
    out.sent_weights += static_cast<int64_t>(weights * others);
    if (!expert) out.sent_weights_owned += static_cast<int64_t>(weights * others);
    if (!inputs.selection.any(layer, tap)) continue;
    const int64_t waves = wave_count(recipe, machine, here, shape.cols);
    out.wave_count = std::max(out.wave_count, waves);
    out.hessian_bytes = std::max(out.hessian_bytes, here * shape.cols * shape.cols * 4 / waves);
    const bool all = recipe.experts == ExpertTokens::all;
    const double rows = tokens * (!expert ? 1.0
                                  : all   ? (tap == Tap::gate_up ? 1.0 : count)
                                          : static_cast<double>(spec.top_k));
    out.hessian_flops += 2 * rows * n * n * (waves > 1 && expert ? 2.0 : 1.0);
    out.solve_flops += count * (n * n * n / 3 + static_cast<double>(shape.rows) * n * n);
    const double triangle = count * n * (n + 1) / 2 * 4;
    out.sent_all_reduce += static_cast<int64_t>(2 * triangle * others);
    out.sent_reduce_scatter += static_cast<int64_t>(triangle * others * (expert ? 1 : 2));
    if (!expert) out.sent_all_to_all += static_cast<int64_t>(2 * triangle * others);
    out.sent_codes += static_cast<int64_t>(count * static_cast<double>(shape.rows) * n * others);
  }
  // Inputs of gate/up to the owners, outputs of down back: one row a token and chosen expert each way.
  if (layer.moe)
    out.sent_all_to_all += static_cast<int64_t>(2 * tokens / ranks * static_cast<double>(spec.top_k) *
                                                static_cast<double>(spec.hidden) * element * others);
  if (recipe.scheme.method == Method::rtn) {
    out.forward_flops = out.hessian_flops = out.solve_flops = 0;
    out.hessian_bytes = out.sent_all_reduce = out.sent_reduce_scatter = out.sent_all_to_all = 0;
  }
  return out;
}

int64_t sent_for_hessians(const PlanLayer& layer, ReducePlan reduce) {
  return reduce == ReducePlan::all_reduce   ? layer.sent_all_reduce
         : reduce == ReducePlan::all_to_all ? layer.sent_all_to_all
                                            : layer.sent_reduce_scatter;
}

int64_t sent_for_weights(const PlanLayer& layer, ReducePlan reduce, ReadMode read) {
  if (read != ReadMode::share) return 0;
  return reduce == ReducePlan::all_to_all ? layer.sent_weights_owned : layer.sent_weights;
}

bool order_free(const Recipe& recipe, const PlanMachine& machine) {
  return recipe.reproducible == "true" || (recipe.reproducible == "auto" && !machine.cuda);
}

/// Raises the plan's peak to what a rank holds while it accumulates and then solves one tap.
void raise_to_tap(Plan& plan, const Recipe& recipe, const Inputs& inputs, const LayerSpec& layer, Tap tap,
                  const PlanMachine& machine, int64_t my_tokens, ReducePlan reduce) {
  const ModelSpec& spec = inputs.spec;
  const auto shape = [&](Tap t) { return spec.tap_shape(layer, t); };
  const auto s = shape(tap);
  const int64_t element = size_of(inputs.compute), copies = layer.moe ? spec.top_k : 1;
  const int64_t chunk = std::min(std::max(plan.chunk_tokens, plan.longest), std::max<int64_t>(my_tokens, 1));
  const int64_t attention = my_tokens * shape(Tap::o).cols * element,
                experts = my_tokens * copies * shape(Tap::down).cols * element;
  // What is kept from tap to tap: the attention output until o has run, then the input of down; and a chunk's
  // temporaries on the way there.
  int64_t kept_before = 0, kept_after = 0, scratch = chunk * spec.hidden * element;
  const bool owned = reduce == ReducePlan::all_to_all && layer.routed(tap);
  if (tap == Tap::o) {
    kept_after = attention;
    scratch += chunk * shape(Tap::qkv).rows * element;
  } else if (tap == Tap::gate_up) {
    kept_before = attention;
    if (layer.moe) scratch += chunk * copies * spec.hidden * element;
    // Rows that have come to their owner wait there for gate/up: about as many as this rank has sent.
    if (owned) kept_after += my_tokens * copies * spec.hidden * element;
  } else if (tap == Tap::down) {
    if (owned) kept_before = my_tokens * copies * spec.hidden * element;
    kept_after = experts;
    scratch += chunk * copies * (shape(Tap::gate_up).rows + (layer.moe ? spec.hidden : 0)) * element;
  }
  const int64_t routing = layer.routed(tap) ? my_tokens * copies * 12 : 0;
  const int64_t here = matrices_here(layer, tap, s.count, reduce, machine.ranks);
  const int64_t waves = wave_count(recipe, machine, here, s.cols);
  const bool rtn = recipe.scheme.method == Method::rtn;
  const int64_t hessian = rtn ? 0 : here * s.cols * s.cols * 4 / waves;
  // Order-free sums: a chunk's triangles and two integers for each of their elements.
  if (order_free(recipe, machine) && !rtn) scratch += here / waves * (s.cols * (s.cols + 1) / 2) * 20;
  // Otherwise the triangles of a stack, packed to be sent while a chunk's temporaries are still there.
  else if (!rtn && machine.ranks > 1 && !owned && here > 1)
    scratch += hessian / 2;
  // Residuals and codes of this rank's share (under an activation order a second time, with the weights), codes of all,
  // the factor beside the Hessian.
  const int64_t own_rows = (s.count * s.rows / waves + machine.ranks - 1) / machine.ranks;
  const int64_t own = (s.count / waves + machine.ranks - 1) / machine.ranks;
  const int64_t ordered = recipe.scheme.actorder == ActOrder::none ? 0 : element + 1;
  const int64_t solve =
      own_rows * s.cols * (rtn ? 1 : 5 + ordered) + s.count * s.rows * s.cols + (rtn ? 0 : own * s.cols * s.cols * 4);
  // In host memory: all but the chunk at work and the one that is on its way in.
  plan.host_bytes = plan.offload ? std::max(plan.host_bytes, plan.hidden_bytes + std::max(kept_before, kept_after)) : 0;
  const double resident =
      plan.offload
          ? std::min(1.0, 2.0 * static_cast<double>(chunk) / static_cast<double>(std::max<int64_t>(1, my_tokens)))
          : 1.0;
  const auto here_bytes = [&](int64_t bytes) { return static_cast<int64_t>(static_cast<double>(bytes) * resident); };
  kept_before = here_bytes(kept_before);
  kept_after = here_bytes(kept_after);
  plan.kept_bytes = std::max(plan.kept_bytes, std::max(kept_before, kept_after));
  plan.solve_bytes = std::max(plan.solve_bytes, solve);
  plan.scratch_bytes = std::max(plan.scratch_bytes, scratch);
  const int64_t always = here_bytes(plan.hidden_bytes) + plan.weight_bytes + routing + hessian;
  plan.peak_bytes =
      std::max({plan.peak_bytes, always + std::max(kept_before, kept_after) + scratch, always + kept_after + solve});
}

/// Tokens of the rank that has most.
int64_t most_tokens(const Inputs& inputs, int ranks) {
  const TokenSet& tokens = *inputs.tokens;
  int64_t most = 0;
  for (const Range& share : balanced_shares(tokens, make_chunks(tokens, {0, tokens.size()}, 0), ranks)) {
    int64_t sum = 0;
    for (int64_t s = share.begin; s < share.end; ++s) sum += static_cast<int64_t>(tokens[s].size());
    most = std::max(most, sum);
  }
  return most;
}

/// Fills in the bytes of the plan for its chunk_tokens and offload.
void plan_memory(Plan& plan, const Recipe& recipe, const Inputs& inputs, const PlanMachine& machine, ReducePlan reduce,
                 int64_t my_tokens) {
  plan.hidden_bytes = my_tokens * inputs.spec.hidden * size_of(inputs.compute);
  for (const LayerSpec& layer : inputs.spec.layer) {
    const PlanLayer one =
        plan_layer(recipe, inputs, layer, machine, static_cast<double>(inputs.tokens->tokens()), reduce);
    plan.weight_bytes = std::max(plan.weight_bytes, one.weight_bytes);
    plan.hessian_bytes = std::max(plan.hessian_bytes, one.hessian_bytes);
  }
  for (const LayerSpec& layer : inputs.spec.layer)
    for (Tap tap : kTaps) raise_to_tap(plan, recipe, inputs, layer, tap, machine, my_tokens, reduce);
}

/// At which tensor-parallel sizes a group-quantized row-parallel linear still splits into whole groups. Source:
/// formats.md 4.2, 4.3.
std::string loads_at(const std::string& what, int64_t cols, int64_t group) {
  std::string sizes;
  for (int64_t tp : {1, 2, 4, 8, 16})
    if (cols % tp == 0 && (group < 0 || (cols / tp) % group == 0))
      sizes += (sizes.empty() ? "" : ", ") + std::to_string(tp);
  return fmt::format("{} ({} inputs): tensor parallel {}", what, cols, sizes);
}

}  // namespace

PlanMachine plan_machine(int ranks, bool cuda, int64_t device_memory) {
  PlanMachine machine;
  machine.ranks = ranks;
  machine.cuda = cuda;
  machine.device_memory = device_memory;
  if (!cuda) return machine;
  machine.gemm_rate = 600e12;
  machine.gram_rate = 900e12;
  machine.solve_rate = 25e12;
  machine.wire_rate = 250e9;
  return machine;
}

std::string to_string(ReducePlan plan) {
  switch (plan) {
    case ReducePlan::auto_:
      return "auto";
    case ReducePlan::all_reduce:
      return "all_reduce";
    case ReducePlan::reduce_scatter:
      return "reduce_scatter";
    case ReducePlan::all_to_all:
      return "all_to_all";
  }
  fail(ExitCode::internal, "no such plan");
}

ReadMode choose_read(const Recipe& recipe, const PlanMachine& machine) {
  if (machine.ranks == 1) return ReadMode::all;
  if (recipe.read != ReadMode::auto_) return recipe.read;
  return machine.cuda ? ReadMode::share : ReadMode::all;
}

ReducePlan choose_reduce(const Recipe& recipe, const Inputs& inputs, const PlanMachine& machine) {
  if (recipe.reduce == ReducePlan::all_to_all) {
    SHARDQ_CHECK(
        recipe.experts == ExpertTokens::routed, ExitCode::usage,
        "parallel.reduce: all_to_all sends tokens to the experts they are routed to; with calibration.experts: "
        "all every expert sees every token");
    return recipe.reduce;
  }
  if (recipe.reduce != ReducePlan::auto_) return recipe.reduce;
  if (!tokens_can_travel(recipe, inputs, machine.ranks)) return ReducePlan::reduce_scatter;
  const ReadMode read = choose_read(recipe, machine);
  const auto seconds = [&](ReducePlan reduce) {
    double sum = 0;
    for (const LayerSpec& layer : inputs.spec.layer) {
      const PlanLayer one =
          plan_layer(recipe, inputs, layer, machine, static_cast<double>(inputs.tokens->tokens()), reduce);
      sum +=
          static_cast<double>(sent_for_hessians(one, reduce) + sent_for_weights(one, reduce, read)) / machine.wire_rate;
      sum += static_cast<double>(one.wave_count - 1) * one.forward_flops / machine.ranks / machine.gemm_rate;
      sum += one.hessian_flops / machine.ranks / machine.gram_rate;  // doubled already where the pool takes a pass
    }
    return sum;
  };
  return seconds(ReducePlan::all_to_all) < seconds(ReducePlan::reduce_scatter) ? ReducePlan::all_to_all
                                                                               : ReducePlan::reduce_scatter;
}

Fit fit_to_memory(const Recipe& recipe, const Inputs& inputs, const PlanMachine& machine, ReducePlan reduce) {
  const Fit asked{default_chunk_tokens(recipe, machine.cuda), recipe.offload == Offload::always};
  if (!machine.cuda || machine.device_memory <= 0) return asked;
  const bool chunks_open = recipe.chunk_tokens == 0 && !order_free(recipe, machine);
  std::vector<Fit> choices;
  for (const bool offload : {false, true}) {
    if (recipe.offload == (offload ? Offload::never : Offload::always)) continue;
    // A product of fewer tokens wastes the device; host memory is slower still, but has no such limit.
    for (int64_t chunk = asked.chunk_tokens; chunk >= (offload ? 2048 : 16384) || chunk == asked.chunk_tokens;
         chunk /= 2) {
      choices.push_back({chunk, offload});
      if (!chunks_open) break;
    }
  }
  const int64_t my_tokens = most_tokens(inputs, machine.ranks);
  for (const Fit& fit : choices) {
    Plan plan;
    plan.longest = inputs.tokens->longest();
    plan.chunk_tokens = fit.chunk_tokens;
    plan.offload = fit.offload;
    plan_memory(plan, recipe, inputs, machine, reduce, my_tokens);
    // A tenth is for fragments, libraries' workspaces and what the plan does not know.
    if (static_cast<double>(plan.peak_bytes) < 0.9 * static_cast<double>(machine.device_memory)) return fit;
  }
  return choices.back();
}

Plan make_plan(const Recipe& recipe, const Inputs& inputs, const PlanMachine& machine) {
  const ModelSpec& spec = inputs.spec;
  const ReducePlan reduce = choose_reduce(recipe, inputs, machine);
  const ReadMode read = choose_read(recipe, machine);
  Plan plan;
  plan.reduce = to_string(reduce);
  plan.read = read == ReadMode::share ? "share" : "all";
  plan.model_type = spec.model_type;
  plan.scheme = recipe.scheme.name;
  plan.ranks = machine.ranks;
  plan.samples = inputs.tokens->size();
  plan.tokens = inputs.tokens->tokens();
  plan.longest = inputs.tokens->longest();
  const Fit fit = fit_to_memory(recipe, inputs, machine, reduce);
  plan.chunk_tokens = fit.chunk_tokens;
  plan.offload = fit.offload;
  plan.quantized_linears = inputs.selection.count;
  plan.ignored_linears = static_cast<int64_t>(inputs.selection.ignored.size());
  plan.input_bytes = inputs.checkpoint->total_bytes();
  plan.output_bytes = plan.input_bytes;
  std::set<std::string> fused;
  for (const auto& [name, entry] : [&] {
         std::vector<std::pair<std::string, TensorEntry>> all;
         for (const std::string& name : inputs.checkpoint->names())
           all.emplace_back(name, inputs.checkpoint->entry(name));
         return all;
       }())
    plan.parameters += element_count(entry.shape);

  const int64_t my_tokens = most_tokens(inputs, machine.ranks);
  double forward = 0, hessian = 0, solve = 0, sent = 0;
  int64_t codes = 0;
  for (const LayerSpec& layer : spec.layer) {
    const PlanLayer one = plan_layer(recipe, inputs, layer, machine, static_cast<double>(plan.tokens), reduce);
    forward += one.forward_flops;
    hessian += one.hessian_flops;
    solve += one.solve_flops;
    sent += static_cast<double>(sent_for_hessians(one, reduce) + sent_for_weights(one, reduce, read) + one.sent_codes);
    auto same = std::ranges::find_if(
        plan.layers, [&](const PlanLayer& l) { return l.kind == one.kind && l.weight_bytes == one.weight_bytes; });
    if (same == plan.layers.end())
      plan.layers.push_back(one);
    else
      ++same->count;
    for (size_t i = 0; i < layer.linears.size(); ++i) {
      if (!inputs.selection.quantized[layer.index][i]) continue;
      const LinearSpec& linear = layer.linears[i];
      plan.output_bytes += packed_bytes(linear, recipe.scheme) - linear.rows * linear.cols * size_of(spec.dtype);
      codes += linear.rows * linear.cols;
    }
  }
  plan_memory(plan, recipe, inputs, machine, reduce, my_tokens);
  plan.stage_bytes = codes / std::max<int64_t>(1, spec.layers) +
                     plan.tokens * spec.hidden * size_of(inputs.compute) * (recipe.keep_last + 1);
  plan.forward_seconds = forward / machine.ranks / machine.gemm_rate;
  plan.hessian_seconds = hessian / machine.ranks / machine.gram_rate;
  plan.solve_seconds = solve / machine.ranks / machine.solve_rate;
  plan.read_seconds = static_cast<double>(plan.input_bytes + plan.output_bytes) / machine.disk_rate;
  plan.reduce_seconds = sent / machine.wire_rate;
  plan.total_seconds =
      plan.forward_seconds + plan.hessian_seconds + plan.solve_seconds + plan.read_seconds + plan.reduce_seconds;
  const std::filesystem::path target = recipe.output.empty() ? "." : recipe.output;
  plan.disk_free = free_bytes(target);
  if (plan.disk_free < plan.output_bytes + plan.stage_bytes)
    plan.warnings.push_back(fmt::format("{} needed for output and stages, {} free at {}",
                                        readable_bytes(double(plan.output_bytes + plan.stage_bytes)),
                                        readable_bytes(double(plan.disk_free)), target.string()));
  if (machine.device_memory > 0 && plan.peak_bytes > machine.device_memory)
    plan.warnings.push_back(
        fmt::format("{} a rank needed, {} there: use more ranks, fewer tokens or a smaller memory.hessian_budget",
                    readable_bytes(double(plan.peak_bytes)), readable_bytes(double(machine.device_memory))));
  if (plan.samples > 0 && plan.samples < machine.ranks)
    plan.warnings.push_back(
        fmt::format("{} samples for {} ranks: some ranks have no tokens", plan.samples, machine.ranks));
  std::set<std::string> seen;
  for (const LayerSpec& layer : spec.layer)
    for (const LinearSpec& linear : layer.linears)
      if ((linear.tap == Tap::down || linear.tap == Tap::o) && recipe.scheme.group_size > 0) {
        const std::string line = loads_at(linear.tap == Tap::o ? "attention output"
                                          : linear.expert >= 0 ? "experts' down"
                                                               : "MLP down",
                                          linear.cols, recipe.scheme.group_size);
        if (seen.insert(line).second) plan.tensor_parallel.push_back(line);
      }
  return plan;
}

std::string readable_plan(const Plan& p) {
  const auto gb = [](int64_t bytes) { return readable_bytes(static_cast<double>(bytes)); };
  std::string t =
      fmt::format("model        {}, {:.3g} parameters, {} linears to quantize ({}), {} left alone\n", p.model_type,
                  static_cast<double>(p.parameters), p.quantized_linears, p.scheme, p.ignored_linears);
  t += fmt::format("tokens       {} in {} samples (longest {}), chunks of {} on each of {} rank{}\n", p.tokens,
                   p.samples, p.longest, p.chunk_tokens, p.ranks, p.ranks == 1 ? "" : "s");
  for (const PlanLayer& l : p.layers)
    t += fmt::format(
        "layers       {} x {}: weights {}, Hessians {}{}; forward {:.3g}, Hessian {:.3g}, solve {:.3g} TFLOP each\n",
        l.count, l.kind, gb(l.weight_bytes), gb(l.hessian_bytes),
        l.wave_count > 1 ? fmt::format(" (in {} waves)", l.wave_count) : "", l.forward_flops * 1e-12,
        l.hessian_flops * 1e-12, l.solve_flops * 1e-12);
  t += fmt::format("memory/rank  {}: hidden {}, kept activations {}, layer {}, Hessians {}, solve {}, chunk {}\n",
                   gb(p.peak_bytes), gb(p.hidden_bytes), gb(p.kept_bytes), gb(p.weight_bytes), gb(p.hessian_bytes),
                   gb(p.solve_bytes), gb(p.scratch_bytes));
  if (p.offload) t += fmt::format("host memory  {} a rank: activations but for two chunks\n", gb(p.host_bytes));
  if (p.ranks > 1)
    for (const PlanLayer& l : p.layers)
      t += fmt::format(
          "wire         a rank sends, in a {} layer: Hessians {} by reduce_scatter, {} by all_reduce{} (chosen: {}); "
          "weights {}; codes {}\n",
          l.kind, gb(l.sent_reduce_scatter), gb(l.sent_all_reduce),
          l.kind == "moe" ? fmt::format(", {} by all_to_all of tokens", gb(l.sent_all_to_all)) : "", p.reduce,
          p.read == "share" ? gb(p.reduce == "all_to_all" ? l.sent_weights_owned : l.sent_weights) : "none",
          gb(l.sent_codes));
  t += fmt::format("disk         reads {}, writes {} and up to {} of stages; {} free\n", gb(p.input_bytes),
                   gb(p.output_bytes), gb(p.stage_bytes), gb(p.disk_free));
  t += fmt::format("time (guess) {}: forward {}, Hessians {}, solve {}, disk {}, wire {}\n",
                   readable_seconds(p.total_seconds), readable_seconds(p.forward_seconds),
                   readable_seconds(p.hessian_seconds), readable_seconds(p.solve_seconds),
                   readable_seconds(p.read_seconds), readable_seconds(p.reduce_seconds));
  for (const std::string& line : p.tensor_parallel) t += "serving      " + line + "\n";
  for (const std::string& line : p.warnings) t += "WARNING      " + line + "\n";
  return t;
}

std::string plan_json(const Plan& p) {
  using Json = nlohmann::ordered_json;
  Json layers = Json::array();
  for (const PlanLayer& l : p.layers)
    layers.push_back({{"kind", l.kind},
                      {"count", l.count},
                      {"weight_bytes", l.weight_bytes},
                      {"hessian_bytes", l.hessian_bytes},
                      {"waves", l.wave_count},
                      {"forward_flops", l.forward_flops},
                      {"hessian_flops", l.hessian_flops},
                      {"solve_flops", l.solve_flops},
                      {"sent_all_reduce", l.sent_all_reduce},
                      {"sent_reduce_scatter", l.sent_reduce_scatter},
                      {"sent_all_to_all", l.sent_all_to_all},
                      {"sent_weights", l.sent_weights},
                      {"sent_weights_owned", l.sent_weights_owned},
                      {"sent_codes", l.sent_codes}});
  return Json{{"model_type", p.model_type},
              {"scheme", p.scheme},
              {"ranks", p.ranks},
              {"reduce", p.reduce},
              {"read", p.read},
              {"parameters", p.parameters},
              {"quantized_linears", p.quantized_linears},
              {"ignored_linears", p.ignored_linears},
              {"samples", p.samples},
              {"tokens", p.tokens},
              {"longest", p.longest},
              {"chunk_tokens", p.chunk_tokens},
              {"layers", layers},
              {"memory_per_rank",
               {{"peak_bytes", p.peak_bytes},
                {"hidden_bytes", p.hidden_bytes},
                {"kept_bytes", p.kept_bytes},
                {"weight_bytes", p.weight_bytes},
                {"hessian_bytes", p.hessian_bytes},
                {"solve_bytes", p.solve_bytes},
                {"scratch_bytes", p.scratch_bytes},
                {"offload", p.offload},
                {"host_bytes", p.host_bytes}}},
              {"disk",
               {{"input_bytes", p.input_bytes},
                {"output_bytes", p.output_bytes},
                {"stage_bytes", p.stage_bytes},
                {"free_bytes", p.disk_free}}},
              {"seconds",
               {{"total", p.total_seconds},
                {"forward", p.forward_seconds},
                {"hessian", p.hessian_seconds},
                {"solve", p.solve_seconds},
                {"disk", p.read_seconds},
                {"wire", p.reduce_seconds}}},
              {"tensor_parallel", p.tensor_parallel},
              {"warnings", p.warnings}}
      .dump(1);
}

}  // namespace shardq
