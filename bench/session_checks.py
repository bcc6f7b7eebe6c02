#!/usr/bin/env python3
"""Kills, stops and restarts jobs of several ranks, checks what a user would see, and prints one JSON object. bench/gpu_session.sh runs it.

    session_checks.py restart --shardq build/cuda/shardq --ranks 2 --work /tmp/checks [--model SHAPE:LAYERS] [--samples 64] [--device cuda]
    session_checks.py faults  ...

restart: a run of all ranks is the reference. A second one loses its last rank and goes on with one rank; a third one begins on one rank, dies and goes on
with all. With parallel.reproducible both must end with the reference's very codes. Without it sums come in another order, a code on a rounding boundary
flips, and every later code of its row is rounded from another value: verdicts must be equal, and the loss of every layer within 2 % (random weights; 1.4 % was the most in 48 layers).
faults: one job is hit again and again (SIGKILL and SIGSTOP, at a named point and from outside) and resumed each time. Each time all ranks must be gone in
time with the right exit code, and a stopped rank must be named.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from launch import OutOfTime, end_ranks_at_sigterm, environment, launcher, run_in_time

HERE = pathlib.Path(__file__).resolve().parent
STALLED = 87
LOSS = 0.02  # relative, of a layer, after a change of ranks
DEADLINE = 45  # seconds from a fault to the end of all ranks


def make_model(options):
    shape, _, layers = options.model.partition(":")
    model, ids = options.work / "model", options.work / "ids.npy"
    if not model.exists():
        command = [sys.executable, HERE / "make_model.py", model, "--shape", shape, "--layers", layers or "2", "--scale", options.scale]
        command += ["--tokens-out", ids, "--samples", options.samples, "--length", options.length]
        code, output, _ = run_in_time(command, None, 300)
        if code != 0:
            sys.exit(output)
    return model, ids


class Jobs:
    def __init__(self, options):
        self.options = options
        self.model, self.ids = make_model(options)

    def command(self, name, ranks, more=()):
        o = self.options
        command = [*launcher(ranks), o.shardq, "quantize", "--model", self.model, "--tokens", self.ids, "--output", o.work / name]
        command += ["--work", o.work / f"{name}.work", "--device", o.device, "--scheme", "W4A16"]
        # Hidden states are stored at every layer, so that a resume has something to go on from in a job of seconds.
        for setting in ["checkpoint.interval_seconds=0", *o.set, *more]:
            command += ["--set", setting]
        return list(map(str, command))

    def run(self, name, ranks, fault="", settings=()):
        """(exit code, output, seconds)"""
        more = {"SHARDQ_SESSION": str(os.getpid()), **({"SHARDQ_FAULT": fault} if fault else {})}
        return run_in_time(self.command(name, ranks, settings), environment(ranks, self.options.threads, **more), 240)

    def report(self, name):
        return json.loads((self.options.work / f"{name}.work/report.json").read_text())

    def differences(self, one, other):
        """modules whose verdict differs, share of codes that differ, relative difference of loss in the worst layer"""
        from compare_codes import differing_codes, loss_difference, verdicts_that_differ

        reports = [self.report(name) for name in (one, other)]
        shards = differing_codes(self.options.work / one, self.options.work / other)
        return {
            "verdicts_that_differ": verdicts_that_differ(*reports),
            "share_of_codes_that_differ": sum(shard[2] for shard in shards) / max(1, sum(shard[1] for shard in shards)),
            "loss_differs_by": loss_difference(*reports),
        }

    def forget(self, *names):
        for name in names:
            for suffix in ("", ".work", ".partial"):
                shutil.rmtree(self.options.work / f"{name}{suffix}", ignore_errors=True)


def restart(options):
    jobs, found, wrong = Jobs(options), {}, []
    most = options.ranks
    for mode in ("default", "reproducible"):
        settings = ["parallel.reproducible=true"] if mode == "reproducible" else []
        jobs.forget("whole", "again")
        code, output, seconds = jobs.run("whole", most, settings=settings)
        if code != 0:
            return {"ok": False, "wrong": [*wrong, f"{mode}: the reference run ended with {code}: {output[-1500:]}"]}
        found[mode] = {"whole_seconds": round(seconds, 1)}
        for first, then in ((most, 1), (1, most)):
            name = f"{first}_to_{then}"
            code, output, _ = jobs.run("again", first, f"kill@tap_solved#6,rank={first - 1}", settings)
            if code == 0:
                wrong.append(f"{mode} {name}: the fault did not fire")
            code, output, seconds = jobs.run("again", then, settings=settings)
            if code != 0:
                wrong.append(f"{mode} {name}: the resumed run ended with {code}: {output[-1500:]}")
                continue
            different, resumed = jobs.differences("whole", "again"), bool(jobs.report("again")["resumed"])
            found[mode][name] = {"seconds": round(seconds, 1), "resumed": resumed, **different}
            exact = mode == "reproducible" or options.device == "cpu"
            if not resumed or different["verdicts_that_differ"] or different["loss_differs_by"] > LOSS or (exact and different["share_of_codes_that_differ"] > 0):
                wrong.append(f"{mode} {name}: {found[mode][name]}")
            jobs.forget("again")
    jobs.forget("whole")
    return {"ok": not wrong, **found, "wrong": wrong}


def rank_process(rank, shardq):
    """Process id of a rank of our job, by the variables that launchers set."""
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if pathlib.Path(os.readlink(path / "exe")) != pathlib.Path(shardq).resolve():
                continue
            variables = dict(part.partition("=")[::2] for part in (path / "environ").read_text(errors="replace").split("\0"))
        except OSError:
            continue
        if variables.get("OMPI_COMM_WORLD_RANK", variables.get("PMI_RANK")) == str(rank) and variables.get("SHARDQ_SESSION") == str(os.getpid()):
            return int(path.name)
    return None


def hit_from_outside(jobs, number, rank):
    """Starts the job with slowed safe points, sends a signal to a rank in the middle: (exit code, output, seconds from the signal)."""
    options = jobs.options
    more = {"SHARDQ_FAULT": "sleep@safe_point#*=0.1", "SHARDQ_SESSION": str(os.getpid())}
    process = subprocess.Popen(jobs.command("faults", options.ranks), env=environment(options.ranks, options.threads, **more), text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
    begin, pid, stages = time.monotonic(), None, set((options.work / "faults.work").glob("stages/*"))
    # A new stage says that the ranks are at work; then a moment more, so that the signal meets them anywhere.
    while time.monotonic() - begin < 90 and process.poll() is None and not set((options.work / "faults.work").glob("stages/*")) - stages:
        time.sleep(0.05)
    time.sleep(0.3)
    pid = rank_process(rank, options.shardq)
    if pid is None:
        os.killpg(process.pid, signal.SIGTERM)
        return None, process.communicate()[0], 0.0
    os.kill(pid, number)
    begin = time.monotonic()
    try:
        output, _ = process.communicate(timeout=2 * DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGKILL)
    return process.returncode, output, time.monotonic() - begin


def faults(options):
    jobs, found, wrong, last = Jobs(options), {}, [], options.ranks - 1
    jobs.forget("faults")
    cases = {
        "kill_at_tap": (f"kill@tap_solved#2,rank={last}", None),
        "stop_at_safe_point": (f"stop@safe_point#3,rank={last}", None),
        "kill_from_outside": ("", signal.SIGKILL),
        "stop_from_outside": ("", signal.SIGSTOP),
    }
    for name, (fault, number) in cases.items():
        stopped = "stop" in name
        code, output, seconds = jobs.run("faults", options.ranks, fault) if fault else hit_from_outside(jobs, number, last)
        named = re.search(rf"rank {last} silent for [\d.]+ s[^\n]*" if stopped else r"[^\n]*(signal 9|[Kk]illed)[^\n]*", output)
        found[name] = {"exit_code": code, "seconds": round(seconds, 1), "said": named[0].strip()[:200] if named else None}
        right = code == STALLED if stopped else code not in (0, None)
        if not right or not named or seconds > (DEADLINE if number else 2 * DEADLINE):
            wrong.append(f"{name}: {found[name]}: {output[-1200:]}")
        if (pid := rank_process(last, options.shardq)) is not None:
            time.sleep(3)  # the launcher may still be killing
            if rank_process(last, options.shardq) == pid:
                wrong.append(f"{name}: rank {last} (process {pid}) is still there")
    code, output, seconds = jobs.run("faults", options.ranks)
    found["resumed"] = {"exit_code": code, "seconds": round(seconds, 1)}
    if code != 0:
        wrong.append(f"the last resume ended with {code}: {output[-1500:]}")
    jobs.forget("faults")
    return {"ok": not wrong, **found, "wrong": wrong}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=["restart", "faults"])
    parser.add_argument("--shardq", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--ranks", "--gpus", type=int, default=2)
    parser.add_argument("--model", default="qwen3-30b-a3b:4", metavar="SHAPE:LAYERS")
    parser.add_argument("--scale", default="full", choices=["full", "tiny"])
    parser.add_argument("--samples", default="64")
    parser.add_argument("--length", default="2048")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error("--ranks: expected two or more")
    end_ranks_at_sigterm()
    options.work.mkdir(parents=True, exist_ok=True)
    try:
        result = {"restart": restart, "faults": faults}[options.check](options)
    except OutOfTime as error:
        result = {"ok": False, "wrong": [str(error)]}
    print(json.dumps({"check": options.check, "ranks": options.ranks, **result}))
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
