#!/usr/bin/env python3
"""Production runs: quantizes models of production shape (bench/make_model.py) on production calibration sizes and keeps what was measured.

    production.py --shardq build/cuda/shardq --out bench/results/NAME.json [--work /tmp/production] [--ranks 1] \\
        qwen3-30b-a3b:20:512x2048 llama-3-8b:0:512x2048 ...

Each job is SHAPE:LAYERS:SAMPLESxLENGTH (LAYERS 0: all). A job gives wall time, phase seconds of rank 0, peak memory, verdicts and, per layer, compute
seconds: everything but reading weights, writing shards and stages. Rates count forward FLOPs of linears and attention, and Hessians as 2 T n^2.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time

STORAGE = ("read", "write", "checkpoint")
HERE = pathlib.Path(__file__).resolve().parent


def machine():
    try:
        gpus = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True)
        names = gpus.stdout.strip().splitlines() if gpus.returncode == 0 else []
    except FileNotFoundError:
        names = []
    return {"cpus": os.cpu_count(), "system": platform.platform(), "gpus": names}


def launcher(ranks):
    if ranks == 1:
        return []
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]


def run(job, options):
    shape, layers, size = job.split(":")
    samples, length = (int(part) for part in size.split("x"))
    work = options.work
    model, ids = work / f"{shape}-{layers}", work / f"ids-{shape}-{size}.npy"
    if not model.exists():
        for other in work.glob("*-*"):
            if other.is_dir():
                shutil.rmtree(other)  # disks hold one such model
        subprocess.run([sys.executable, HERE / "make_model.py", model, "--shape", shape, "--layers", layers], check=True)
    if not ids.exists():
        subprocess.run([sys.executable, HERE / "make_model.py", "--tokens-out", ids, "--shape", shape, "--samples", str(samples), "--length", str(length)], check=True)
    output, state = work / "out", work / "out.work"
    for folder in (output, state, work / "out.partial"):
        shutil.rmtree(folder, ignore_errors=True)
    command = [*launcher(options.ranks), options.shardq, "quantize", "--model", model, "--tokens", ids, "--output", output, "--work", state, "--device", options.device,
               "--scheme", options.scheme, *(part for setting in options.set for part in ("--set", setting))]  # fmt: skip
    plan = subprocess.run([options.shardq, "plan", "--json", "--ranks", str(options.ranks), *map(str, command[command.index("quantize") + 1 :])], capture_output=True, text=True)
    begin = time.time()
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    wall = time.time() - begin
    if done.returncode != 0:
        sys.exit(f"{job}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    report = json.loads((state / "report.json").read_text())
    predicted = json.loads(plan.stdout) if plan.returncode == 0 else {}
    count = len({module["layer"] for module in report["modules"]})
    compute = sum(seconds for phase, seconds in report["phases"].items() if phase not in STORAGE)
    flops = {key: sum(kind["count"] * kind[key] for kind in predicted.get("layers", [])) for key in ("forward_flops", "hessian_flops", "solve_flops")}
    result = {
        "job": job, "ranks": options.ranks, "scheme": options.scheme, "settings": options.set, "layers": count, "tokens": report["tokens"],
        "wall_seconds": wall, "compute_seconds": compute, "compute_seconds_a_layer": compute / count, "phases": report["phases"],
        "phases_by_rank": report["phases_by_rank"], "peak_memory_bytes": report["peak_memory_bytes"],
        "planned_peak_bytes": predicted.get("memory_per_rank", {}).get("peak_bytes"), "verdicts": report["verdicts"],
        "input_bytes": report["input_bytes"], "output_bytes": report["output_bytes"], "flops": flops,
        "forward_tflops": flops["forward_flops"] / report["phases"].get("forward", 1) / 1e12 / options.ranks,
        "hessian_tflops": flops["hessian_flops"] / report["phases"].get("hessian", 1) / 1e12 / options.ranks,
    }  # fmt: skip
    print(f"{job} on {options.ranks}: wall {wall:.1f} s, compute {compute:.2f} s ({compute / count:.3f} s a layer, {count} layers), "
          f"forward {result['forward_tflops']:.0f}, Hessian {result['hessian_tflops']:.0f} TFLOP/s, peak {report['peak_memory_bytes'] / 1e9:.1f} GB "
          f"(plan {(result['planned_peak_bytes'] or 0) / 1e9:.1f})", {k: round(v, 2) for k, v in report["phases"].items()}, report["verdicts"], flush=True)  # fmt: skip
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jobs", nargs="+")
    parser.add_argument("--shardq", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/production"))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scheme", default="W4A16")
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    results = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
    for job in options.jobs:
        results.append(run(job, options))
        # Written after every job: machines die, and what is written counts.
        options.out.write_text(json.dumps({"date": datetime.date.today().isoformat(), "command": " ".join(sys.argv), "machine": machine(), "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
