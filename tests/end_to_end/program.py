"""Runs the shardq program for the end-to-end tests, and makes the model directories that they feed it. Standard library only."""

import json
import os
import pathlib
import shutil
import struct
import subprocess
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("SHARDQ_BINARY", str(SOURCE / "build/cpu/shardq"))
MINI_MOE = SOURCE / "models/mini-moe"
USAGE, INPUT, DISK, FALLBACKS = 2, 3, 4, 5  # exit codes, as in README.md


def run(*arguments, ranks=0, threads=2, limit_s=600, fault=None, environment=None, **options):
    """The program's result, output as text. ranks 0: without a launcher. fault: as in $SHARDQ_FAULT. environment: variables besides this process's."""
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), **(environment or {}))
    if fault:
        environment["SHARDQ_FAULT"] = fault
    command = [BINARY, *map(str, arguments)]
    if ranks:
        environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(ranks), *command]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s, cwd=SOURCE, **options)


def read_json(result):
    """The JSON object on standard output; a failed run is an error that shows what the program said."""
    if result.returncode != 0:
        raise AssertionError(f"exit code {result.returncode}\n{result.stderr}\n{result.stdout}")
    return json.loads(result.stdout)


def read_safetensors(path):
    """(header dict, buffer) of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_safetensors(path, header, buffer):
    """header: a dict, or text where a test wants what no dict can say."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + buffer)


class ProgramTest(unittest.TestCase):
    """A test with a scratch folder and copies of the bundled model."""

    def setUp(self):
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="shardq-test-"))
        self.addCleanup(shutil.rmtree, self.scratch, ignore_errors=True)

    def model_copy(self):
        """A copy of the bundled model that a test may damage."""
        directory = self.scratch / "source"
        shutil.copytree(MINI_MOE, directory)
        return directory

    def quantize(self, *arguments, model=MINI_MOE, tokens=MINI_MOE / "calib_ids.npy", output=None, samples=4, **options):
        """A short run of the bundled recipe into the scratch folder."""
        return run("quantize", SOURCE / "configs/mini-moe.yaml", "--model", model, "--tokens", tokens,
                   "--output", output or self.scratch / "out", "--work", self.scratch / "work", "--device", "cpu",
                   "--set", f"calibration.max_samples={samples}", "--set", "calibration.max_length=64", *arguments, **options)  # fmt: skip

    def assert_refused(self, result, code, *parts):
        """Ended with this code, said all the parts in ONE line of standard error, and left nothing under the output's name."""
        self.assertEqual(result.returncode, code, result.stderr + result.stdout)
        lines = [line for line in result.stderr.splitlines() if all(part.lower() in line.lower() for part in map(str, parts))]
        self.assertTrue(lines, f"no line of standard error holds all of {parts}:\n{result.stderr}")
        self.assertFalse((self.scratch / "out/config.json").exists(), "a refused run left an output")
