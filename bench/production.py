#!/usr/bin/env python3
"""Production runs: quantizes models of production shape (bench/make_model.py) on production calibration sizes and keeps what was measured.

    production.py --shardq build/cuda/shardq --out bench/results/NAME.json [--work /tmp/production] [--ranks 1,2] [--plans reduce_scatter,all_to_all] \\
        qwen3-30b-a3b:20:512x2048 llama-3-8b:0:512x2048 ...

Each job is SHAPE:LAYERS:SAMPLESxLENGTH (LAYERS 0: all). A job gives wall time, phase seconds of every rank, peak memory, verdicts and, per layer, compute
seconds: everything but reading weights, writing shards and stages. Rates count forward FLOPs of linears and attention, and Hessians as 2 T n^2.

With several numbers of ranks, each run is compared with the job's first one: speed-up of the compute phases, modules whose verdict differs, and the share of
codes that differ in --compare-layers layers. Plans (parallel.reduce) are tried on several ranks and on models with experts; one that the program does not
know is left out with a line. --limit-seconds ends the last run in time. Outputs are deleted between runs.
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

from launch import STORAGE, OutOfTime, end_ranks_at_sigterm, environment, gpu_names, launcher, run_in_time
from model_shapes import SHAPES

HERE = pathlib.Path(__file__).resolve().parent
COMMUNICATION = ("reduce", "exchange", "gather")
WAITING = ("wait",)  # for the slowest rank
USAGE = 2  # the program's exit code for a recipe that it does not understand


def machine():
    return {"cpus": os.cpu_count(), "system": platform.platform(), "gpus": gpu_names()}


def prepare(job, options):
    """(model directory, token file) of a job, made where they are not there. Disks hold one such model, so others are deleted."""
    shape, layers, size = job.split(":")
    samples, length = size.split("x")
    model, ids = options.work / f"{shape}-{layers}", options.work / f"ids-{shape}-{size}.npy"
    make = [sys.executable, HERE / "make_model.py", "--shape", shape, "--scale", options.scale]
    if not model.exists():
        for other in options.work.glob("*-*"):
            if other.is_dir():
                shutil.rmtree(other)
        # Under another name until it is whole: a run that is cut off here must not leave half a model.
        partial = options.work / "model.partial"
        shutil.rmtree(partial, ignore_errors=True)
        code, output, _ = run_in_time([*make, partial, "--layers", layers], None, options.left())
        if code != 0:
            sys.exit(f"{job}: make_model.py ended with {code}\n{output[-2000:]}")
        partial.rename(model)
        print(output.strip().replace("model.partial", model.name), flush=True)
    if not ids.exists():
        subprocess.run([*make, "--tokens-out", ids, "--samples", samples, "--length", length], check=True)
    return model, ids


def clear(work, *names):
    for name in names:
        for folder in (work / name, work / f"{name}.work", work / f"{name}.partial"):
            shutil.rmtree(folder, ignore_errors=True)


def seconds_of(names, phases):
    return sum(seconds for phase, seconds in phases.items() if phase in names)


def run(job, ranks, plan, options):
    """What one run gave, or None where the program does not know the plan. Its output stays in work/out."""
    model, ids = prepare(job, options)
    output, state = options.work / "out", options.work / "out.work"
    clear(options.work, "out")
    settings = [*options.set, *([f"parallel.reduce={plan}"] if plan else [])]
    arguments = ["--model", model, "--tokens", ids, "--output", output, "--work", state, "--device", options.device, "--scheme", options.scheme]
    arguments += [part for setting in settings for part in ("--set", setting)]
    plan_command = [options.shardq, "plan", "--json", "--ranks", ranks, *arguments]
    planned = subprocess.run(list(map(str, plan_command)), capture_output=True, text=True, env=environment(1, options.threads))
    command = [*launcher(ranks), options.shardq, "quantize", *arguments]
    code, text, wall = run_in_time(command, environment(ranks, options.threads), options.left())
    if code == USAGE and plan and "parallel.reduce" in text:
        print(f"{job}: this program does not know the plan {plan}, left out", flush=True)
        return None
    if code != 0:
        raise RuntimeError(f"{job} on {ranks}{f', {plan}' if plan else ''}: exit code {code}\n{text[-3000:]}")
    report = json.loads((state / "report.json").read_text())
    predicted = json.loads(planned.stdout) if planned.returncode == 0 else {}
    count = len({module["layer"] for module in report["modules"]})
    phases = report["phases"]
    compute = sum(seconds for phase, seconds in phases.items() if phase not in STORAGE)
    flops = {key: sum(kind["count"] * kind[key] for kind in predicted.get("layers", [])) for key in ("forward_flops", "hessian_flops", "solve_flops")}
    result = {
        "job": job, "ranks": ranks, "plan": plan or "-", "scheme": options.scheme, "settings": settings, "layers": count, "tokens": report["tokens"],
        "wall_seconds": wall, "compute_seconds": compute, "compute_seconds_a_layer": compute / count,
        "communication_share": seconds_of(COMMUNICATION, phases) / max(compute, 1e-9), "waiting_share": seconds_of(WAITING, phases) / max(compute, 1e-9), "phases": phases,
        "phases_by_rank": report["phases_by_rank"], "peak_memory_bytes": report["peak_memory_bytes"],
        "planned_peak_bytes": predicted.get("memory_per_rank", {}).get("peak_bytes"), "verdicts": report["verdicts"],
        "input_bytes": report["input_bytes"], "output_bytes": report["output_bytes"], "flops": flops,
        "forward_tflops": flops["forward_flops"] / max(phases.get("forward", 0), 1e-9) / 1e12 / ranks,
        "hessian_tflops": flops["hessian_flops"] / max(phases.get("hessian", 0), 1e-9) / 1e12 / ranks,
    }  # fmt: skip
    print(f"{job} on {ranks} {plan or ''}: wall {wall:.1f} s, compute {compute:.2f} s ({compute / count:.3f} s a layer, {count} layers), "
          f"communication {100 * result['communication_share']:.1f} %, waiting {100 * result['waiting_share']:.1f} %, "
          f"forward {result['forward_tflops']:.0f}, Hessian {result['hessian_tflops']:.0f} TFLOP/s a rank, peak {report['peak_memory_bytes'] / 1e9:.1f} GB "
          f"(plan {(result['planned_peak_bytes'] or 0) / 1e9:.1f})", {k: round(v, 2) for k, v in phases.items()}, report["verdicts"], flush=True)  # fmt: skip
    return result


def keep_base(work, layers):
    """Keeps the finished run's report and some of its shards to compare others with."""
    from compare_codes import keep_some

    clear(work, "base")
    (work / "out").rename(work / "base")
    (work / "base.work").mkdir()
    (work / "out.work/report.json").rename(work / "base.work/report.json")
    keep_some(work / "base", layers)


def compare(work, base, result):
    """Speed-up over the base, and what came out differently."""
    from compare_codes import differing_codes, loss_difference, verdicts_that_differ

    shards = differing_codes(work / "base", work / "out")
    reports = [json.loads((work / f"{name}.work/report.json").read_text()) for name in ("base", "out")]
    codes, differing = (sum(shard[i] for shard in shards) for i in (1, 2))
    busy = lambda run: run["compute_seconds"] - seconds_of(COMMUNICATION + WAITING, run["phases"])  # noqa: E731
    result["against"] = {
        "ranks": base["ranks"], "plan": base["plan"], "speedup_compute": busy(base) / busy(result),
        "speedup_with_communication": base["compute_seconds"] / result["compute_seconds"], "speedup_wall": base["wall_seconds"] / result["wall_seconds"],
        "verdicts_that_differ": verdicts_that_differ(*reports),
        "codes": codes, "codes_that_differ": differing, "share": differing / max(codes, 1), "shares_by_shard": {name: d / c for name, c, d in shards},
        "loss_differs_by": loss_difference(*reports),
    }  # fmt: skip
    a = result["against"]
    print(
        f"   against {a['ranks']}: compute {a['speedup_compute']:.2f}x, with communication {a['speedup_with_communication']:.2f}x, "
        f"wall {a['speedup_wall']:.2f}x; {a['verdicts_that_differ']} verdicts differ, {100 * a['share']:.3f} % of {codes:,} codes ("
        + ", ".join(f"{100 * share:.3f}" for share in a["shares_by_shard"].values())
        + f" by shard), loss by {100 * a['loss_differs_by']:.4f} % at most",
        flush=True,
    )


def runs_of(job, options):
    """(ranks, plan) of a job, the base first."""
    config = SHAPES[job.split(":")[0]]
    experts = "num_experts" in config or "num_local_experts" in config
    for ranks in options.ranks:
        for plan in (options.plans if experts else options.plans[:1]) if ranks > 1 else [None]:
            yield ranks, plan


def run_job(job, options, results, save):
    base, several = None, len(list(runs_of(job, options))) > 1
    for ranks, plan in runs_of(job, options):
        result = run(job, ranks, plan, options)
        if result is None:
            continue
        results.append(result)
        if base:
            compare(options.work, base, result)
        save()
        if not base and several:
            base = result
            keep_base(options.work, options.compare_layers)
        clear(options.work, "out")
    clear(options.work, "base")


def table(results):
    """Markdown."""
    head = ("job", "GPUs", "plan", "wall, s", "compute, s", "communication", "waiting", "speed-up: compute", "with communication", "wall", "codes that differ")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for run in results:
        share, waiting, a = run.get("communication_share", 0.0), run.get("waiting_share", 0.0), run.get("against")
        speedups = [f"{a[f'speedup_{kind}']:.2f}" for kind in ("compute", "with_communication", "wall")] if a else ["-"] * 3
        codes = f"{100 * a['share']:.3f} %, {a['verdicts_that_differ']} verdicts" if a else "-"
        compute = run["compute_seconds"] * (1 - share - waiting)
        cells = [run["job"], run["ranks"], run.get("plan", "-"), f"{run['wall_seconds']:.1f}", f"{compute:.2f}", f"{100 * share:.1f} %", f"{100 * waiting:.1f} %", *speedups, codes]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+")
    parser.add_argument("--shardq", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/production"))
    parser.add_argument("--ranks", "--gpus", type=lambda text: [int(part) for part in text.split(",")], default=[1], metavar="N,N,...")
    parser.add_argument("--plans", type=lambda text: text.split(","), default=["reduce_scatter"], metavar="PLAN,...", help="parallel.reduce on several ranks")
    parser.add_argument("--compare-layers", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scheme", default="W4A16")
    parser.add_argument("--scale", default="full", choices=["full", "tiny"], help="tiny: for a rehearsal")
    parser.add_argument("--threads", type=int, default=0, help="OMP_NUM_THREADS of a rank")
    parser.add_argument("--limit-seconds", type=float, default=0)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    end_ranks_at_sigterm()
    begin = time.monotonic()
    options.left = lambda: options.limit_seconds - (time.monotonic() - begin) if options.limit_seconds else None
    options.work.mkdir(parents=True, exist_ok=True)
    results = json.loads(options.out.read_text())["runs"] if options.out.exists() else []

    def save():
        # Written after every run: machines die, and what is written counts.
        about = {"date": datetime.date.today().isoformat(), "command": " ".join(sys.argv), "machine": machine()}
        options.out.write_text(json.dumps({**about, "runs": results}, indent=1) + "\n")

    failed = 0
    try:
        for job in options.jobs:
            try:
                run_job(job, options, results, save)
            except RuntimeError as error:
                failed += 1
                print(f"FAILED: {error}", flush=True)
    except OutOfTime as error:
        print(f"out of time: {error}", flush=True)
        failed += 1
    finally:
        clear(options.work, "out", "base")
    print(table(results))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
