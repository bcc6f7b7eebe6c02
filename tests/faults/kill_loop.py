#!/usr/bin/env python3
"""Disturbs a resumable program over and over, lets it go on each time, and compares its output with an undisturbed run's, byte for byte.

    kill_loop.py --command 'mpirun -n {ranks} shardq quantize R.yaml --work {folder}/work --output {folder}/out --resume auto' \\
                 --process shardq --reference REFERENCE --output out --kills 200 --ranks 1-4 --mode kill --json result.json

The command runs in {folder}, an empty folder for each life; a life ends when the command succeeds and its output was compared, and the next
begins. Each start is hit once, with a rank count drawn from --ranks, until --kills hits have been made:
  kill      SIGKILL to one random rank (two of three times) or to all of them, at a random moment; the command must then end in
            --end-limit seconds with a non-zero exit code
  stop      SIGTERM to all ranks at a random moment: they must end with exit code 0 or 85; in the first --start-seconds, when the
            program may not be ready for signals yet, also by the signal
  power     all is killed, and the folder is replaced by what a loss of power could have left (see replay.py; needs --shim)
  enospc, eio   from a random file operation of a random rank on, all of its writing operations fail (needs --shim); the command must
            end with exit code 4 and a message
With --fixed-ranks, a life keeps its number of ranks. A single start may at most take --limit seconds. Prints and writes JSON; exits 1 when
any output differs, any exit was not as it must be, or anything hung.
"""
import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import replay
from compare import differences


def processes_below(root):
    """Process ids of `root` and its descendants, with their names."""
    parents, names = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    head, _, tail = file.read().rpartition(")")
            except OSError:
                continue
            fields = tail.split()
            if fields[0] != "Z":
                parents[int(entry)] = int(fields[1])
                names[int(entry)] = head.split("(", 1)[1]
    found, frontier = {}, [root]
    while frontier:
        parent = frontier.pop()
        if parent in names:
            found[parent] = names[parent]
        frontier += [pid for pid, above in parents.items() if above == parent]
    return found


def signal_all(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


class Loop:
    def __init__(self, options):
        self.options = options
        self.rng = random.Random(options.seed)
        low, _, high = options.ranks.partition("-")
        self.rank_counts = range(int(low), int(high or low) + 1)
        self.folder = os.path.abspath(os.path.join(options.scratch, "life"))
        self.before = os.path.abspath(os.path.join(options.scratch, "before"))
        self.log = os.path.abspath(os.path.join(options.scratch, "log"))
        self.result = {"mode": options.mode, "seed": options.seed, "hits": 0, "missed": 0, "lives": 0, "problems": [], "exit codes": {},
                       "slowest end s": 0.0, "starts": 0}
        self.usual_seconds, self.early = 1.0, False

    def start(self, ranks, environment):
        self.result["starts"] += 1
        command = self.options.command.replace("{ranks}", str(ranks)).replace("{folder}", self.folder)
        command = re.sub(r"\{one of ([^}]*)\}", lambda words: self.rng.choice(words[1].split()), command)
        output = open(os.path.join(self.options.scratch, "output"), "w")
        return subprocess.Popen(command, shell=True, stdout=output, stderr=output, start_new_session=True,
                                env=dict(os.environ, **environment))

    def output_tail(self):
        with open(os.path.join(self.options.scratch, "output"), errors="replace") as file:
            return file.read()[-600:]

    def launcher_hung(self):
        """A rank that is killed while ranks still connect to mpirun can leave it waiting (PMIx: unreachable), before a line of ours runs."""
        with open(os.path.join(self.options.scratch, "output"), errors="replace") as file:
            output = file.read()
        return "PMIX ERROR: UNREACHABLE" in output and "layer " not in output

    def problem(self, what, **more):
        self.result["problems"].append({"what": what, "hit": self.result["hits"], "output": self.output_tail(), **more})

    def ranks_of(self, process):
        found = processes_below(process.pid)
        return [pid for pid, name in found.items() if name == self.options.process[:15] and pid != process.pid]

    def wait(self, process, seconds):
        """Exit code, or None after `seconds`, when everything is killed."""
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            signal_all(processes_below(process.pid), signal.SIGKILL)
            process.wait()
            return None

    # -- one hit of each kind: returns the exit code, and whether the run was hit before it was over --

    def hit_by_signal(self, process, numbers):
        delay = self.rng.random() * self.options.spread * self.usual_seconds
        try:
            return process.wait(delay), False
        except subprocess.TimeoutExpired:
            pass
        victims = self.ranks_of(process)
        while self.options.mode == "stop" and not victims:  # still starting: a launcher that dies may leave its ranks behind
            time.sleep(0.01)
            if process.poll() is not None:
                return process.returncode, False
            victims = self.ranks_of(process)
        self.early = delay < self.options.start_seconds
        everybody = numbers == "all" or (numbers == "any" and self.rng.random() < 1 / 3)
        if self.options.mode == "stop":
            signal_all(victims, signal.SIGTERM)
        elif everybody:
            signal_all(processes_below(process.pid), signal.SIGKILL)
        else:
            signal_all([self.rng.choice(victims or [process.pid])], signal.SIGKILL)
        begin = time.monotonic()
        code = self.wait(process, self.options.end_limit)
        self.result["slowest end s"] = round(max(self.result["slowest end s"], time.monotonic() - begin), 2)
        if code is None and self.launcher_hung():
            self.result["launcher hung at start"] = self.result.get("launcher hung at start", 0) + 1
        elif code is None:
            self.problem(f"did not end in {self.options.end_limit} s after a {self.options.mode}")
        return code, True

    def hit_by_power(self, ranks):
        shutil.rmtree(self.before, ignore_errors=True)
        shutil.copytree(self.folder, self.before)
        if os.path.exists(self.log):
            os.remove(self.log)
        process = self.start(ranks, {"LD_PRELOAD": self.options.shim, "IO_SHIM_FOLDER": self.folder, "IO_SHIM_LOG": self.log})
        code, hit = self.hit_by_signal(process, "all")
        if hit:
            while self.survivors():  # killed processes may be writing still
                time.sleep(0.01)
            records = replay.read_log(self.log) if os.path.exists(self.log) else []
            shutil.rmtree(self.folder)
            order = self.rng.choice(["prefix", "any"])
            replay.make_image(records, len(records), self.folder, self.rng, order, self.before)
        return code, hit

    def survivors(self):
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    with open(f"/proc/{entry}/environ", "rb") as file:
                        if ("IO_SHIM_FOLDER=" + self.folder).encode() in file.read():
                            found.append(int(entry))
                except OSError:
                    continue
        return found

    def hit_by_failure(self, ranks):
        error = self.options.mode.upper()
        hits = os.path.join(self.options.scratch, "hits")
        if os.path.exists(hits):
            os.remove(hits)
        visit = int(self.rng.random() ** 2 * self.options.operations) + 1
        fault = f"any:{visit}:{error}:forever:rank={self.rng.randrange(ranks)}"
        process = self.start(ranks, {"LD_PRELOAD": self.options.shim, "IO_SHIM_FOLDER": self.folder, "IO_SHIM_FAIL": fault,
                                     "IO_SHIM_HITS": hits})
        code = self.wait(process, self.options.limit)
        hit = os.path.exists(hits)
        if hit and code is None:
            self.problem("did not end after " + fault)
        elif hit and code not in (0, 4):
            self.problem(f"exit code {code} instead of 4 after {fault}")
        return code, hit

    def one_life(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        os.makedirs(self.folder)
        self.result["lives"] += 1
        ranks = self.rng.choice(self.rank_counts)
        while True:
            if not self.options.fixed_ranks:
                ranks = self.rng.choice(self.rank_counts)
            if self.result["hits"] >= self.options.kills:
                code, hit = self.wait(self.start(ranks, {}), self.options.limit), False
            elif self.options.mode in ("kill", "stop"):
                code, hit = self.hit_by_signal(self.start(ranks, {}), "any")
            elif self.options.mode == "power":
                code, hit = self.hit_by_power(ranks)
            else:
                code, hit = self.hit_by_failure(ranks)
            self.result["hits" if hit else "missed"] += 1
            codes = self.result["exit codes"].setdefault("hit" if hit else "not hit", {})
            codes[str(code)] = codes.get(str(code), 0) + 1
            if hit and self.options.mode == "stop" and code not in ((0, 85, 143, -15) if self.early else (0, 85)):
                self.problem(f"exit code {code} after SIGTERM")
            if not hit and code != 0:
                self.problem(f"exit code {code} without a hit")
                return
            if code == 0 and not (hit and self.options.mode == "power"):
                break
        found = differences(self.options.reference, os.path.join(self.folder, self.options.output), self.options.ignore)
        if found:
            self.problem("the output differs", files=found[:10])

    def run(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        os.makedirs(self.folder)
        begin = time.monotonic()
        code = self.wait(self.start(self.rank_counts[0], {}), self.options.limit)
        self.usual_seconds = time.monotonic() - begin
        if code != 0:
            self.problem(f"the undisturbed run ends with {code}")
        while self.result["hits"] < self.options.kills and len(self.result["problems"]) < 5 and not (code and self.result["problems"]):
            self.one_life()
        self.result["seconds"] = round(time.monotonic() - begin, 1)
        return self.result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", required=True, help="shell command with {ranks} and {folder}, and {one of A B C} where every start may differ")
    parser.add_argument("--process", required=True, help="name of the processes that are ranks")
    parser.add_argument("--reference", required=True, help="output of an undisturbed run: file or folder")
    parser.add_argument("--output", default="out", help="the output's path below {folder}")
    parser.add_argument("--ignore", nargs="*", default=[], help="names of files that may differ (times, logs)")
    parser.add_argument("--scratch", required=True)
    parser.add_argument("--mode", choices=["kill", "stop", "power", "enospc", "eio"], default="kill")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", default="1-4")
    parser.add_argument("--fixed-ranks", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--spread", type=float, default=1.0, help="moments are drawn from this many times the usual duration")
    parser.add_argument("--operations", type=int, default=100, help="failing operations are drawn up to this one")
    parser.add_argument("--limit", type=float, default=120)
    parser.add_argument("--end-limit", type=float, default=30)
    parser.add_argument("--start-seconds", type=float, default=1, help="for --mode stop")
    parser.add_argument("--shim")
    parser.add_argument("--json", help="file for the result")
    options = parser.parse_args()
    if options.mode in ("power", "enospc", "eio") and not options.shim:
        parser.error(f"--mode {options.mode} needs --shim")
    os.makedirs(options.scratch, exist_ok=True)
    result = Loop(options).run()
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        with open(options.json, "w") as file:
            file.write(text + "\n")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
