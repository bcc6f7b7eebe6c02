#!/usr/bin/env python3
"""The fault campaigns on the stage store, each small enough for every build: store_faults.py MODE --driver D --shim S --scratch FOLDER

  kill, enospc, eio   kill_loop.py: the output is the undisturbed run's after every interruption, with 1 to 4 ranks
  power               replay.py on a recorded run: every image recovers, and nothing that was acknowledged is lost
  mutants             the same for runs that forget one kind of fsync: each must be found out, or the test above shows nothing
  nth                 nth_failure.py: every single file operation of a run fails once
"""
import argparse
import os
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
STAGES = 6
# Which fsync each mutant forgets, by the end of the file's name.
MUTANTS = {"all": "", "data files": ":path=.h5.tmp", "stage folder": ":path=stages", "work folder": ":path=work",
           "manifest": ":path=.manifest.json.tmp", "descriptions": ":path=.json.tmp"}


def script(name, *arguments):
    print(name, *arguments, flush=True)
    return subprocess.run([sys.executable, os.path.join(HERE, name), *arguments]).returncode


def run_command(options, folder, ranks):
    return f"{options.driver} run --ranks {ranks} --stages {STAGES} --work {folder}/work --output {folder}/out/digest"


def make_reference(options):
    folder = os.path.join(options.scratch, "reference")
    subprocess.run(run_command(options, folder, 2), shell=True, check=True)
    return os.path.join(folder, "out")


def record(options, name, fault):
    """Records a run on three ranks that does as `fault` says; the log."""
    folder, log = os.path.join(options.scratch, name, "folder"), os.path.join(options.scratch, name, "log")
    os.makedirs(folder)
    environment = dict(os.environ, LD_PRELOAD=options.shim, IO_SHIM_FOLDER=folder, IO_SHIM_LOG=log, IO_SHIM_FAIL=fault)
    subprocess.run(run_command(options, folder, 3), shell=True, check=True, env=environment)
    return log


def replay(options, name, log, reference, *more):
    check = (f"{options.driver} verify --work {{image}}/work --notes {{notes}} && {run_command(options, '{image}', 2)} && "
             f"cmp {{image}}/out/digest {reference}/digest")
    return script("replay.py", log, "--scratch", os.path.join(options.scratch, name, "images"), "--check", check, *more)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["kill", "power", "enospc", "eio", "nth", "mutants"])
    parser.add_argument("--driver", required=True)
    parser.add_argument("--shim", required=True)
    parser.add_argument("--scratch", required=True)
    parser.add_argument("--count", type=int, default=20, help="kills, failures or images")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.scratch = os.path.abspath(options.scratch)
    shutil.rmtree(options.scratch, ignore_errors=True)
    reference = make_reference(options)
    count, seed = str(options.count), str(options.seed)
    if options.mode in ("kill", "enospc", "eio"):
        return script("kill_loop.py", "--command", run_command(options, "{folder}", "{ranks}"), "--process", "store_driver", "--reference",
                      reference, "--scratch", os.path.join(options.scratch, "loop"), "--mode", options.mode, "--kills", count, "--seed", seed,
                      "--operations", "40", "--shim", options.shim)
    if options.mode == "power":
        log = record(options, "right", "")
        return max(replay(options, "right", log, reference, "--trials", count, "--seed", seed, "--order", order) for order in ("prefix", "any"))
    if options.mode == "mutants":
        results = []
        for name, path in MUTANTS.items():
            log = record(options, name.replace(" ", "_"), "fsync:1:SKIP:forever" + path)
            results.append(replay(options, name.replace(" ", "_"), log, reference, "--trials", count, "--seed", seed, "--expect-bad"))
        return max(results)
    command = run_command(options, "{folder}", 2).replace(f"--stages {STAGES}", "--stages 2")
    small = os.path.join(options.scratch, "small")
    subprocess.run(command.replace("{folder}", small), shell=True, check=True)
    results = []
    for calls, error, codes, step in (("any", "EIO", "4", "1"), ("any", "ENOSPC", "4", "6"), ("write", "SHORT", "0", "2"), ("write", "EINTR", "0", "3"),
                                      ("fsync", "EINTR", "0", "4")):
        results.append(script("nth_failure.py", "--shim", options.shim, "--command", command, "--reference", small + "/out", "--scratch",
                              os.path.join(options.scratch, "nth"), "--calls", calls, "--error", error, "--exit-codes", codes, "--step", step))
    return max(results)


if __name__ == "__main__":
    sys.exit(main())
