"""Reads what shardq wrote, for comparisons. Standard library only."""

import json

from program import read_safetensors


def tensors(directory):
    """name -> (dtype, shape, bytes) of every tensor of a model directory."""
    found = {}
    for shard in sorted(directory.glob("*.safetensors")):
        header, buffer = read_safetensors(shard)
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = (entry["dtype"], tuple(entry["shape"]), buffer[begin:end])
    return found


def differing_codes(one, other, bits=4):
    """(codes that differ, codes compared) of all packed weights of two directories."""
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())[:3]
    differing = compared = 0
    for name in a:
        if not name.endswith(".weight_packed"):
            continue
        left, right = int.from_bytes(a[name][2], "little"), int.from_bytes(b[name][2], "little")
        compared += len(a[name][2]) * 8 // bits
        mixed = left ^ right
        if mixed:
            differing += sum(1 for byte in mixed.to_bytes(len(a[name][2]), "little") for half in (byte & 15, byte >> 4) if half)
    assert compared > 0
    return differing, compared


def same_files(one, other):
    """Names of files that differ between two directories, byte for byte (or exist in one only)."""
    names = {path.name for path in one.iterdir()} | {path.name for path in other.iterdir()}
    return sorted(
        name for name in names
        if not (one / name).exists() or not (other / name).exists() or (one / name).read_bytes() != (other / name).read_bytes()
    )  # fmt: skip


def module_records(work):
    lines = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    return {entry["module"]: entry for entry in lines if "module" in entry}
