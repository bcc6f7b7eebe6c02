#!/usr/bin/env python3
"""Perplexity of a real model quantized in several ways on one device: does a backend cost accuracy, or is a difference no more than chance?

    bash jobs/quickstart.sh smollm2           # makes out/smollm2/{model,calibration.npy,heldout.npy}
    python3 bench/quality.py --shardq build/cpu/shardq --device cpu --out RESULT.json [--files out/smollm2] [--only NAME,...]
    python3 bench/quality.py --out GPU.json --compare CPU.json        # no runs: what the two files say of each other

A code on a rounding boundary flips with the last bit of a sum, and all later codes of its row are rounded from other values; so two runs with equal right to be called the
result differ in a tenth of their codes and in perplexity. How much is seen from draws: the damping of 0.01 changed in its fourth digit, which means nothing by itself.
The file has every run's perplexity, its loss in every layer and tap (sums over modules), and the share of codes that differ from the first run's. Runs need numpy."""

import argparse
import datetime
import json
import pathlib
import shutil
import statistics
import sys

from launch import end_ranks_at_sigterm, environment, gpu_names, processor_name, run_in_time

HOME = pathlib.Path(__file__).resolve().parents[1]
DAMPING = 0.01
DRAWS = {f"damping {sign}{step * 0.01:.2f} %": DAMPING * (1 + float(f"{sign}{step}e-4")) for step in (1, 2, 3, 4) for sign in "+-"}
# name -> (settings, environment)
VARIANTS = {
    "default": ([], {}),
    "compute f32": (["--set", "compute=f32"], {}),
    **{name: (["--set", f"solver.dampening_frac={value:.8f}"], {}) for name, value in DRAWS.items()},
}
CUDA = {
    "libraries": ([], {"SHARDQ_FACTOR": "library", "SHARDQ_UPDATE": "library"}),
    "portable Gram sums": ([], {"SHARDQ_GRAM": "portable"}),
    "reproducible": (["--set", "parallel.reproducible=true"], {}),
}


def evaluate(options, model, samples):
    command = [options.shardq, "eval", model, "--tokens", options.files / "heldout.npy", "--samples", samples, "--device", options.device, "--json"]
    code, output, _ = run_in_time(command, environment(1, options.threads))
    if code != 0:
        sys.exit(f"quality.py: eval of {model} ended with {code}:\n{output}")
    return json.loads(output[output.index("{") :])["perplexity"]


def losses_of(report):
    sums = {}
    for module in report["modules"]:
        key = f"{module['layer']} {module['tap']}"
        sums[key] = sums.get(key, 0.0) + module["loss"]
    return sums


def run_variant(options, name, settings, variables):
    folder = options.work / name.replace(" ", "_").replace("%", "percent")
    for path in (folder, folder.with_name(folder.name + ".work")):
        shutil.rmtree(path, ignore_errors=True)
    command = [options.shardq, "quantize", options.recipe, "--model", options.files / "model", "--tokens", options.files / "calibration.npy", "--output", folder,
               "--work", f"{folder}.work", "--device", options.device, *settings]  # fmt: skip
    code, output, seconds = run_in_time(command, environment(1, options.threads, **variables))
    if code != 0:
        sys.exit(f"quality.py: {name} ended with {code}:\n{output}")
    report = json.loads(pathlib.Path(f"{folder}.work/report.json").read_text())
    shutil.rmtree(f"{folder}.work")
    return folder, {
        "name": name,
        "perplexity": {str(samples): evaluate(options, folder, samples) for samples in options.samples},
        "loss": losses_of(report),
        "seconds": round(seconds, 1),
    }


def differing_share(one, other):
    import compare_codes  # numpy: not needed to compare two files

    counts = compare_codes.differing_codes(one, other)
    return {"all": sum(c[2] for c in counts) / max(1, sum(c[1] for c in counts)), "by layer": [round(c[2] / max(1, c[1]), 5) for c in counts]}


def chance(runs, samples):
    """Perplexities of runs that differ by nothing that matters: the default, and the draws."""
    return [run["perplexity"][samples] for run in runs if run["name"] == "default" or run["name"].startswith("damping")]


def summary(result):
    lines = []
    for samples in result["before"]:
        values = chance(result["runs"], samples)
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        lines.append(f"{samples} sequences: before {result['before'][samples]:.4f}, after {statistics.mean(values):.4f}, standard deviation of {len(values)} runs {spread:.4f}")
        lines += [f"    {run['name']:20} {run['perplexity'][samples]:.4f}" for run in result["runs"]]
    return "\n".join(lines)


def compare(one, other):
    """What two devices' files say of each other."""
    lines = []
    for samples in one["before"].keys() & other["before"].keys():
        mine, theirs = chance(one["runs"], samples), chance(other["runs"], samples)
        means = statistics.mean(mine), statistics.mean(theirs)
        error = sum(statistics.variance(v) / len(v) if len(v) > 1 else 0.0 for v in (mine, theirs)) ** 0.5
        lines.append(f"{samples} sequences: {means[0]:.4f} against {means[1]:.4f}, {100 * (means[0] / means[1] - 1):+.2f} %, standard error of the difference {100 * error / means[1]:.2f} %")
    # Losses say where: chance moves them both ways and by little, an error moves a tap's loss in every run.
    mean = [{key: statistics.mean(run["loss"][key] for run in file["runs"]) for key in file["runs"][0]["loss"]} for file in (one, other)]
    worst = sorted(mean[0].keys() & mean[1].keys(), key=lambda key: -abs(mean[0][key] / mean[1][key] - 1))[:8]
    lines += [f"    loss of layer {key}: {mean[0][key]:.5g} against {mean[1][key]:.5g} ({100 * (mean[0][key] / mean[1][key] - 1):+.2f} %)" for key in worst]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shardq", type=pathlib.Path, default=HOME / "build/cpu/shardq")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--files", type=pathlib.Path, default=HOME / "out/smollm2", help="folder with model, calibration.npy, heldout.npy")
    parser.add_argument("--recipe", type=pathlib.Path, default=HOME / "configs/smollm2.yaml")
    parser.add_argument("--samples", type=lambda text: [int(n) for n in text.split(",")], default=[16, 51], help="held-out sequences, e.g. 16,51")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/shardq-quality"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--only", help="names, with commas")
    parser.add_argument("--limit-seconds", type=float, default=1e9, help="begins no run after that")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--compare", type=pathlib.Path, help="only compares --out with this file")
    options = parser.parse_args()
    if options.compare:
        print(compare(*(json.loads(path.read_text()) for path in (options.out, options.compare))))
        return
    end_ranks_at_sigterm()
    variants = {**VARIANTS, **(CUDA if options.device == "cuda" else {})}
    names = options.only.split(",") if options.only else list(variants)
    if unknown := [name for name in names if name not in variants]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(variants)}")
    options.work.mkdir(parents=True, exist_ok=True)
    begin = datetime.datetime.now()
    _, version, _ = run_in_time([options.shardq, "version"])
    result = {
        "date": begin.date().isoformat(),
        "command": "bench/quality.py " + " ".join(sys.argv[1:]),
        "machine": (gpu_names() if options.device == "cuda" else []) or processor_name(),
        "version": version.splitlines()[0],
        "before": {str(samples): evaluate(options, options.files / "model", samples) for samples in options.samples},
        "runs": [],
    }
    first = None
    for name in names:
        if (datetime.datetime.now() - begin).total_seconds() > options.limit_seconds:
            print(f"not run: {name} (out of time)")
            continue
        folder, run = run_variant(options, name, *variants[name])
        if first is None:
            first = folder
        else:
            run["differing codes"] = differing_share(first, folder)
            shutil.rmtree(folder)
        result["runs"].append(run)
        print(f"{name:20} {run['perplexity']}", flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")  # what there is counts
    print(summary(result))


if __name__ == "__main__":
    main()
