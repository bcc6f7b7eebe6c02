#!/usr/bin/env python3
"""The fault campaigns on the whole program: quantizes the bundled model on 1 to 4 ranks, by any plan, under kill_loop.py and compares the checkpoints.

    program_faults.py --binary shardq --shim io_shim.so --scratch FOLDER kill=200 power=60 enospc=40 eio=40 stop=40 [--json RESULT]
"""
import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.dirname(os.path.dirname(HERE))
MODEL = os.path.join(SOURCE, "models", "mini-moe")


def command_of(binary, folder, ranks, plan, interval, patience):
    """Short intervals, so that as much as can be is on its way to the disk at any moment; without patience no tap waits for its layer's shard."""
    return (f"OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1 exec mpirun --oversubscribe --bind-to none -n {ranks} "
            f"{binary} quantize {SOURCE}/configs/mini-moe.yaml --model {MODEL} --tokens {MODEL}/calib_ids.npy --device cpu "
            f"--output {folder}/out --work {folder}/work --resume auto --set calibration.max_samples=16 --set calibration.max_length=128 "
            f"--set checkpoint.interval_seconds={interval} --set checkpoint.tap_seconds={patience} --set parallel.reduce={plan}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--shim", required=True)
    parser.add_argument("--scratch", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json")
    parser.add_argument("campaigns", nargs="+", help="MODE=COUNT, the modes of kill_loop.py")
    options = parser.parse_args()
    scratch = os.path.abspath(options.scratch)
    shutil.rmtree(scratch, ignore_errors=True)
    os.makedirs(scratch)
    reference = os.path.join(scratch, "reference")
    subprocess.run(command_of(options.binary, reference, 2, "auto", 0, 0), shell=True, check=True, stdout=subprocess.DEVNULL)
    results, failed = [], False
    for campaign in options.campaigns:
        mode, _, count = campaign.partition("=")
        result = os.path.join(scratch, mode + ".json")
        done = subprocess.run([sys.executable, os.path.join(HERE, "kill_loop.py"), "--command", command_of(options.binary, "{folder}", "{ranks}", "{one of all_reduce reduce_scatter all_to_all}",
                                                                                                        "{one of 0 0.5 100}", "{one of 0 0.1 10}"),
                               "--process", os.path.basename(options.binary), "--reference", os.path.join(reference, "out"), "--scratch",
                               os.path.join(scratch, mode), "--mode", mode, "--kills", count, "--seed", str(options.seed), "--operations", "300",
                               "--shim", options.shim, "--json", result])
        failed |= done.returncode != 0
        if os.path.exists(result):
            with open(result) as file:
                results.append(json.load(file))
    if options.json:
        version = subprocess.run([options.binary, "version"], capture_output=True, text=True).stdout.strip()
        with open(options.json, "w") as file:
            json.dump({"version": version, "date": datetime.date.today().isoformat(), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                       "compared": "every file of the output, byte for byte, with an undisturbed run on 2 ranks", "campaigns": results}, file, indent=1)
            file.write("\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
