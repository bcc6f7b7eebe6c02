"""How many codes of two quantized model directories differ. Needs numpy; tests/end_to_end/checkpoints.py does the same for small ones without it."""

import json
import struct

import numpy

BITS = 4  # W4A16: eight codes in an int32


def header_of(path):
    """name -> (begin, end) of the packed weights of a safetensors file, in bytes from its start."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    offsets = ((name, entry["data_offsets"]) for name, entry in header.items() if name.endswith(".weight_packed"))
    return {name: (8 + length + begin, 8 + length + end) for name, (begin, end) in offsets}


def layer_shards(directory):
    """The shards of layers, in order; the last shard holds what is in no layer."""
    return sorted(directory.glob("model-*.safetensors"))[:-1]


def keep_some(directory, layers):
    """Deletes all shards but those of `layers` layers, evenly spread from first to last: enough for a comparison, and disks are small."""
    shards = layer_shards(directory)
    count = min(layers, len(shards))
    kept = {shards[round(i * (len(shards) - 1) / max(count - 1, 1))] for i in range(count)}
    for path in directory.glob("*.safetensors"):
        if path not in kept:
            path.unlink()


def differing_codes(one, other):
    """One (layer's shard, codes, codes that differ) for each shard that is in both directories."""
    result = []
    for path in sorted(one.glob("model-*.safetensors")):
        left, right = header_of(path), header_of(other / path.name)
        assert left.keys() == right.keys(), f"{path.name}: other tensors in {other}"
        a, b = numpy.memmap(path, numpy.uint8, "r"), numpy.memmap(other / path.name, numpy.uint8, "r")
        codes = differing = 0
        for name, (begin, end) in left.items():
            mixed = a[begin:end] ^ b[slice(*right[name])]
            codes += (end - begin) * 8 // BITS
            if mixed.any():
                differing += numpy.count_nonzero(mixed & 15) + numpy.count_nonzero(mixed >> 4)
        result.append((path.name, codes, int(differing)))
    return result


def verdicts_that_differ(one, other):
    """Of two reports: modules whose verdict differs, or that are in one of them only."""
    here, there = ({module["module"]: module["verdict"] for module in report["modules"]} for report in (one, other))
    return sum(here.get(name) != there.get(name) for name in here.keys() | there.keys())


def loss_difference(one, other):
    """Of two reports: by how much of it the loss of a layer differs, in the layer where that is most. Losses of a tap are of one Hessian's units."""
    sums = []
    for report in (one, other):
        layers = {}
        for module in report["modules"]:
            key = module["layer"], module["tap"]
            layers[key] = layers.get(key, 0.0) + module["loss"]
        sums.append(layers)
    return max((abs(sums[1].get(key, 0.0) - loss) / max(abs(loss), 1e-30) for key, loss in sums[0].items()), default=0.0)
