"""Byte-for-byte comparison of two files or two folders."""
import filecmp
import os


def _files(top):
    for folder, _, names in os.walk(top):
        for name in names:
            yield os.path.relpath(os.path.join(folder, name), top)


def differences(reference, found, ignored=()):
    """What differs, a line each; file names in `ignored` (times, logs) are left out."""
    if not os.path.exists(found):
        return [f"{found} is missing"]
    if os.path.isfile(reference):
        return [] if os.path.isfile(found) and filecmp.cmp(reference, found, shallow=False) else [f"{found} differs from {reference}"]
    skip = lambda name: os.path.basename(name) in ignored
    expected, present = ({name for name in _files(top) if not skip(name)} for top in (reference, found))
    lines = [f"{name} is missing" for name in sorted(expected - present)]
    lines += [f"{name} is too many" for name in sorted(present - expected)]
    for name in sorted(expected & present):
        if not filecmp.cmp(os.path.join(reference, name), os.path.join(found, name), shallow=False):
            lines.append(f"{name} differs")
    return lines
