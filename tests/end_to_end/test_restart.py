"""Jobs that die, are told to stop, meet a full disk or changed inputs: the same command goes on, and the output is the uninterrupted run's, byte for byte."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import time
import unittest

from checkpoints import module_records, same_files, tensors
from program import BINARY, MINI_MOE, SOURCE, USAGE, ProgramTest, run

STOPPED = 85


class Restart(ProgramTest):
    def command(self, name, *arguments):
        paths = {"--model": MINI_MOE, "--output": self.scratch / name}
        defaults = [part for flag, path in paths.items() if flag not in arguments for part in (flag, path)]
        return ["quantize", SOURCE / "configs/mini-moe.yaml", *defaults, "--tokens", MINI_MOE / "calib_ids.npy",
                "--work", self.scratch / f"{name}.work", "--device", "cpu", "--set", "calibration.max_samples=16",
                "--set", "calibration.max_length=128", "--set", "checkpoint.interval_seconds=0", "--set", "checkpoint.tap_seconds=0", *arguments]  # fmt: skip

    def job(self, name, *arguments, ranks=2, fault=None, threads=1):
        environment = {key: value for key, value in os.environ.items() if key != "SHARDQ_FAULT"}
        if fault:
            environment["SHARDQ_FAULT"] = fault
        environment.update(OMP_NUM_THREADS=str(threads), OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        launcher = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)] if ranks else []
        return subprocess.run([*launcher, BINARY, *map(str, self.command(name, *arguments))], env=environment, capture_output=True, text=True,
                              timeout=300, cwd=SOURCE)  # fmt: skip

    def finished(self, name, *arguments, **options):
        result = self.job(name, *arguments, **options)
        self.assertEqual(result.returncode, 0, result.stderr + result.stdout)
        return self.scratch / name

    def stored(self, name):
        """Names of the stages that a work directory counts, oldest first."""
        manifest = json.loads((self.scratch / f"{name}.work/manifest.json").read_text())
        return [stage["name"] for stage in manifest["content"]["stages"]]

    def stored_taps(self, name):
        """Taps in those stages: one stage holds several where taps are solved faster than they are written."""
        taps = []
        for stage in self.stored(name):
            text = json.loads((self.scratch / f"{name}.work/stages/{stage}.json").read_text())["content"]["text"]
            taps += json.loads(text).keys()
        return taps

    def assert_identical(self, one, other):
        self.assertEqual(same_files(one, other), [])
        self.assertEqual(module_records(one.with_name(one.name + ".work")).keys(), module_records(other.with_name(other.name + ".work")).keys())

    def test_killed_anywhere_goes_on(self):
        whole = self.finished("whole")
        for fault in ("kill@tap_solved#1,rank=1", "kill@safe_point#9,rank=0", "kill@tap_solved#6,rank=1", "kill@hidden_stored#2,rank=0",
                      "kill@layer_done#4,rank=1", "kill@published,rank=0"):  # fmt: skip
            with self.subTest(fault):
                died = self.job("again", fault=fault)
                self.assertNotEqual(died.returncode, 0, "the fault did not fire")
                if "published" not in fault:
                    self.assertFalse((self.scratch / "again").exists(), "half a checkpoint under the final name")
                resumed = self.job("again")
                self.assertEqual(resumed.returncode, 0, resumed.stderr + resumed.stdout)
                self.assert_identical(whole, self.scratch / "again")
                for folder in ("again", "again.work"):
                    shutil.rmtree(self.scratch / folder)

    def test_another_number_of_ranks_goes_on(self):
        whole = self.finished("whole")
        self.assertNotEqual(self.job("again", fault="kill@tap_solved#9,rank=1").returncode, 0)
        done = self.stored("again")
        self.assertTrue(done)
        self.finished("again", ranks=3)
        self.assert_identical(whole, self.scratch / "again")

    def test_another_plan_goes_on(self):
        whole = self.finished("whole")
        owners, sums = ("--set", "parallel.reduce=all_to_all"), ("--set", "parallel.reduce=reduce_scatter")
        for first, second in ((owners, sums), (sums, owners)):
            with self.subTest(first[1]):
                self.assertNotEqual(self.job("again", *first, ranks=3, fault="kill@tap_solved#11,rank=2").returncode, 0)
                self.assertTrue(self.stored("again"))
                self.assert_identical(whole, self.finished("again", *second))
                for folder in ("again", "again.work"):
                    shutil.rmtree(self.scratch / folder)

    def test_codes_stored_after_every_tap_survive(self):
        hours = ("--set", "checkpoint.interval_seconds=1000")
        self.assertNotEqual(self.job("again", *hours, fault="sleep@tap_solved#*=0.2;kill@tap_solved#7,rank=0").returncode, 0)
        # How many of the seven had reached the disk depends on its speed; what is counted is the first of them, in order, and no hidden states.
        taps = self.stored_taps("again")
        order = [f"layer{layer:04}.{tap}" for layer in (0, 1) for tap in ("qkv", "o", "gate_up", "down")]
        self.assertGreaterEqual(len(taps), 1)
        self.assertEqual(taps, order[: len(taps)])
        self.assert_identical(self.finished("whole", *hours), self.finished("again", *hours))

    def digests(self, name):
        """Tap -> digest of the codes that are in its layer's shard, 0 where the stage holds the codes themselves."""
        digests = {}
        for stage in self.stored(name):
            text = json.loads((self.scratch / f"{name}.work/stages/{stage}.json").read_text())["content"]["text"]
            digests.update({tap: known["digest"] for tap, known in json.loads(text).items()})
        return digests

    PATIENT = ("--set", "checkpoint.interval_seconds=1000", "--set", "checkpoint.tap_seconds=0.3")

    def killed_with_codes_in_shards(self, *arguments, **options):
        """A job that dies in its last layer after those before it have become durable; tap_seconds is short of the pauses between taps."""
        died = self.job("again", *self.PATIENT, *arguments, fault="sleep@tap_solved#*=0.2;kill@tap_solved#16,rank=0", **options)
        self.assertNotEqual(died.returncode, 0, "the fault did not fire")
        digests = self.digests("again")
        self.assertTrue(any(digests.values()), digests)
        return digests

    def test_codes_in_durable_shards_are_not_stored_twice(self):
        for arguments in ((), ("--set", "quantization.symmetric=false"), ("--set", "quantization.num_bits=3")):
            with self.subTest(arguments):
                whole = self.finished("whole", *arguments)
                digests = self.killed_with_codes_in_shards(*arguments)
                stored = list(digests)
                order = [f"layer{layer:04}.{tap}" for layer in range(4) for tap in ("qkv", "o", "gate_up", "down")]
                self.assertEqual(stored, order[: len(stored)])
                self.assert_identical(whole, self.finished("again", *self.PATIENT, *arguments, ranks=3))
                for folder in ("whole", "whole.work", "again", "again.work"):
                    shutil.rmtree(self.scratch / folder)

    def test_a_shard_that_is_not_the_one_stored_is_named(self):
        digests = self.killed_with_codes_in_shards()
        layer = next(int(tap[5:9]) for tap, digest in digests.items() if digest)
        shard = self.scratch / f"again.partial/model-{layer + 1:05}-of-00005.safetensors"
        whole = shard.read_bytes()
        header = int.from_bytes(whole[:8], "little")
        packed = next(name for name in json.loads(whole[8 : 8 + header]) if name.endswith(".weight_packed"))
        at = 8 + header + json.loads(whole[8 : 8 + header])[packed]["data_offsets"][0]
        flipped = bytearray(whole)
        flipped[at] ^= 0x10
        renamed = whole.replace(packed.encode(), packed.replace("weight", "wEight").encode())
        for data, word in ((bytes(flipped), "damaged"), (renamed, packed), (whole[:-100], "lacks"), (None, "lacks")):
            with self.subTest(word):
                shard.write_bytes(data) if data is not None else shard.unlink()
                result = self.job("again", *self.PATIENT)
                self.assertEqual(result.returncode, 4, result.stderr)
                line = next(line for line in result.stderr.splitlines() if "--resume never" in line)
                for part in (shard.name, word):
                    self.assertIn(part, line)
        shard.write_bytes(whole)
        self.assert_identical(self.finished("whole"), self.finished("again", *self.PATIENT))

    def test_a_shard_that_no_digest_vouches_for_is_written_again(self):
        """It may be an earlier life's, which solved other codes where results hang on the number of ranks: here a flipped bit stands for them."""
        one = ("--set", "checkpoint.interval_seconds=1000", "--set", "checkpoint.tap_seconds=1000")
        whole = self.finished("whole")
        died = self.job("again", *one, fault="sleep@tap_solved#*=0.3;kill@tap_solved#7,rank=0", ranks=3)
        self.assertNotEqual(died.returncode, 0)
        self.assertEqual(self.stored("again"), [])
        shard = self.scratch / "again.partial/model-00001-of-00005.safetensors"
        data = bytearray(shard.read_bytes())
        data[data.find(tensors(whole)["model.layers.0.self_attn.q_proj.weight_packed"][2])] ^= 1
        shard.write_bytes(data)
        # All taps of the layer go to stages with their codes, and the job is told to stop before it writes the layer's shard.
        stopped = self.job("again", *one, fault="term@safe_point#8", ranks=0)
        self.assertEqual(stopped.returncode, STOPPED, stopped.stderr)
        self.assertEqual(list(self.digests("again").values()), [0] * 4)
        self.assert_identical(whole, self.finished("again", *one, ranks=0))

    def test_a_tap_that_waited_long_enough_is_stored_before_the_next_is_solved(self):
        self.assertNotEqual(self.job("again", *self.PATIENT, fault="sleep@safe_point#*=0.5;kill@tap_solved#3,rank=0").returncode, 0)
        self.assertEqual(self.stored_taps("again"), ["layer0000.qkv", "layer0000.o"])

    def test_shards_of_another_run_are_not_taken_for_its_own(self):
        other = self.changed_model()
        whole = self.finished("whole", "--model", other)
        self.assertNotEqual(self.job("again", fault="kill@tap_solved#6,rank=0").returncode, 0)
        # Begun anew with another model, and killed as soon as it has said so.
        self.assertNotEqual(self.job("again", "--model", other, "--resume", "never", fault="kill@file_renamed#1,rank=0").returncode, 0)
        self.assert_identical(whole, self.finished("again", "--model", other))
        # Resumed beside what another job has left.
        for name in ("one", "two"):
            self.assertNotEqual(self.job(name, fault="kill@tap_solved#6,rank=0").returncode, 0)
        result = self.job("one", "--output", self.scratch / "two")
        self.assertEqual(result.returncode, USAGE, result.stderr)
        for part in ("two.partial", "another run", "--resume never"):
            self.assertIn(part, result.stderr)
        (self.scratch / "two.partial/.shardq-run").unlink()
        result = self.job("one", "--output", self.scratch / "two")
        self.assertEqual(result.returncode, USAGE, result.stderr)
        self.assertIn("no mark of the run", result.stderr)
        self.finished("one")

    def test_signals_stop_it_in_order(self):
        whole = self.finished("whole")
        for number in (signal.SIGUSR1, signal.SIGTERM):
            with self.subTest(number):
                environment = dict(os.environ, SHARDQ_FAULT="sleep@safe_point#*=0.05", OMP_NUM_THREADS="1")
                process = subprocess.Popen([BINARY, *map(str, self.command("again"))], env=environment, stderr=subprocess.PIPE, text=True)
                deadline = time.time() + 60
                while not list((self.scratch / "again.work").glob("manifest.json")) and time.time() < deadline:
                    time.sleep(0.02)
                process.send_signal(number)
                _, errors = process.communicate(timeout=60)
                self.assertEqual(process.returncode, STOPPED, errors)
                self.assertIn("same command resumes", errors)
                self.assertFalse((self.scratch / "again").exists())
                self.finished("again", ranks=0)
                for folder in ("again", "again.work"):
                    shutil.rmtree(self.scratch / folder)
        self.assertTrue(whole.exists())

    def test_a_finished_run_says_so(self):
        self.finished("whole")
        again = self.job("whole")
        self.assertEqual(again.returncode, 0)
        self.assertIn("already finished", again.stdout)

    def test_changed_inputs_are_refused_by_name(self):
        self.assertNotEqual(self.job("again", fault="kill@tap_solved#3,rank=0").returncode, 0)
        for arguments, word in ((("--set", "quantization.num_bits=3"), "num_bits"), (("--set", "calibration.max_samples=15"), "tokens"),
                                (("--model", self.changed_model()), "model")):  # fmt: skip
            result = self.job("again", *arguments)
            self.assertEqual(result.returncode, USAGE, result.stderr)
            self.assertRegex(result.stderr, f"changed since it was begun: .*{word}")
        self.finished("again", "--resume", "require")

    def changed_model(self):
        copy = self.model_copy()
        shard = copy / "model-00001-of-00002.safetensors"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        return copy

    def test_a_damaged_stage_is_named_and_so_is_the_way_out(self):
        self.assertNotEqual(self.job("again", fault="kill@tap_solved#9,rank=0").returncode, 0)
        stage = next(path for path in sorted((self.scratch / "again.work/stages").glob("*.h5")) if path.stat().st_size > 2000)
        with open(stage, "r+b") as file:
            file.truncate(1000)
        result = self.job("again")
        self.assertEqual(result.returncode, 4, result.stderr)
        self.assertIn("found 1000", result.stderr)
        self.assertIn("--resume never", result.stderr)
        self.assertNotIn("rank 0: rank 0:", result.stderr)
        self.finished("again", "--resume", "never")

    def test_resume_never_and_require(self):
        missing = self.job("fresh", "--resume", "require")
        self.assertEqual(missing.returncode, USAGE)
        self.assertIn("no run to resume", missing.stderr)
        self.assertNotEqual(self.job("again", fault="kill@tap_solved#3,rank=0").returncode, 0)
        self.finished("again", "--resume", "never", "--set", "quantization.num_bits=8")

    def test_two_jobs_on_one_work_directory(self):
        environment = dict(os.environ, SHARDQ_FAULT="sleep@safe_point#*=0.2", OMP_NUM_THREADS="1")
        first = subprocess.Popen([BINARY, *map(str, self.command("shared"))], env=environment, stderr=subprocess.DEVNULL)
        self.addCleanup(first.kill)
        deadline = time.time() + 60
        while not (self.scratch / "shared.work/manifest.json").exists() and time.time() < deadline:
            time.sleep(0.05)
        second = self.job("shared", ranks=0)
        self.assertEqual(second.returncode, USAGE, second.stderr)
        self.assertIn(str(first.pid), second.stderr)
        first.kill()
        first.wait()
        self.finished("shared", ranks=0)

    def test_a_rank_that_fails_ends_the_job(self):
        before = time.time()
        result = self.job("failing", ranks=3, fault="throw@tap_solved#2=4,rank=1")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("rank 1", result.stderr)
        self.assertLess(time.time() - before, 60)
        self.finished("failing", ranks=3)


if __name__ == "__main__":
    unittest.main()
