#include "pipeline/quantize.hpp"

#include <algorithm>
#include <filesystem>

#include "core/error.hpp"
#include "core/fault_point.hpp"
#include "core/log.hpp"
#include "core/stop_signal.hpp"
#include "io/files.hpp"
#include "io/stage_store.hpp"
#include "model/embedding.hpp"
#include "model/layer_reader.hpp"
#include "pipeline/layer_output.hpp"
#include "pipeline/plan.hpp"
#include "pipeline/preflight.hpp"
#include "pipeline/progress.hpp"
#include "pipeline/rank_exchange.hpp"
#include "pipeline/report.hpp"
#include "pipeline/tap_stage.hpp"

namespace shardq {
namespace {

/// The sequential pipeline over layers, on every rank.
class Run {
 public:
  Run(Job& job, StageStore& store, OutputWriter& writer, LayerOutput& output, bool resuming)
      : job_(job),
        store_(store),
        stages_(job, store, output),
        writer_(writer),
        output_(output),
        source_(job.checkpoint, job.spec),
        reader_(job.backend, source_, job.spec, job.compute, job.recipe.check_finite, read_plan(job)),
        progress_(job.host.rank() == 0, static_cast<double>(job.spec.layers * 4)),
        chunks_(job.backend),
        resuming_(resuming) {}

  void layers();
  /// Waits until everything is durable: shards, then what stages say of them.
  void finish();
  const Report& report() const { return report_; }
  bool offloaded() const { return chunks_.offloaded(); }

 private:
  bool rtn() const { return job_.recipe.scheme.method == Method::rtn; }
  void start_chunks();
  int64_t start_layer();
  void layer(const LayerSpec& layer);
  TapResult solve_or_load(TapSolver& solver, LayerForward* forward, const LayerSpec& layer, Tap tap,
                          const StackView& weights, std::vector<TapHessian>& ahead);
  void start_next_reduction(TapSolver& solver, const LayerSpec& layer, Tap tap, std::vector<TapHessian>& ahead);
  void apply(const LayerSpec& layer, Tap tap, const TapResult& result, Tensor& weights);
  void safe_point();
  void store_hidden_if_due(const LayerSpec& layer);
  int64_t first_token() const;

  Job& job_;
  StageStore& store_;
  TapStages stages_;
  OutputWriter& writer_;
  LayerOutput& output_;
  WeightSource source_;
  LayerReader reader_;
  Progress progress_;
  Report report_;
  RopeTable rope_;
  ChunkStore chunks_;
  Stopwatch since_hidden_;
  std::vector<std::string> hidden_stages_;  ///< stored hidden states, oldest first
  bool resuming_;
  int64_t skipped_taps_ = 0, done_taps_ = 0;
};

int64_t Run::first_token() const {
  int64_t row = 0;
  for (int64_t s = 0; s < job_.my_samples().begin; ++s) row += static_cast<int64_t>(job_.tokens[s].size());
  return row;
}

/// This rank's chunks, and how many the busiest rank has.
void Run::start_chunks() {
  std::vector<int64_t> counts(job_.host.size(), 0);
  for (const Range& samples : job_.chunks)
    for (int r = 0; r < job_.host.size(); ++r) {
      if (samples.begin < job_.shares[r].begin || samples.end > job_.shares[r].end) continue;
      ++counts[r];
      if (r != job_.host.rank()) continue;
      std::vector<int64_t> starts{0};
      for (int64_t s = samples.begin; s < samples.end; ++s)
        starts.push_back(starts.back() + static_cast<int64_t>(job_.tokens[s].size()));
      chunks_.add(std::move(starts));
    }
  job_.most_chunks = *std::ranges::max_element(counts);
  // With owners every chunk is a meeting of all ranks: those that have fewer bring empty ones.
  while (job_.expert_parallel() && chunks_.size() < job_.most_chunks) chunks_.add({0});
  if (job_.offload) chunks_.offload();
}

/// The layer whose input is at hand after a restart: the last stored hidden states, or the embedding.
int64_t Run::start_layer() {
  int64_t start = 0;
  for (const StageInfo& stage : store_.stages())
    if (stage.name.ends_with(".hidden")) {
      hidden_stages_.push_back(stage.name);
      start = std::max<int64_t>(start, std::stoll(stage.name.substr(5, 4)));
    }
  return start;
}

void Run::safe_point() {
  report_progress("a chunk of tokens");
  fault_point("safe_point");
  std::vector<int64_t> flags = stages_.state();
  flags.push_back(stop_requested());
  {
    PhaseTimer timer(job_.seconds, "wait");  // for the slowest rank
    job_.host.all_reduce_sum(flags.data(), static_cast<int64_t>(flags.size()));
  }
  const bool stop = flags.back() > 0;
  flags.pop_back();
  const TapStages::Standing standing = stages_.accept(flags);
  // A stage that every rank has written is committed at the next safe point, not only when another one follows; and a
  // tap that has waited long enough need not wait for the next one.
  if (store_.in_flight() && !standing.writing) agree(job_.host, [&] { store_.complete(); });
  if (!stop && stages_.is_due(standing)) agree(job_.host, [&] { stages_.write_due(standing); });
  if (!stop) return;
  agree(job_.host, [&] {
    stages_.flush();
    store_.complete();
  });
  throw AgreedError(ExitCode::stopped, fmt::format("stopped on {} after {} of {} taps; the same command resumes",
                                                   stop_signal_name().empty() ? "request" : stop_signal_name(),
                                                   done_taps_, job_.spec.layers * 4));
}

void Run::store_hidden_if_due(const LayerSpec& layer) {
  if (rtn() || layer.index == 0) return;
  // Rank 0's clock decides for all, so that the schedule of collectives stays the same everywhere.
  int64_t due = since_hidden_.seconds() >= job_.recipe.checkpoint_interval;
  job_.host.broadcast(&due, sizeof due, 0);
  const std::string name = hidden_stage_name(layer.index);
  if (!due || store_.has(name)) return;
  PhaseTimer timer(job_.seconds, "checkpoint");
  // Codes of finished layers may go once the hidden states behind them are durable AND their output shards are.
  agree(job_.host, [&] { output_.wait(); });
  std::vector<StageArray> arrays;
  arrays.push_back(
      hidden_array(job_.backend, chunks_, first_token(), job_.tokens.tokens(), job_.spec.hidden, job_.compute));
  agree(job_.host, [&] {
    stages_.flush();
    store_.put(name, std::move(arrays), report_.to_json());
    store_.complete();
  });
  hidden_stages_.push_back(name);
  std::vector<std::string> old;
  while (static_cast<int64_t>(hidden_stages_.size()) > job_.recipe.keep_last) {
    old.push_back(hidden_stages_.front());
    hidden_stages_.erase(hidden_stages_.begin());
  }
  const int64_t oldest = std::stoll(hidden_stages_.front().substr(5, 4));
  for (const std::string& stage : stages_.stages_before(oldest)) old.push_back(stage);
  agree(job_.host, [&] { store_.remove(old); });
  since_hidden_.reset();
  fault_point("hidden_stored");
}

TapResult Run::solve_or_load(TapSolver& solver, LayerForward* forward, const LayerSpec& layer, Tap tap,
                             const StackView& weights, std::vector<TapHessian>& ahead) {
  if (stages_.has(layer, tap)) {
    TapResult result;
    {
      PhaseTimer timer(job_.seconds, "checkpoint");
      agree(job_.host, [&] { result = stages_.load(layer, tap); });
    }
    if (forward) solver.advance(tap, *forward, chunks_);
    ++skipped_taps_;
    if (output_.owns(layer)) output_.add(layer, tap, download_tap(job_.backend, result, true));
    return result;
  }
  TapResult result;
  if (rtn())
    result = solver.round(tap, weights);
  else if (!ahead.empty())
    result = solver.solve_accumulated(tap, std::move(ahead[static_cast<size_t>(tap)]), weights);
  else
    result = solver.solve(tap, *forward, chunks_, weights);
  fault_point("tap_solved");
  std::shared_ptr<const HostTap> host;
  {
    PhaseTimer timer(job_.seconds, "write");
    host = download_tap(job_.backend, result, output_.owns(layer));
    output_.add(layer, tap, host);
  }
  PhaseTimer timer(job_.seconds, "checkpoint");
  agree(job_.host, [&] { stages_.put(layer, tap, result, std::move(host)); });
  return result;
}

/// With all Hessians of the layer at hand, the next one travels while this tap is solved.
void Run::start_next_reduction(TapSolver& solver, const LayerSpec& layer, Tap tap, std::vector<TapHessian>& ahead) {
  for (Tap next : kTaps) {
    if (next <= tap || !job_.selection.any(layer, next) || stages_.has(layer, next)) continue;
    solver.start_reduction(next, ahead[static_cast<size_t>(next)]);
    return;
  }
}

/// Replaces the tap's weights by what a reader of the checkpoint will reconstruct; ignored linears keep theirs.
void Run::apply(const LayerSpec& layer, Tap tap, const TapResult& result, Tensor& weights) {
  const QuantScheme& scheme = job_.recipe.scheme;
  const StackView stack = weights.stack();
  const int64_t group = group_size_for(scheme, stack.cols), groups = result.scales.shape()[2];
  bool all = true;
  for (size_t i = 0; i < layer.linears.size(); ++i)
    all = all && (layer.linears[i].tap != tap || job_.selection.quantized[layer.index][i]);
  const Range own = job_.own_matrices(layer, tap);
  /// Matrices or rows of `target` from row `row` of the result.
  const auto apply_rows = [&](int64_t row, const StackView& target) {
    job_.backend.dequantize(result.codes.as<int8_t>() + row * stack.cols, result.scales.as<float>() + row * groups,
                            result.zeros ? result.zeros.as<int8_t>() + row * groups : nullptr, group, scheme.grid,
                            target);
  };
  if (all) return apply_rows(own.begin * stack.rows, stack);
  for (size_t i = 0; i < layer.linears.size(); ++i) {
    const LinearSpec& linear = layer.linears[i];
    const int64_t matrix = std::max<int64_t>(linear.expert, 0);
    if (linear.tap != tap || !job_.selection.quantized[layer.index][i] || matrix < own.begin || matrix >= own.end)
      continue;
    apply_rows(matrix * stack.rows + linear.row_offset,
               as_stack(stack[matrix - own.begin].row_range(linear.row_offset, linear.row_offset + linear.rows)));
  }
}

void Run::layer(const LayerSpec& layer) {
  check_schedule(job_.host, layer.prefix.c_str());
  store_hidden_if_due(layer);
  LayerWeights weights;
  {
    PhaseTimer timer(job_.seconds, "read");
    agree(job_.host, [&] { reader_.prepare(layer.index); });
    weights = reader_.take(layer.index);
    job_.backend.synchronize();
  }
  report_progress("a layer's weights");
  std::optional<LayerForward> forward;
  std::optional<RankExchange> exchange;
  if (job_.expert_parallel() && layer.moe) exchange.emplace(job_.host, job_.device, job_.spec.experts, job_.seconds);
  if (!rtn())
    forward.emplace(job_.backend, job_.spec, layer, weights, rope_, job_.compute, exchange ? &*exchange : nullptr);
  TapSolver solver(job_, layer, [this] { safe_point(); });

  std::vector<TapHessian> ahead;  // sequential: layer
  const bool by_layer = !rtn() && job_.recipe.sequential == Sequential::layer;
  if (by_layer && !stages_.has_all(layer)) ahead = solver.accumulate_all(*forward, chunks_);

  for (Tap tap : kTaps) {
    Tensor& stack = weights.taps[static_cast<size_t>(tap)];
    if (!ahead.empty()) start_next_reduction(solver, layer, tap, ahead);
    if (job_.selection.any(layer, tap)) {
      TapResult result = solve_or_load(solver,
                                       by_layer  ? nullptr
                                       : forward ? &*forward
                                                 : nullptr,
                                       layer, tap, stack.stack(), ahead);
      if (by_layer) solver.advance(tap, *forward, chunks_);
      apply(layer, tap, result, stack);
      report_.add(job_, layer, tap, result);
    } else if (forward) {
      solver.advance(tap, *forward, chunks_);
    }
    ++done_taps_;
    report_progress("a tap");
    progress_.show(static_cast<double>(done_taps_), static_cast<double>(skipped_taps_),
                   fmt::format("layer {}/{} {}", layer.index + 1, job_.spec.layers, to_string(tap)));
    safe_point();
  }
  if (forward && layer.index + 1 < job_.spec.layers) solver.finish(*forward, chunks_);
  PhaseTimer timer(job_.seconds, "write");
  // A shard that no digest vouches for is written again: an earlier life of the run may have solved other codes, where
  // results hang on the number of ranks.
  agree(job_.host, [&] {
    if (!stages_.needs_shard(layer) || !output_.has_shard(layer)) output_.write(layer);
  });
  fault_point("layer_done");
}

void Run::finish() {
  {
    PhaseTimer timer(job_.seconds, "write");
    agree(job_.host, [&] { output_.finish(); });
  }
  PhaseTimer timer(job_.seconds, "checkpoint");
  agree(job_.host, [&] {
    stages_.flush();
    store_.complete();
  });
}

void Run::layers() {
  const int64_t start = start_layer();
  if (!rtn()) {
    start_chunks();
    rope_ = rope_table(job_.spec, job_.tokens.longest());
    PhaseTimer timer(job_.seconds, "read");
    agree(job_.host, [&] {
      reader_.begin(start);  // the first layer is read while the hidden states are made
      int64_t sample = job_.my_samples().begin;
      std::optional<Embedding> embed;
      if (start == 0) embed.emplace(job_.backend, job_.checkpoint, job_.spec, job_.compute);
      const auto fill = [&](ChunkState& chunk) {
        if (start > 0) {
          chunk.hidden = Tensor(job_.backend, job_.compute, {chunk.starts.back(), job_.spec.hidden}, "hidden states");
          return;
        }
        std::vector<int32_t> ids;
        for (size_t s = 0; s + 1 < chunk.starts.size(); ++s, ++sample)
          ids.insert(ids.end(), job_.tokens[sample].begin(), job_.tokens[sample].end());
        chunk.hidden = (*embed)(ids);
      };
      for (int64_t i = 0; i < chunks_.size(); ++i) chunks_.visit(i, fill, true);
      if (start > 0) load_hidden(job_.backend, store_, hidden_stage_name(start), first_token(), chunks_);
    });
  }
  if (start > 0) {
    report_.from_json(store_.text(hidden_stage_name(start)));
    done_taps_ = skipped_taps_ = start * 4;
  }
  for (int64_t l = 0; l < job_.spec.layers; ++l)
    SHARDQ_CHECK((l >= start && !stages_.needs_shard(job_.spec.layer[l])) || output_.has_shard(job_.spec.layer[l]),
                 ExitCode::disk,
                 "{} lacks {}, which the work directory counts as written; start anew with --resume never",
                 writer_.partial().string(), OutputWriter::shard_name(l + 1, output_.shard_count()));
  if (resuming_ && job_.host.rank() == 0)
    spdlog::info("resuming: {} stages found, hidden states of layer {}", store_.stages().size(), start);
  for (int64_t l = start; l < job_.spec.layers; ++l) layer(job_.spec.layer[l]);
  progress_.finish();
}

/// True where `output` is what this very run published before it could say so in its work directory.
bool published_by_us(const Recipe& recipe) {
  const std::filesystem::path output = recipe.output;
  return std::filesystem::exists(output / "config.json") && std::filesystem::exists(output / "recipe.yaml") &&
         read_text(output / "recipe.yaml") == recipe_text(recipe, RecipeText::published);
}

}  // namespace

ExitCode run_quantize(const Recipe& asked, Backend& backend, Communicator& host, Communicator& device) {
  Stopwatch watch;
  Recipe recipe = asked;
  Inputs inputs;
  SHARDQ_CHECK(!recipe.output.empty(), ExitCode::usage, "no output directory given (key output, or --output DIR)");
  agree(host, [&] { inputs = check_inputs(recipe); });
  const std::filesystem::path work = work_directory(recipe);
  if (recipe.reproducible == "auto") recipe.reproducible = backend.is_host() ? "true" : "false";
  // Where chunks decide the bits they are part of what is asked; elsewhere they follow the memory at hand.
  if (recipe.reproducible == "true") recipe.chunk_tokens = default_chunk_tokens(recipe, !backend.is_host());
  Recipe decisive = recipe;
  if (recipe.reproducible != "true") decisive.chunk_tokens = 0;
  const auto fingerprint = run_fingerprint(decisive, inputs);
  // Every rank must come to the same plans: the smallest memory counts.
  const std::vector<int64_t> memory = all_gather_numbers(host, backend.memory().total);
  const PlanMachine machine = plan_machine(host.size(), !backend.is_host(), *std::ranges::min_element(memory));
  ReducePlan reduce = ReducePlan::reduce_scatter;
  Fit fit;
  agree(host, [&] {
    reduce = choose_reduce(recipe, inputs, machine);
    fit = fit_to_memory(recipe, inputs, machine, reduce);
  });

  const bool resuming = recipe.resume != ResumeMode::never && StageStore::peek_fingerprint(work).has_value();
  SHARDQ_CHECK(resuming || recipe.resume != ResumeMode::require, ExitCode::usage,
               "--resume require: {} holds no run to resume", work.string());
  host.barrier();  // everyone has looked before rank 0 changes anything
  std::unique_ptr<StageStore> store;
  agree(host, [&] {
    // Layers are scanned as they are read; what lies in none of them now, before hours of work.
    if (host.rank() != 0 || resuming || !recipe.check_finite) return;
    const WeightSource source(*inputs.checkpoint, inputs.spec);
    for (const std::string& name : {inputs.spec.embedding, inputs.spec.final_norm, inputs.spec.lm_head})
      if (inputs.checkpoint->has(name)) source.check_finite(name);
  });
  agree(host, [&] {
    try {
      store = std::make_unique<StageStore>(
          work,
          StageStore::Ranks{host.rank(), host.size(),
                            [&host](const std::string& mine) { return all_gather_strings(host, mine); }},
          fingerprint, resuming, [&] { OutputWriter::discard(recipe.output); });
    } catch (const Error& error) {
      if (!resuming || error.code() != ExitCode::disk) throw;
      fail(ExitCode::disk, "{} (--resume never starts anew)", error.what());
    }
  });
  if (resuming && store->finished()) {
    if (std::filesystem::exists(std::filesystem::path(recipe.output) / "config.json")) {
      if (host.rank() == 0)
        fmt::print("already finished: {} (remove {} or use --resume never to start anew)\n", recipe.output,
                   work.string());
      return ExitCode::ok;
    }
    fail(ExitCode::usage, "{} says that its run finished into {}, but {} is not there; start anew with --resume never",
         work.string(), *store->finished(), recipe.output);
  }

  bool published = false;
  agree(host, [&] { published = resuming && published_by_us(recipe); });
  if (published) {
    agree(host, [&] {
      if (host.rank() == 0) OutputWriter::remove_marker(recipe.output);
    });
    agree(host, [&] { store->finish(recipe.output); });
    if (host.rank() == 0) fmt::print("already finished: {}\n", recipe.output);
    return ExitCode::ok;
  }
  std::unique_ptr<OutputWriter> writer;
  agree(host, [&] {
    if (host.rank() == 0) writer = std::make_unique<OutputWriter>(recipe.output, store->run());
  });
  agree(host, [&] {
    if (host.rank() != 0) writer = std::make_unique<OutputWriter>(recipe.output);
  });

  backend.set_reproducible(recipe.reproducible == "true");
  Job job{.recipe = recipe,
          .backend = backend,
          .host = host,
          .device = device,
          .checkpoint = *inputs.checkpoint,
          .spec = inputs.spec,
          .tokens = *inputs.tokens,
          .selection = inputs.selection,
          .compute = inputs.compute,
          .shares = {},
          .chunks = {},
          .reduce = reduce,
          .read = choose_read(recipe, machine),
          .offload = fit.offload,
          .device_memory = machine.device_memory,
          .reproducible = recipe.reproducible == "true",
          .seconds = {}};
  const Range all{0, inputs.tokens->size()};
  if (job.reproducible) {
    // Fixed chunks, shared out whole: what is in a chunk must not depend on the ranks.
    job.chunks = make_chunks(*inputs.tokens, all, fit.chunk_tokens);
    job.shares = balanced_shares(*inputs.tokens, job.chunks, host.size());
  } else {
    job.shares = balanced_shares(*inputs.tokens, make_chunks(*inputs.tokens, all, 0), host.size());
    for (const Range& share : job.shares)
      for (const Range& chunk : make_chunks(*inputs.tokens, share, fit.chunk_tokens)) job.chunks.push_back(chunk);
  }
  LayerOutput output(job, *writer);
  agree(host, [&] { output.start_rest(); });
  std::optional<Run> run;
  agree(host, [&] { run.emplace(job, *store, *writer, output, resuming); });
  run->layers();
  run->finish();

  RunSummary summary;
  summary.output = recipe.output;
  summary.work = work.string();
  summary.device = backend.name();
  summary.ranks = host.size();
  summary.reduce = to_string(job.reduce);
  summary.read = job.read == ReadMode::share ? "share" : "all";
  summary.chunk_tokens = fit.chunk_tokens;
  summary.offload = run->offloaded();
  summary.samples = inputs.tokens->size();
  summary.tokens = inputs.tokens->tokens();
  summary.input_bytes = inputs.checkpoint->total_bytes();
  summary.peak_memory = backend.memory().peak;
  summary.resumed = resuming;
  std::vector<PhaseSeconds> phases;
  for (const std::string& text : all_gather_strings(host, phases_to_json(job.seconds)))
    phases.push_back(phases_from_json(text));
  summary.seconds = watch.seconds();
  agree(host, [&] {
    if (host.rank() != 0) return;
    // Reports first: once the output has its final name, nothing must be missing. A kill between the two is seen by
    // published_by_us.
    write_reports(job, run->report(), writer->partial(), summary, phases);
    output.publish();
    fault_point("published");
  });
  agree(host, [&] { store->finish(recipe.output); });
  if (host.rank() == 0) fmt::print("{}", readable_summary(summary, run->report(), phases[0]));
  const double share = static_cast<double>(run->report().fallbacks()) /
                       std::max<double>(1.0, static_cast<double>(run->report().records().size()));
  if (share > recipe.max_rtn_fraction) {
    if (host.rank() == 0)
      spdlog::error("{} of {} modules fell back to rounding, more than max_rtn_fraction {}; see {}/report.json",
                    run->report().fallbacks(), run->report().records().size(), recipe.max_rtn_fraction, work.string());
    return ExitCode::fallbacks;
  }
  return ExitCode::ok;
}

}  // namespace shardq
