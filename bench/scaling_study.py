#!/usr/bin/env python3
"""Hessian time against solve time, speed-up and efficiency, over ranks and calibration sizes.

    python3 bench/scaling_study.py --recipe configs/mini-moe.yaml --ranks 1,2 --samples 16,64,256 --output bench/results/scaling_mini_moe
    python3 bench/scaling_study.py --recipe RECIPE --device cuda --ranks 1,2,4,8 --set parallel.reduce=reduce_scatter --output DIR
    python3 bench/scaling_study.py --from-csv DIR/runs.csv --output DIR            # draw again

Each point is one `shardq quantize` under a launcher, with no resume, into a scratch folder; phase times come from the run's report.json. With --repeats
above 1 the run with the median total counts. Writes runs.csv, phases.json (every phase of every run), scaling.png and scaling.svg to --output.
A run that fails stops the study, with its output shown.
"""

import argparse
import csv
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time

# What a phase is part of, by its name in report.json. Anything else counts as "other", and is still in phases.json.
FAMILIES = {
    "hessian": ["hessian"],
    "solve": ["factor", "scales", "loop", "update", "solve"],
    "forward": ["forward", "embed", "replay"],
    "communication": ["reduce", "gather", "agree"],
    "files": ["read", "write", "checkpoint"],
}
FAMILY_ORDER = [*FAMILIES, "other"]
COLUMNS = ["ranks", "samples", "tokens", "seconds", *FAMILY_ORDER]


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


def launch_command(arguments, ranks, samples, scratch):
    launcher = [part.replace("{ranks}", str(ranks)) for part in arguments.launcher.split()]
    command = [*launcher, str(arguments.shardq), "quantize", str(arguments.recipe), "--resume", "never"]
    command += ["--output", str(scratch / "model"), "--work", str(scratch / "work"), "--device", arguments.device]
    for flag in ("model", "tokens", "scheme"):
        if getattr(arguments, flag):
            command += [f"--{flag}", str(getattr(arguments, flag))]
    for setting in arguments.set + ([f"calibration.max_samples={samples}"] if samples else []):
        command += ["--set", setting]
    return command


def run_once(arguments, ranks, samples):
    """One point: the report and the wall time of the whole command."""
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="scaling-", dir=arguments.scratch))
    environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", NCCL_NVLS_ENABLE="0")
    if arguments.threads:
        environment["OMP_NUM_THREADS"] = str(arguments.threads)
    command = launch_command(arguments, ranks, samples, scratch)
    try:
        started = time.monotonic()
        result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wall = time.monotonic() - started
        if result.returncode != 0:
            sys.exit(f"scaling_study.py: exit code {result.returncode} from {' '.join(command)}\n{result.stdout[-4000:]}")
        report = json.loads((scratch / "work" / "report.json").read_text())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return report, wall


def measure(arguments):
    """One row for each (ranks, samples), and every phase of every run."""
    rows, detail = [], []
    for samples in arguments.samples:
        for ranks in arguments.ranks:
            runs = sorted((run_once(arguments, ranks, samples) for _ in range(arguments.repeats)), key=lambda run: total_seconds(*run))
            report, wall = runs[len(runs) // 2]
            row = {"ranks": ranks, "samples": samples or report.get("samples", 0), "tokens": report["tokens"]}
            row["seconds"] = total_seconds(report, wall)
            row.update(families(report["phases"]))
            rows.append(row)
            detail.append({**row, "wall_seconds": wall, "phases": report["phases"]})
            shown = "  ".join(f"{name} {row[name]:.2f}" for name in FAMILY_ORDER)
            print(f"{ranks} ranks, {row['tokens']} tokens: {row['seconds']:.2f} s   {shown}", flush=True)
    return rows, detail


def total_seconds(report, wall):
    return float(report.get("seconds", wall))


def compute_seconds(row):
    """What more ranks should divide: everything but waiting for files."""
    return row["seconds"] - row["files"]


def efficiency(rows):
    """(ranks, tokens) -> speed-up of the compute phases over the fewest ranks measured at that size, and efficiency."""
    result = {}
    for tokens in sorted({row["tokens"] for row in rows}):
        same = sorted((row for row in rows if row["tokens"] == tokens), key=lambda row: row["ranks"])
        base = same[0]
        for row in same:
            speedup = compute_seconds(base) / max(compute_seconds(row), 1e-9)
            result[row["ranks"], tokens] = (speedup, speedup * base["ranks"] / row["ranks"])
    return result


def crossing(points):
    """Tokens at which the Hessian's time passes the solve's, by interpolation in the logarithm; None if it never does.
    points: (tokens, hessian, solve), ascending in tokens."""
    import math

    for (t0, h0, s0), (t1, h1, s1) in zip(points, points[1:]):
        if min(h0, s0, h1, s1) <= 0:
            continue
        before, after = math.log(h0 / s0), math.log(h1 / s1)
        if before < 0 <= after:
            return t0 * (t1 / t0) ** (-before / (after - before))
    return None


def draw(rows, title, output):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ranks_list = sorted({row["ranks"] for row in rows})
    tokens_list = sorted({row["tokens"] for row in rows})
    colours = plt.cm.viridis([i / max(len(ranks_list), 1) for i in range(len(ranks_list))])
    figure, axes = plt.subplots(2, 2, figsize=(12, 9), constrained_layout=True)
    figure.suptitle(title)
    times, stack, speed, share = axes.flat

    for ranks, colour in zip(ranks_list, colours):
        points = sorted((r["tokens"], r["hessian"], r["solve"]) for r in rows if r["ranks"] == ranks)
        tokens, hessian, solve = zip(*points)
        times.plot(tokens, hessian, "o-", color=colour, label=f"Hessian, {ranks} rank{'s' * (ranks > 1)}")
        times.plot(tokens, solve, "s--", color=colour, label=f"solve, {ranks} rank{'s' * (ranks > 1)}")
        cross = crossing(points)
        if cross:
            times.axvline(cross, color=colour, linewidth=0.8, linestyle=":")
            times.annotate(f"{cross:,.0f}", (cross, max(hessian)), color=colour, fontsize=8, rotation=90, va="top", ha="right")
    times.set(xscale="log", yscale="log", xlabel="calibration tokens", ylabel="seconds", title="Hessian against solve")
    times.legend(fontsize=8)

    labels = [f"{row['ranks']} x {row['tokens']:,}" for row in rows]
    bottom = [0.0] * len(rows)
    for family in FAMILY_ORDER:
        values = [row[family] for row in rows]
        stack.barh(labels, values, left=bottom, label=family)
        bottom = [b + v for b, v in zip(bottom, values)]
    stack.set(xlabel="seconds (rank 0)", title="Phases (ranks x tokens)")
    stack.invert_yaxis()
    stack.legend(fontsize=8)

    table = efficiency(rows)
    for tokens in tokens_list:
        ranks = [r for r in ranks_list if (r, tokens) in table]
        speed.plot(ranks, [table[r, tokens][0] for r in ranks], "o-", label=f"{tokens:,} tokens")
        share.plot(ranks, [100 * table[r, tokens][1] for r in ranks], "o-", label=f"{tokens:,} tokens")
    speed.plot(ranks_list, [r / ranks_list[0] for r in ranks_list], "k:", label="linear")
    speed.set(xlabel="ranks", ylabel="speed-up", title="Compute phases: speed-up", xticks=ranks_list)
    share.axhline(100, color="k", linestyle=":")
    share.set(xlabel="ranks", ylabel="per cent", title="Compute phases: efficiency", xticks=ranks_list, ylim=(0, 110))
    speed.legend(fontsize=8)
    share.legend(fontsize=8)
    for kind in ("png", "svg"):
        figure.savefig(output / f"scaling.{kind}", dpi=120)
    plt.close(figure)


def read_rows(path):
    with open(path, newline="") as file:
        return [{name: (int if name in ("ranks", "samples", "tokens") else float)(row[name]) for name in COLUMNS} for row in csv.DictReader(file)]


def write_rows(rows, path):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({name: round(row[name], 4) if isinstance(row[name], float) else row[name] for name in COLUMNS} for row in rows)


def machine_name(device):
    """The GPU's name, or the processor's."""
    if device == "cuda":
        names = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True).stdout.split("\n")
        return f"{len([name for name in names if name])} x {names[0]}"
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def integers(text):
    return [int(part) for part in text.split(",")]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=pathlib.Path, help="folder for the tables and figures")
    parser.add_argument("--recipe", type=pathlib.Path)
    parser.add_argument("--shardq", type=pathlib.Path, default=pathlib.Path("build/cpu/shardq"), help="the program (default build/cpu/shardq)")
    parser.add_argument("--launcher", default="mpirun --oversubscribe --bind-to none -n {ranks}", help="{ranks} is replaced; e.g. 'srun --mpi=pmix -n {ranks}'")
    parser.add_argument("--ranks", type=integers, default=[1, 2], metavar="N,N,...")
    parser.add_argument("--samples", type=integers, default=[0], metavar="N,N,...", help="calibration sequences; 0: what the recipe says")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model")
    parser.add_argument("--tokens")
    parser.add_argument("--scheme")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--threads", type=int, default=0, help="OMP_NUM_THREADS of a rank; keep it equal over ranks for a fair speed-up")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--scratch", help="where runs write (default: the system's temporary folder)")
    parser.add_argument("--title", default="")
    parser.add_argument("--from-csv", type=pathlib.Path, help="draw an earlier study again")
    arguments = parser.parse_args()
    if not arguments.from_csv and not arguments.recipe:
        parser.error("--recipe is needed")
    return arguments


def main():
    arguments = parse_arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.from_csv:
        rows = read_rows(arguments.from_csv)
    else:
        rows, detail = measure(arguments)
        write_rows(rows, arguments.output / "runs.csv")
        machine = {"machine": machine_name(arguments.device), "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}
        description = {**machine, "device": arguments.device, "recipe": str(arguments.recipe), "threads": arguments.threads, "set": arguments.set}
        (arguments.output / "phases.json").write_text(json.dumps({**description, "runs": detail}, indent=1) + "\n")
    draw(rows, arguments.title or f"shardq: {(arguments.recipe or arguments.from_csv).stem}", arguments.output)
    print(f"{arguments.output}: " + ", ".join(sorted(path.name for path in arguments.output.iterdir())))


if __name__ == "__main__":
    main()
