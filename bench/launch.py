"""Starts shardq on one or several ranks of this machine, for the benchmark scripts. Standard library only."""

import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import time

STORAGE = ("read", "write", "checkpoint")  # phases that wait for files


class OutOfTime(Exception):
    """A command was ended at its deadline."""


def launcher(ranks):
    """What goes before the program; a process alone needs nothing."""
    return [] if ranks == 1 else ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]


def environment(ranks, threads=0, **more):
    """Ranks share the cores evenly unless told otherwise. NVLink multicast stays off: a program that uses it badly can take a host's GPUs down."""
    cores = len(os.sched_getaffinity(0))
    values = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", NCCL_NVLS_ENABLE="0")
    if shutil.which("nvidia-smi"):
        values.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take cores from those that drive the GPUs' exchange
    if threads or "OMP_NUM_THREADS" not in os.environ:
        values["OMP_NUM_THREADS"] = str(threads or max(1, cores // ranks))
    return {**values, **more}


def end_ranks_at_sigterm():
    """Without it SIGTERM would end a script and leave the ranks that it has started."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def end(process):
    """The launcher and, through it, its ranks; then whatever is left of the session that was made for them."""
    for number, wait in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
            process.communicate(timeout=wait)
            return
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def run_in_time(command, environment=None, limit=None):
    """(exit code, output of both streams, seconds). limit: seconds, after which all of it is ended and OutOfTime raised."""
    begin = time.monotonic()
    process = subprocess.Popen(
        list(map(str, command)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=None if limit is None else max(0.1, limit))
    except subprocess.TimeoutExpired:
        end(process)
        raise OutOfTime(f"{' '.join(map(str, command[:8]))} ... ended after {limit:.0f} s") from None
    except BaseException:
        end(process)
        raise
    return process.returncode, output, time.monotonic() - begin


def gpu_names():
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        result = subprocess.run(query, capture_output=True, text=True)
    except FileNotFoundError:
        return []
    return result.stdout.strip().splitlines() if result.returncode == 0 else []


def processor_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
