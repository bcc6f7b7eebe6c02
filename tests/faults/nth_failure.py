#!/usr/bin/env python3
"""Fails the first, second, third ... file operation of a run until a run meets no failure any more, and each time goes on from there.

    nth_failure.py --shim io_shim.so --command 'prog --work {folder}/work --output {folder}/out' --reference DIR --output out --calls write --error ENOSPC

After every failure: the run must have ended with one of the allowed exit codes and a message, or succeeded; the same command without
failures must then finish and its output must equal the reference byte for byte. Prints JSON, exits 1 on the first broken promise.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import time

from compare import differences


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shim", required=True)
    parser.add_argument("--command", required=True, help="shell command; {folder} is replaced")
    parser.add_argument("--reference", required=True, help="file or folder that an undisturbed run writes")
    parser.add_argument("--output", default="out", help="where the command writes it, below {folder}")
    parser.add_argument("--scratch", required=True)
    parser.add_argument("--calls", default="any")
    parser.add_argument("--error", default="EIO")
    parser.add_argument("--forever", action="store_true", help="not once: from the Nth on")
    parser.add_argument("--rank", type=int, help="only on this rank")
    parser.add_argument("--exit-codes", default="4", help="allowed codes of a disturbed run, with commas; 0 always is")
    parser.add_argument("--step", type=int, default=1, help="N = 1, 1 + step, ...")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a run")
    options = parser.parse_args()
    allowed = {0} | {int(code) for code in options.exit_codes.split(",")}
    folder, hits = os.path.join(options.scratch, "folder"), os.path.join(options.scratch, "hits")
    command = options.command.replace("{folder}", folder)
    codes, messages, slowest, nth = {}, set(), 0.0, 1
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        if os.path.exists(hits):
            os.remove(hits)
        fault = f"{options.calls}:{nth}:{options.error}" + (":forever" if options.forever else "")
        if options.rank is not None:
            fault += f":rank={options.rank}"
        disturbed = dict(os.environ, IO_SHIM_FOLDER=folder, IO_SHIM_FAIL=fault, IO_SHIM_HITS=hits, LD_PRELOAD=options.shim)
        begin = time.monotonic()
        first = subprocess.run(command, shell=True, env=disturbed, capture_output=True, text=True, timeout=options.limit)
        slowest = max(slowest, time.monotonic() - begin)
        if not os.path.exists(hits):
            break
        codes[first.returncode] = codes.get(first.returncode, 0) + 1
        problem = None
        if first.returncode not in allowed:
            problem = f"exit code {first.returncode}"
        elif first.returncode and not first.stderr.strip():
            problem = "failed without a message"
        else:
            if first.returncode:
                messages.add(first.stderr.strip().splitlines()[-1][:200])
            second = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=options.limit)
            if second.returncode:
                problem = f"the next run failed with {second.returncode}: {second.stderr[-300:]}"
            else:
                problem = "; ".join(differences(options.reference, os.path.join(folder, options.output))) or None
        if problem:
            print(json.dumps({"fault": fault, "hits": open(hits).read(), "problem": problem, "stderr": first.stderr[-500:]}, indent=1))
            return 1
        nth += options.step
    print(json.dumps({"calls": options.calls, "error": options.error, "forever": options.forever, "failures": sum(codes.values()),
                      "exit codes": codes, "slowest run s": round(slowest, 2), "messages": sorted(messages)[:6]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
