#!/usr/bin/env python3
"""Hessian time against solve time, speed-up, efficiency and exposed communication, over ranks, calibration sizes and communication plans.

    python3 bench/scaling_study.py --shardq build/cuda/shardq --device cuda --models qwen3-30b-a3b:4,llama-3-8b:4 --ranks 1,2 --output DIR
    python3 bench/scaling_study.py --recipe configs/mini-moe.yaml --ranks 1,2 --samples 16,64,256 --output DIR          # on the CPU
    python3 bench/scaling_study.py --from-csv DIR/runs.csv --output DIR                                                 # draw again

Models are generated (make_model.py, SHAPE:LAYERS) and deleted again, or come with a recipe. Each point is one `shardq quantize` under a launcher, with no
resume, into a scratch folder; phase times come from the run's report.json. With --repeats above 1 the run with the median time counts.

Writes runs.csv and phases.json (every phase of every rank) after every run, and a figure a model (PNG, SVG) at the end. A study that was cut off goes on
with the same command: runs that are in runs.csv already are not made again. --limit-seconds ends it in time. A plan that the program does not know is
skipped with a line; a run that fails is shown, the others go on, and the exit code is 1.
"""

import argparse
import csv
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time

from launch import OutOfTime, end_ranks_at_sigterm, environment, gpu_names, processor_name, run_in_time
from model_shapes import SHAPES

HERE = pathlib.Path(__file__).resolve().parent
PLANS = ("reduce_scatter", "all_reduce", "all_to_all")
TOKENS = [2048, 8192, 32768, 131072, 524288, 1048576]
USAGE = 2  # the program's exit code for a recipe that it does not understand

# What a phase is part of, by its name in report.json. Anything else counts as "other", and is still in phases.json.
FAMILIES = {
    "hessian": ["hessian"],
    "solve": ["factor", "scales", "loop", "update", "solve", "other"],
    "forward": ["forward", "embed", "replay"],
    "communication": ["reduce", "exchange", "gather"],
    "waiting": ["wait"],  # for the slowest rank
    "files": ["read", "write", "checkpoint"],
}
FAMILY_ORDER = [*FAMILIES, "other"]
KEY = ["model", "plan", "ranks", "samples", "length"]
COLUMNS = [*KEY, "tokens", "seconds", "busy", *FAMILY_ORDER, "peak_memory_bytes"]
TEXT = ("model", "plan")


def seconds_left(arguments):
    """Until the limit; None without one."""
    if arguments.deadline is None:
        return None
    if time.monotonic() > arguments.deadline:
        raise OutOfTime
    return arguments.deadline - time.monotonic()


def family_of(phase):
    for family, names in FAMILIES.items():
        if any(phase == name or phase.startswith((name + "_", name + ".", name + "/")) for name in names):
            return family
    return "other"


def families(phases):
    """Seconds by family."""
    sums = dict.fromkeys(FAMILY_ORDER, 0.0)
    for phase, seconds in phases.items():
        sums[family_of(phase)] += seconds
    return sums


# ---- one run -----------------------------------------------------------------------------------------


def launch_command(arguments, point, scratch):
    """A rank alone is started without a launcher."""
    command = [part.replace("{ranks}", str(point["ranks"])) for part in arguments.launcher.split()] if point["ranks"] > 1 else []
    command += [str(arguments.shardq), "quantize", *([str(arguments.recipe)] if arguments.recipe else []), "--resume", "never"]
    command += ["--output", str(scratch / "model"), "--work", str(scratch / "work"), "--device", arguments.device]
    for flag in ("model", "tokens", "scheme"):
        value = point.get(f"{flag}_path") or getattr(arguments, flag)
        if value:
            command += [f"--{flag}", str(value)]
    settings = list(arguments.set)
    for key, value in (("max_samples", point["samples"]), ("max_length", point["length"])):
        settings += [f"calibration.{key}={value}"] if value else []
    if point["plan"] != "-":
        settings.append(f"parallel.reduce={point['plan']}")
    for setting in settings:
        command += ["--set", setting]
    return command


def run_once(arguments, point):
    """(exit code, output, report) of one run."""
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="scaling-", dir=arguments.scratch))
    try:
        command = launch_command(arguments, point, scratch)
        code, output, _ = run_in_time(command, environment(point["ranks"], arguments.threads), seconds_left(arguments))
        return code, output, json.loads((scratch / "work" / "report.json").read_text()) if code == 0 else None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def row_of(point, report):
    row = {key: point[key] for key in KEY}
    row.update(families(report["phases"]))
    row.update(tokens=report["tokens"], seconds=report["seconds"], peak_memory_bytes=report["peak_memory_bytes"])
    row["busy"] = sum(row[family] for family in FAMILY_ORDER if family != "files")
    return row


# ---- the study ---------------------------------------------------------------------------------------


class Study:
    """Rows so far, kept in files after every run."""

    def __init__(self, arguments):
        self.arguments, self.folder = arguments, arguments.output
        self.rows = read_rows(self.folder / "runs.csv") if (self.folder / "runs.csv").exists() else []
        detail = self.folder / "phases.json"
        self.detail = json.loads(detail.read_text())["runs"] if detail.exists() else []
        self.unknown_plans, self.failed = set(), 0

    def has(self, point):
        return any(all(row[key] == point[key] for key in KEY) for row in self.rows)

    def add(self, point, report):
        row = row_of(point, report)
        self.rows.append(row)
        self.detail.append({**row, "phases": report["phases"], "phases_by_rank": report["phases_by_rank"], "verdicts": report["verdicts"]})
        write_rows(self.rows, self.folder / "runs.csv")
        arguments = self.arguments
        about = {"machine": machine_name(arguments.device), "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d"), "device": arguments.device,
                 "command": " ".join(sys.argv), "threads": arguments.threads, "set": arguments.set}  # fmt: skip
        replace_text(self.folder / "phases.json", json.dumps({**about, "runs": self.detail}, indent=1) + "\n")
        shown = "  ".join(f"{name} {row[name]:.2f}" for name in FAMILY_ORDER)
        print(f"{name_of(point)}, {row['tokens']} tokens: {row['seconds']:.2f} s   {shown}", flush=True)

    def measure(self, point):
        if point["plan"] in self.unknown_plans or self.has(point):
            return
        runs = []
        for _ in range(self.arguments.repeats):
            code, output, report = run_once(self.arguments, point)
            if code == USAGE and point["plan"] != "-" and "parallel.reduce" in output:
                self.unknown_plans.add(point["plan"])
                print(f"{point['plan']}: this program does not know the plan, skipped", flush=True)
                return
            if code != 0:
                self.failed += 1
                print(f"{name_of(point)}: FAILED with exit code {code}\n{output[-3000:]}", flush=True)
                return
            runs.append(report)
        runs.sort(key=lambda report: sum(seconds for name, seconds in families(report["phases"]).items() if name != "files"))
        self.add(point, runs[len(runs) // 2])


def name_of(point):
    size = f"{point['samples'] or 'all'} samples" + (f" of {point['length']}" if point["length"] else "")
    return f"{point['model']}, {point['ranks']} rank{'s' * (point['ranks'] > 1)} {point['plan']}, {size}"


def points_of(arguments, model, sizes, plans):
    """Largest sizes first: what matters most comes before a limit."""
    for samples, length in sorted(sizes, key=lambda size: -size[0] * max(size[1], 1)):
        for ranks in arguments.ranks:
            for plan in plans if ranks > 1 else ("-",):
                yield {"model": model, "plan": plan, "ranks": ranks, "samples": samples, "length": length}


def sizes_of(tokens, ranks):
    """(samples, length) for a number of tokens: sequences of 2048, shorter where every rank would not get one of eight."""
    length = 2048
    while length > 1 and tokens // length < max(8, ranks):
        length //= 2
    return tokens // length, length


def run_models(study, arguments):
    for name in arguments.models:
        shape, _, layers = name.partition(":")
        plans = arguments.plans if {"num_experts", "num_local_experts"} & SHAPES[shape].keys() else arguments.plans[:1]  # dense: all plans are one
        sizes = [sizes_of(tokens, max(arguments.ranks)) for tokens in arguments.tokens_list]
        points = [point for point in points_of(arguments, name, sizes, plans) if not study.has(point)]
        if not points:
            continue
        folder = pathlib.Path(tempfile.mkdtemp(prefix="scaling-model-", dir=arguments.scratch))
        try:
            model, ids = folder / "model", folder / "ids.npy"
            samples, length = max(samples for samples, _ in sizes), max(length for _, length in sizes)
            command = [sys.executable, HERE / "make_model.py", model, "--shape", shape, "--layers", layers or "0", "--scale", arguments.scale]
            command += ["--tokens-out", ids, "--samples", str(samples), "--length", str(length)]
            code, output, _ = run_in_time(command, None, seconds_left(arguments))
            if code != 0:
                sys.exit(f"scaling_study.py: make_model.py ended with {code}\n{output[-2000:]}")
            print(output.strip().splitlines()[0].replace(str(model), name), flush=True)
            for point in points:
                study.measure({**point, "model_path": model, "tokens_path": ids, "scheme_path": arguments.scheme or "W4A16"})
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def measure(study, arguments):
    """False where time ran out."""
    try:
        if arguments.models:
            run_models(study, arguments)
        else:
            for point in points_of(arguments, arguments.recipe.stem, [(samples, 0) for samples in arguments.samples], arguments.plans):
                study.measure(point)
    except OutOfTime:
        print(f"stopped after {arguments.limit_seconds} s; the same command goes on", flush=True)
        return False
    return True


# ---- tables ------------------------------------------------------------------------------------------


def efficiency(rows):
    """(ranks, tokens, plan) -> speed-up of everything but files over the fewest ranks measured at that size, and efficiency."""
    result = {}
    for tokens in sorted({row["tokens"] for row in rows}):
        same = sorted((row for row in rows if row["tokens"] == tokens), key=lambda row: row["ranks"])
        base = same[0]
        for row in same:
            speedup = base["busy"] / max(row["busy"], 1e-9)
            result[row["ranks"], tokens, row["plan"]] = (speedup, speedup * base["ranks"] / row["ranks"])
    return result


def summary(rows):
    """Lines of speed-up and exposed communication, in Markdown."""
    lines = ["| model | tokens | ranks | plan | busy, s | Hessian | solve | communication | of busy | speed-up |", "|" + "---|" * 10]
    for model in dict.fromkeys(row["model"] for row in rows):
        same = [row for row in rows if row["model"] == model]
        table = efficiency(same)
        for row in sorted(same, key=lambda row: (row["tokens"], row["ranks"])):
            speedup = table[row["ranks"], row["tokens"], row["plan"]][0]
            lines.append(
                f"| {model} | {row['tokens']:,} | {row['ranks']} | {row['plan']} | {row['busy']:.2f} | {row['hessian']:.2f} | {row['solve']:.2f} | "
                f"{row['communication']:.2f} | {100 * row['communication'] / max(row['busy'], 1e-9):.1f} % | {speedup:.2f} |"
            )
    return "\n".join(lines)


def read_rows(path):
    kinds = {**dict.fromkeys(TEXT, str), **dict.fromkeys(("ranks", "samples", "length", "tokens", "peak_memory_bytes"), int)}
    with open(path, newline="") as file:
        return [{name: kinds.get(name, float)(row.get(name) or 0) for name in COLUMNS} for row in csv.DictReader(file)]


def replace_text(path, text):
    """A reader, or a kill, never meets half a file."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text)
    partial.replace(path)


def write_rows(rows, path):
    partial = path.with_suffix(".csv.partial")
    with open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({name: round(row[name], 5) if isinstance(row[name], float) else row[name] for name in COLUMNS} for row in rows)
    partial.replace(path)


def draw(rows, title, output):
    try:
        import matplotlib  # noqa: F401
        from scaling_figures import draw_study
    except ImportError as error:
        print(f"no figures: {error}; --from-csv draws them later")
        return
    models = list(dict.fromkeys(row["model"] for row in rows))
    for model in models:
        same = [row for row in rows if row["model"] == model]
        name = "scaling" if len(models) == 1 else "scaling-" + model.replace(":", "-")
        draw_study(same, FAMILY_ORDER, efficiency(same), f"shardq, {model.replace(':', ', layers: ')}{title}", output, name)


def machine_name(device):
    """The GPUs' name, or the processor's."""
    names = gpu_names() if device == "cuda" else []
    return f"{len(names)} x {names[0].partition(',')[0]}" if names else processor_name()


def integers(text):
    return [int(part) for part in text.split(",")]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=pathlib.Path, help="folder for the tables and figures")
    parser.add_argument("--models", type=lambda text: text.split(","), metavar="SHAPE:LAYERS,...", help="generated models; LAYERS 0: all")
    parser.add_argument("--scale", default="full", choices=["full", "tiny"], help="tiny: the same models for a rehearsal")
    parser.add_argument("--recipe", type=pathlib.Path, help="instead of generated models")
    parser.add_argument("--shardq", type=pathlib.Path, default=pathlib.Path("build/cpu/shardq"), help="the program (default build/cpu/shardq)")
    parser.add_argument("--launcher", default="mpirun --oversubscribe --bind-to none -n {ranks}", help="{ranks} is replaced; e.g. 'srun --mpi=pmix -n {ranks}'")
    parser.add_argument("--ranks", "--gpus", type=integers, default=[1, 2], metavar="N,N,...")
    parser.add_argument("--plans", type=lambda text: text.split(","), default=list(PLANS), metavar="PLAN,...", help="of parallel.reduce, for several ranks")
    parser.add_argument("--tokens-list", type=integers, default=TOKENS, metavar="N,N,...", help="calibration tokens for generated models")
    parser.add_argument("--samples", type=integers, default=[0], metavar="N,N,...", help="calibration sequences with a recipe; 0: what it says")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model")
    parser.add_argument("--tokens")
    parser.add_argument("--scheme")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--threads", type=int, default=0, help="OMP_NUM_THREADS of a rank; keep it equal over ranks for a fair speed-up")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--limit-seconds", type=float, default=0, help="ends the study, a run in progress included; 0: none")
    parser.add_argument("--scratch", help="where models and runs are written (default: the system's temporary folder)")
    parser.add_argument("--title", default="")
    parser.add_argument("--from-csv", type=pathlib.Path, help="draw an earlier study again")
    arguments = parser.parse_args()
    if not arguments.from_csv and bool(arguments.recipe) == bool(arguments.models):
        parser.error("expected either --recipe or --models")
    for name in arguments.models or []:
        if name.partition(":")[0] not in SHAPES:
            parser.error(f"--models: expected one of {', '.join(SHAPES)}, found {name}")
    arguments.deadline = time.monotonic() + arguments.limit_seconds if arguments.limit_seconds else None
    return arguments


def main():
    arguments = parse_arguments()
    end_ranks_at_sigterm()
    arguments.output.mkdir(parents=True, exist_ok=True)
    failed = 0
    if arguments.from_csv:
        rows, title = read_rows(arguments.from_csv), arguments.title
    else:
        study = Study(arguments)
        complete = measure(study, arguments)
        rows, failed = study.rows, study.failed
        title = arguments.title or f" ({machine_name(arguments.device)}, {time.strftime('%Y-%m-%d')}{'' if complete else ', incomplete'})"
    if not rows:
        sys.exit("scaling_study.py: nothing was measured")
    print(summary(rows))
    draw(rows, title, arguments.output)
    print(f"{arguments.output}: " + ", ".join(sorted(path.name for path in arguments.output.iterdir())))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
