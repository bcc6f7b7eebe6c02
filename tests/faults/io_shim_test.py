#!/usr/bin/env python3
"""Tests of the fault tools themselves, on a small program with known operations: io_shim_test.py SHIM"""
import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
import unittest

import replay
from compare import differences

SHIM = os.path.abspath(sys.argv.pop(1)) if len(sys.argv) > 1 else ""

PROGRAM = """
import os, sys
os.chdir(sys.argv[1])
def sync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
os.mkdir("sub")
sync(".")
fd = os.open("sub/.a.tmp", os.O_CREAT | os.O_WRONLY)
os.write(fd, b"x" * 1500)
os.fsync(fd)
os.pwrite(fd, b"late", 0)
os.close(fd)
os.rename("sub/.a.tmp", "sub/a")
sync("sub")
open("sub/b", "w").close()
os.unlink("sub/b")
os.remove("old")
"""


class Folder(unittest.TestCase):
    def setUp(self):
        self.top = tempfile.mkdtemp()
        self.folder, self.log, self.hits = (os.path.join(self.top, name) for name in ("folder", "log", "hits"))
        os.mkdir(self.folder)
        with open(os.path.join(self.folder, "old"), "w") as file:
            file.write("old content")
        self.base = shutil.copytree(self.folder, os.path.join(self.top, "base"))

    def tearDown(self):
        shutil.rmtree(self.top)

    def run_program(self, fail=""):
        environment = dict(os.environ, LD_PRELOAD=SHIM, IO_SHIM_FOLDER=self.folder, IO_SHIM_LOG=self.log, IO_SHIM_FAIL=fail,
                           IO_SHIM_HITS=self.hits)
        return subprocess.run([sys.executable, "-c", PROGRAM, self.folder], env=environment, capture_output=True, text=True)


class Recording(Folder):
    def test_every_operation_in_its_order(self):
        self.assertEqual(self.run_program().returncode, 0)
        records = replay.read_log(self.log)
        self.assertEqual("".join(record[0] for record in records), "MSCWSWRSCUU")
        self.assertEqual([record[2] for record in records],
                         ["sub", "."] + 4 * ["sub/.a.tmp"] + ["sub/.a.tmp", "sub", "sub/b", "sub/b", "old"])
        self.assertEqual((records[6][3], records[5][4], bytes(records[5][5])), ("sub/a", 0, b"late"))
        self.assertEqual(len(records[3][5]), 1500)

    def test_images_keep_what_is_synced_and_vary_in_the_rest(self):
        self.run_program()
        records = replay.read_log(self.log)
        image, seen = os.path.join(self.top, "image"), set()
        for seed in range(60):
            replay.make_image(records, len(records), image, random.Random(seed), "any" if seed % 2 else "prefix", self.base)
            with open(os.path.join(image, "sub", "a"), "rb") as file:
                content = file.read()
            self.assertEqual(content[4:], b"x" * 1496)
            self.assertIn(content[:4], (b"xxxx", b"late"))
            seen.add((content[:4], os.path.exists(os.path.join(image, "old"))))
        self.assertEqual(len(seen), 4)

    def test_images_before_the_sync_may_hold_nothing_or_torn_data(self):
        self.run_program()
        records = replay.read_log(self.log)
        image, lengths = os.path.join(self.top, "image"), set()
        for seed in range(200):
            replay.make_image(records, 4, image, random.Random(seed), "prefix", self.base)
            path = os.path.join(image, "sub", ".a.tmp")
            lengths.add(os.path.getsize(path) if os.path.exists(path) else None)
        self.assertEqual(lengths, {None, 0, 512, 1024, 1500})

    def test_a_whole_run_that_syncs_everything_has_one_image(self):
        self.run_program()
        records = replay.read_log(self.log)[:8]
        records.insert(6, ("S",) + records[5][1:5] + (None,))
        for seed in range(20):
            image = os.path.join(self.top, "image")
            replay.make_image(records, len(records), image, random.Random(seed), "any", self.base)
            with open(os.path.join(image, "sub", "a"), "rb") as file:
                self.assertEqual(file.read(), b"late" + b"x" * 1496)


class Disturbing(Folder):
    def check(self, fail, error):
        done = self.run_program(fail)
        if error is None:
            self.assertEqual(done.returncode, 0, done.stderr)
        else:
            self.assertIn(os.strerror(error), done.stderr)
        return done

    def test_errors_by_call_visit_path_and_rank(self):
        for fail, error in [("write:1:ENOSPC", errno.ENOSPC), ("fsync:3:EIO", errno.EIO), ("rename:1:EDQUOT", errno.EDQUOT),
                            ("unlink:2:EIO", errno.EIO), ("mkdir:1:ENOSPC", errno.ENOSPC), ("open:2:EIO", errno.EIO),
                            ("any:3:EIO", errno.EIO), ("fsync:1:EIO:path=sub", errno.EIO), ("fsync:2:EIO:path=sub", None),
                            ("write:1:EIO:rank=1", None), ("write:1:EIO:rank=0", errno.EIO), ("write:3:EIO", None), ("open:1:SKIP;unlink:2:EIO", errno.EIO)]:
            with self.subTest(fail):
                self.tearDown()
                self.setUp()
                self.check(fail, error)

    def test_hits_are_told(self):
        self.check("fsync:9:EIO", None)
        self.assertFalse(os.path.exists(self.hits))
        self.tearDown()
        self.setUp()
        self.check("write:1:SHORT", None)
        with open(self.hits) as file:
            self.assertIn("write sub/.a.tmp", file.read())
        self.assertEqual(os.path.getsize(os.path.join(self.folder, "sub", "a")), 750)

    def test_a_skipped_sync_is_not_recorded(self):
        self.check("fsync:1:SKIP:forever", None)
        self.assertNotIn("S", [record[0] for record in replay.read_log(self.log)])


class Comparing(Folder):
    def test_differences_are_seen(self):
        self.assertEqual(differences(self.base, self.folder), [])
        with open(os.path.join(self.folder, "new"), "w") as file:
            file.write("x")
        self.assertEqual(differences(self.base, self.folder), ["new is too many"])
        self.assertEqual(differences(self.base, self.folder, ["new"]), [])
        self.assertEqual(differences(self.folder, self.base), ["new is missing"])
        os.remove(os.path.join(self.folder, "new"))
        with open(os.path.join(self.folder, "old"), "w") as file:
            file.write("old Content")
        self.assertEqual(differences(self.base, self.folder), ["old differs"])
        self.assertEqual(len(differences(self.base, self.folder + "/nothing")), 1)


class KillLoop(Folder):
    """The loop must find a program that takes half a result for a whole one, and pass one that does not."""

    CARELESS = "test -e {folder}/out || { echo one > {folder}/out; sleep 0.3; echo two >> {folder}/out; }"
    CAREFUL = "test -e {folder}/out || { { echo one; sleep 0.3; echo two; } > {folder}/t; mv {folder}/t {folder}/out; }"

    def loop(self, command):
        reference = os.path.join(self.top, "reference")
        with open(reference, "w") as file:
            file.write("one\ntwo\n")
        loop = os.path.join(os.path.dirname(os.path.abspath(__file__)), "kill_loop.py")
        return subprocess.run([sys.executable, loop, "--command", command, "--process", "sleep", "--reference", reference,
                               "--scratch", os.path.join(self.top, "loop"), "--kills", "6"], capture_output=True, text=True)

    def test_finds_the_careless_program(self):
        done = self.loop(self.CARELESS)
        self.assertEqual(done.returncode, 1)
        self.assertIn("the output differs", done.stdout)

    def test_passes_the_careful_program(self):
        done = self.loop("set -e; " + self.CAREFUL)
        self.assertEqual(done.returncode, 0, done.stdout)


if __name__ == "__main__":
    unittest.main()
