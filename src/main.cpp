// The command line: shardq quantize | plan | eval | inspect | version.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "core/build_info.hpp"
#include "core/error.hpp"
#include "core/fault_point.hpp"
#include "core/log.hpp"
#include "core/stop_signal.hpp"
#include "pipeline/inspect.hpp"
#include "pipeline/perplexity.hpp"
#include "pipeline/plan.hpp"
#include "pipeline/quantize.hpp"

namespace shardq {
namespace {

/// Flags that quantize and plan share; each is a recipe key by another name.
struct RecipeFlags {
  std::string file;
  std::vector<std::pair<std::string, std::string>> overrides;
  std::vector<std::string> sets;

  void add_to(CLI::App& app) {
    app.add_option("recipe", file, "recipe file (YAML)");
    const auto flag = [&](const char* name, const char* key, const char* help) {
      app.add_option_function<std::string>(
          name, [this, key](const std::string& value) { overrides.emplace_back(key, value); }, help);
    };
    flag("--model", "model", "Hugging Face model directory");
    flag("--tokens", "tokens", "calibration token ids (.npy, .safetensors, .h5, .jsonl)");
    flag("--output", "output", "directory of the quantized checkpoint; must not exist or be empty");
    flag("--work", "work", "directory of stages and reports (default: OUTPUT.work)");
    flag("--scheme", "scheme", "preset, e.g. W4A16");
    flag("--device", "device", "cpu or cuda (default: cuda where a device is visible)");
    flag("--resume", "resume", "auto, never or require");
    app.add_option("--set", sets, "any recipe key: section.key=value (repeatable)");
  }
  Recipe read() {
    for (const std::string& set : sets) {
      const size_t equal = set.find('=');
      SHARDQ_CHECK(equal != std::string::npos, ExitCode::usage, "--set: expected key=value, found '{}'", set);
      overrides.emplace_back(set.substr(0, equal), set.substr(equal + 1));
    }
    return read_recipe(file, overrides);
  }
};

bool wants_cuda(const std::string& device) {
  return device == "cuda" || (device.empty() && cuda_device_count() > 0);
}

std::unique_ptr<Backend> make_backend(const std::string& device, Communicator& host) {
  SHARDQ_CHECK(device.empty() || device == "cpu" || device == "cuda", ExitCode::usage,
               "--device: expected cpu or cuda, found '{}'", device);
  if (!wants_cuda(device)) return make_cpu_backend();
  const int devices = cuda_device_count();
  SHARDQ_CHECK(devices > 0, ExitCode::internal,
               "--device cuda: no CUDA device is visible (CUDA_VISIBLE_DEVICES, driver, or a build without CUDA)");
  const int local = local_rank(host);
  SHARDQ_CHECK(local < devices, ExitCode::usage,
               "rank {} is number {} on this node, which shows {} CUDA device{}: start one rank per device",
               host.rank(), local, devices, devices == 1 ? "" : "s");
  return make_cuda_backend(local);
}

int quantize(Communicator& host, RecipeFlags& flags) {
  Recipe recipe;
  std::unique_ptr<Backend> backend;
  agree(host, [&] {
    recipe = flags.read();
    backend = make_backend(recipe.device, host);
  });
  start_watchdog(host.rank(), recipe.watchdog_seconds);
  std::unique_ptr<Communicator> nccl;
  if (!backend->is_host() && host.size() > 1) nccl = make_nccl_communicator(host, local_rank(host), backend->stream());
  Communicator& device = nccl ? *nccl : host;
  std::unique_ptr<Communicator> late;
  if (std::getenv("SHARDQ_LATE_COLLECTIVES")) late = make_late_communicator(device);  // for tests
  return static_cast<int>(run_quantize(recipe, *backend, host, late ? *late : device));
}

int plan(Communicator& host, RecipeFlags& flags, bool json, int ranks) {
  Recipe recipe = flags.read();
  const Inputs inputs = check_inputs(recipe);
  const int count = ranks > 0 ? ranks : host.size();
  const bool cuda = wants_cuda(recipe.device);
  const int64_t memory = cuda ? (cuda_device_count() > 0 ? make_cuda_backend(0)->memory().total : 0)
                              : static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE) / count;
  const PlanMachine machine = plan_machine(count, cuda, memory);
  const Plan plan = make_plan(recipe, inputs, machine);
  if (host.rank() == 0) fmt::print("{}\n", json ? plan_json(plan) : readable_plan(plan));
  return 0;
}

struct Options {
  RecipeFlags recipe;
  EvalOptions eval;
  std::string directory;
  bool json = false;
  int ranks = 0;
};

int run(int argc, char** argv, Communicator& host) {
  CLI::App app{"GPTQ quantization of large language models on many GPUs"};
  app.require_subcommand(1);
  Options options;
  CLI::App* quantize_app = app.add_subcommand("quantize", "quantize a model directory");
  options.recipe.add_to(*quantize_app);
  CLI::App* plan_app =
      app.add_subcommand("plan", "check everything and predict memory, disk and time, without running");
  options.recipe.add_to(*plan_app);
  plan_app->add_flag("--json", options.json, "machine-readable");
  plan_app->add_option("--ranks", options.ranks, "plan for this many ranks")->check(CLI::PositiveNumber);
  CLI::App* eval_app =
      app.add_subcommand("eval", "perplexity (and agreement) of a model directory, full-precision or quantized");
  eval_app->add_option("model", options.eval.model, "model directory")->required();
  eval_app->add_option("--tokens", options.eval.tokens, "held-out token ids")->required();
  eval_app->add_option("--device", options.eval.device, "cpu or cuda");
  eval_app->add_option("--samples", options.eval.samples, "only the first N samples");
  eval_app->add_option("--compute", options.eval.compute, "bf16 or f32");
  eval_app->add_option("--against", options.eval.against, "second model directory: report top-1 agreement with it");
  eval_app->add_flag("--json", options.json, "machine-readable");
  CLI::App* inspect_app =
      app.add_subcommand("inspect", "verdicts, losses and tokens per expert of a finished or running job");
  inspect_app->add_option("directory", options.directory, "work or output directory")->required();
  inspect_app->add_flag("--json", options.json, "machine-readable");
  CLI::App* version_app = app.add_subcommand("version", "build facts");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (host.rank() != 0) return error.get_exit_code() == 0 ? 0 : static_cast<int>(ExitCode::usage);
    return app.exit(error) == 0 ? 0 : static_cast<int>(ExitCode::usage);
  }
  if (quantize_app->parsed()) return quantize(host, options.recipe);
  if (plan_app->parsed()) return plan(host, options.recipe, options.json, options.ranks);
  if (eval_app->parsed()) {
    std::unique_ptr<Backend> backend;
    agree(host, [&] { backend = make_backend(options.eval.device, host); });
    const std::string text = run_eval(options.eval, *backend, host, options.json);
    if (host.rank() == 0) fmt::print("{}\n", text);
    return 0;
  }
  if (inspect_app->parsed()) {
    if (host.rank() == 0) fmt::print("{}\n", inspect(options.directory, options.json));
    return 0;
  }
  if (version_app->parsed() && host.rank() == 0)
    fmt::print("shardq {} ({}, {}), CUDA {}, MPI {}\n", kVersion, kGitHash, kCompiler,
               *kCudaVersion ? kCudaVersion : "not compiled in",
#ifdef SHARDQ_WITH_MPI
               "compiled in"
#else
               "not compiled in"
#endif
    );
  return 0;
}

}  // namespace
}  // namespace shardq

int main(int argc, char** argv) {
  using namespace shardq;
  int rank = 0;
  std::string voice = "shardq";  // of an error that only this rank knows
  bool agreed = false;
  int code = 0;
  try {
    // Before MPI starts: a SIGTERM that kills a rank in MPI_Init can leave its launcher waiting for good.
    if (argc > 1 && std::string(argv[1]) == "quantize") install_stop_signals();
    const std::unique_ptr<Communicator> host = make_host_communicator(&argc, &argv);
    rank = host->rank();
    if (host->size() > 1) voice += fmt::format(": rank {}", rank);
    start_log(rank, host->size());
    arm_faults_from_environment(rank);
    code = run(argc, argv, *host);
    agreed = true;
  } catch (const AgreedError& error) {
    // Known to every rank: rank 0 says it once, and all leave in order.
    if (rank == 0) fmt::print(stderr, "shardq: {}\n", error.what());
    code = static_cast<int>(error.code());
    agreed = true;
  } catch (const Error& error) {
    fmt::print(stderr, "{}: {}\n", voice, error.what());
    code = static_cast<int>(error.code());
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}: internal error: {}\n", voice, error.what());
    code = static_cast<int>(ExitCode::internal);
  }
  std::fflush(nullptr);
  if (!agreed) abort_job(code);
  finish_communication();  // still watched: a peer may be lost in the last barrier
  stop_watchdog();
  return code;
}
