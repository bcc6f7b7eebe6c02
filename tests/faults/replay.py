#!/usr/bin/env python3
"""Makes what a loss of power could leave on disk, from the file operations that io_shim recorded.

    replay.py LOG --scratch FOLDER --trials 60 --check 'COMMAND {image} {notes}'

Each trial cuts the log at a random operation and builds the folder as a disk may hold it then:
  - what was fsynced is there; of other writes each is there, lost, or torn at a 512-byte boundary;
  - names that a folder's fsync covered are there; of later changes of names a random prefix is (--order prefix, a journal), or any
    of them (--order any, all that POSIX promises). A rename is atomic in both.
The check, a shell command, is then run; {image} is the folder, {notes} a file of the notes (io_shim_mark) that were made before the cut. Exit 0: the image recovers.
Prints JSON; exits 1 when an image did not recover, or, with --expect-bad, when all did.
"""
import argparse
import json
import mmap
import os
import random
import shutil
import subprocess
import sys

SECTOR = 512


class File:
    """Content as a list of changes, of which the first `synced` are durable."""

    def __init__(self, base=None):
        self.base, self.changes, self.synced = base, [], 0


class Folder:
    """Names now, names on disk, and the changes in between, oldest first."""

    def __init__(self):
        self.now, self.durable, self.pending = {}, {}, []


class NameChange:
    """One atomic change of names; a rename between two folders belongs to both and happens once."""

    def __init__(self, *steps):
        self.steps, self.done = steps, False  # steps: (folder, name, node or None)


class Disk:
    """The state that a recorded run has reached, and the images that a crash there can leave."""

    def __init__(self, base=None):
        """base: a copy of the folder as it was before the run, all of it durable."""
        self.root = Folder()
        self.inodes = {}
        self.notes = []
        if base:
            self._load(self.root, base)

    def _load(self, folder, path):
        for entry in os.scandir(path):
            node = Folder() if entry.is_dir(follow_symlinks=False) else File(entry.path)
            folder.now[entry.name] = folder.durable[entry.name] = node
            if isinstance(node, Folder):
                self._load(node, entry.path)

    def _find(self, path):
        node = self.root
        for name in [] if path == "." else path.split("/"):
            node = node.now.get(name) if isinstance(node, Folder) else None
        return node

    def _place(self, path):
        parent, _, name = path.rpartition("/")
        return self._find(parent or "."), name

    def _change(self, *steps):
        change = NameChange(*steps)
        for folder, name, node in steps:
            if node is None:
                folder.now.pop(name, None)
            else:
                folder.now[name] = node
        for folder in {id(step[0]): step[0] for step in steps}.values():
            folder.pending.append(change)

    def apply(self, record):
        op, inode, path, second, offset, data = record
        if op == "N":
            self.notes.append(path)
        elif op in "CM":
            folder, name = self._place(path)
            node = File() if op == "C" else Folder()
            self._change((folder, name, node))
            if op == "C":
                self.inodes[inode] = node
        elif op == "O":
            self.inodes[inode] = self._find(path) or File()
        elif op in "WT":
            if inode in self.inodes:
                self.inodes[inode].changes.append((op, offset, data))
        elif op == "S":
            node = self._find(path)
            if isinstance(node, Folder):
                for change in node.pending:
                    self._make_durable(change)
                node.pending = []
            elif inode in self.inodes:
                self.inodes[inode].synced = len(self.inodes[inode].changes)
        elif op in "RL":
            source, name = self._place(path)
            target, new_name = self._place(second)
            node = source.now[name]
            steps = [(target, new_name, node)]
            self._change(*(steps if op == "L" else [(source, name, None)] + steps))
        elif op == "U":
            folder, name = self._place(path)
            self._change((folder, name, None))

    @staticmethod
    def _make_durable(change):
        if change.done:
            return
        change.done = True
        for folder, name, node in change.steps:
            if node is None:
                folder.durable.pop(name, None)
            else:
                folder.durable[name] = node

    def image(self, path, rng, order="prefix"):
        """Writes one possible content of the disk to `path`. Uses the object up: durable names change."""
        lost, torn = rng.choice([(0.0, 0.0), (0.4, 0.2), (0.4, 0.2), (1.0, 0.0)])
        self._survive(self.root, rng, order, set())
        shutil.rmtree(path, ignore_errors=True)
        self._write(self.root, path, rng, lost, torn)

    def _survive(self, folder, rng, order, seen):
        if id(folder) in seen:
            return
        seen.add(id(folder))
        children = list(folder.now.values()) + list(folder.durable.values())
        if order == "prefix":
            surviving = folder.pending[:rng.randint(0, len(folder.pending))]
        else:
            surviving = [change for change in folder.pending if rng.random() < 0.5]
        for change in surviving:
            self._make_durable(change)
        for child in children + list(folder.durable.values()):
            if isinstance(child, Folder):
                self._survive(child, rng, order, seen)

    def _write(self, folder, path, rng, lost, torn):
        os.makedirs(path)
        for name, node in folder.durable.items():
            if isinstance(node, Folder):
                self._write(node, os.path.join(path, name), rng, lost, torn)
            else:
                self._write_file(node, os.path.join(path, name), rng, lost, torn)

    @staticmethod
    def _write_file(node, path, rng, lost, torn):
        if node.base:
            shutil.copyfile(node.base, path)
        with open(path, "r+b" if node.base else "w+b") as file:
            for index, (op, offset, data) in enumerate(node.changes):
                if index >= node.synced:
                    fate = rng.random()
                    if fate < lost:
                        continue
                    if op == "W" and fate < lost + torn:
                        data = data[: rng.randrange(len(data) // SECTOR + 1) * SECTOR]
                if op == "W":
                    file.seek(offset)
                    file.write(data)
                else:
                    file.truncate(offset)


def read_log(path):
    """Records of a log; written data are views of the file."""
    if os.path.getsize(path) == 0:
        return []
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view, records, at = memoryview(content), [], 0
    while at < len(content):
        end = content.find(b"\n", at)
        if end < 0:
            break  # a killed process's last line
        op, inode, name, second, offset, length = content[at:end].decode().split("\t")
        at = end + 1
        data = view[at : at + int(length)] if op == "W" else None
        at += int(length) if op == "W" else 0
        records.append((op, int(inode), name, second, int(offset), data))
    return records


def random_cut(records, rng):
    """Half of the cuts right after a step of the protocol: data writes outnumber those by far."""
    steps = [i + 1 for i, record in enumerate(records) if record[0] in "SRUN"]
    if steps and rng.random() < 0.5:
        return rng.choice(steps)
    return rng.randint(0, len(records))


def make_image(records, cut, path, rng, order="prefix", base=None):
    """Builds the image after `cut` records; returns the notes made until then."""
    disk = Disk(base)
    for record in records[:cut]:
        disk.apply(record)
    disk.image(path, rng, order)
    return disk.notes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log")
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--order", choices=["prefix", "any"], default="prefix")
    parser.add_argument("--base", help="copy of the folder before the recorded run")
    parser.add_argument("--scratch", default="replay", help="folder for images")
    parser.add_argument("--expect-bad", action="store_true", help="the recorded program is known to be wrong: find it out")
    parser.add_argument("--show", action="store_true", help="print the records and stop")
    parser.add_argument("--check", default="true", help="shell command")
    options = parser.parse_args()
    records = read_log(options.log)
    if options.show:
        for op, inode, name, second, offset, data in records:
            print(op, inode, name, second, offset, len(data) if data is not None else 0)
        return 0
    rng = random.Random(options.seed)
    os.makedirs(options.scratch, exist_ok=True)
    image, notes_file = os.path.join(options.scratch, "image"), os.path.join(options.scratch, "notes")
    failures = []
    for trial in range(options.trials):
        cut = random_cut(records, rng)
        notes = make_image(records, cut, image, rng, options.order, options.base)
        with open(notes_file, "w") as file:
            file.write("".join(note + "\n" for note in notes))
        command = options.check.replace("{image}", image).replace("{notes}", notes_file)
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
        if done.returncode:
            failures.append({"trial": trial, "cut": cut, "after": list(records[cut - 1][:4]) if cut else [],
                             "exit": done.returncode, "output": (done.stdout + done.stderr)[-300:]})
            if not options.expect_bad:  # keep the evidence
                shutil.copytree(image, os.path.join(options.scratch, f"bad{trial}"), dirs_exist_ok=True)
    print(json.dumps({"records": len(records), "images": options.trials, "bad": len(failures), "failures": failures[:5]}, indent=1))
    return int(bool(failures) != options.expect_bad)


if __name__ == "__main__":
    sys.exit(main())
