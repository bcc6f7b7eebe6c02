"""A written checkpoint as other software sees it: the compressed-tensors library, transformers, and plain NumPy.

    check_compressed_tensors.py DIR [DEQUANTIZED.safetensors] [--tokens FILE --samples N] [--decompress-to DIR]

checks that
- quantization_config parses as the library's QuantizationConfig, and config.json is laid out as the library lays it out;
- targets and ignore list say of every matrix of the files what the files say: packed or not;
- what the library decompresses equals, bit for bit, what NumPy computes from the packed words, and what a second file holds;
- transformers loads the directory; perplexity over a token file, in bf16 on the CPU.
It prints one JSON object. transformers 5.24 loads packed routed experts when they are symmetric; it has no zero points for asymmetric ones:
those are decompressed tensor by tensor through the library into a plain directory (--decompress-to keeps it), and that one is loaded.

Without a directory it quantizes the bundled model with shardq and checks the result, against `shardq eval` too (this is what ctest runs).
"""

import argparse
import json
import math
import pathlib
import shutil
import sys
import tempfile
import unittest

try:
    import numpy as np
    import torch
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor, pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_name
    from safetensors import safe_open
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
except ImportError as missing:
    print(f"skipped: {missing} (bash jobs/setup.sh tests installs it)")
    sys.exit(77)

from program import MINI_MOE, ProgramTest, read_json, run


def read_tensors(directory):
    """All tensors of a model directory, through its index where it has one."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        with safe_open(directory / "model.safetensors", "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    tensors, described = {}, json.loads(index.read_text())
    for shard in sorted(set(described["weight_map"].values())):
        with safe_open(directory / shard, "pt") as file:
            assert (file.metadata() or {}).get("format") == "pt", f"{shard}: transformers wants the metadata format=pt"
            for name in file.keys():
                assert described["weight_map"].get(name) == shard, f"the index places {name} elsewhere than {shard}"
                tensors[name] = file.get_tensor(name)
    assert set(tensors) == set(described["weight_map"]), "the index names tensors that no shard holds"
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    assert described["metadata"]["total_size"] == total, f"total_size {described['metadata']['total_size']}, the tensors take {total}"
    return tensors


def read_config(directory):
    """config.json as a dict, and its quantization section as the library's object."""
    text = (directory / "config.json").read_text()
    config = json.loads(text)
    assert text == json.dumps(config, indent=2, sort_keys=True), "config.json is not what json.dump(indent=2, sort_keys=True) writes"
    return config, QuantizationConfig.model_validate(config["quantization_config"])


def scheme_of(module, quantization):
    """The scheme of a Linear, or None: an ignored one, or one that nothing targets. All modules asked about here are Linear."""

    def matches(patterns):
        return any(pattern == "Linear" or match_name(module, pattern) for pattern in patterns or [])

    if matches(quantization.ignore):
        return None
    for priority in (False, True):  # names and expressions before the class
        for scheme in quantization.config_groups.values():
            patterns = [target for target in scheme.targets if (target == "Linear") == priority]
            if matches(patterns):
                return scheme
    return None


def check_coverage(tensors, quantization):
    """Names of the packed modules; fails where the lists and the files disagree. Embeddings and norms are no Linear."""
    packed = sorted(name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed"))
    for module in packed:
        assert scheme_of(module, quantization) is not None, f"{module} is packed, but the config ignores it or does not target it"
        assert f"{module}.weight" not in tensors, f"{module} is there twice, packed and plain"
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and tensor.ndim == 2 and not module.endswith("embed_tokens"):
            assert scheme_of(module, quantization) is None, f"{module} is not packed, but the config says that it is"
    assert packed, "no packed module at all"
    return packed


def parts_of(tensors, module):
    names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    return {name: tensors[f"{module}.{name}"] for name in names if f"{module}.{name}" in tensors}


def unpacked(words, bits, count):
    """The first `count` codes of each row's little-endian bit stream, by the definition: element i at bits [i b, (i + 1) b)."""
    stream = np.unpackbits(words.astype("<i4").view(np.uint8).reshape(words.shape[0], -1), axis=1, bitorder="little")
    used = stream[:, : count * bits]
    assert not stream[:, count * bits :].any(), "bits behind the last code are not 0"
    values = (used.reshape(words.shape[0], count, bits).astype(np.int32) << np.arange(bits)).sum(-1)
    return values - (1 << (bits - 1))


def rounded_to_bf16(values):
    """float32 to the bits of bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def numpy_dequantized(parts, scheme):
    """Bits of the weight as uint16 (bf16, fp16) or uint32 (fp32), computed without the library."""
    rows, cols = (int(size) for size in parts["weight_shape"])
    args, scale = scheme.weights, parts["weight_scale"]
    groups = scale.shape[1]
    codes = unpacked(parts["weight_packed"].numpy(), args.num_bits, cols)
    zeros = np.zeros((rows, groups), np.int32)
    if not args.symmetric:
        zeros = unpacked(np.ascontiguousarray(parts["weight_zero_point"].numpy().T), args.num_bits, rows).T
    span = cols if args.strategy == "channel" else args.group_size
    assert groups == -(-cols // span), f"{groups} scales a row for {cols} columns in groups of {span}"
    group_of = np.arange(cols) // span
    # At most 9 bits times at most 24: exact in float64, so that the only rounding is to the scale's dtype.
    exact = (codes - zeros[:, group_of]).astype(np.float64) * scale.double().numpy()[:, group_of]
    if scale.dtype == torch.bfloat16:
        return rounded_to_bf16(exact)
    return exact.astype(np.float16).view(np.uint16) if scale.dtype == torch.float16 else exact.astype(np.float32).view(np.uint32)


def bits_of(tensor):
    wide = tensor.dtype == torch.float32
    return tensor.contiguous().view(torch.int32 if wide else torch.int16).numpy().view(np.uint32 if wide else np.uint16)


def differing(a, b):
    """Elements whose bits differ; all of them where the shapes do."""
    return max(a.size, b.size) if a.shape != b.shape else int((a != b).sum())


def check_module(module, parts, scheme, solver_weight):
    """Decompresses one module with the library, compares, and returns the weight."""
    rows, cols = (int(size) for size in parts["weight_shape"])
    bits = scheme.weights.num_bits
    assert parts["weight_shape"].dtype == torch.int64 and parts["weight_packed"].dtype == torch.int32, module
    assert tuple(parts["weight_packed"].shape) == (rows, math.ceil(cols * bits / 32)), f"{module}: {tuple(parts['weight_packed'].shape)}"
    assert scheme.weights.symmetric == ("weight_zero_point" not in parts), f"{module}: a zero point is there exactly when asymmetric"
    codes = unpack_from_int32(parts["weight_packed"], bits, torch.Size((rows, cols)))
    assert torch.equal(pack_to_int32(codes, bits), parts["weight_packed"]), f"{module}: the library packs its own codes otherwise"
    weight = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
    count = differing(bits_of(weight), numpy_dequantized(parts, scheme))
    assert count == 0, f"{module}: {count} weights differ between the library and NumPy"
    if solver_weight is not None:
        count = differing(bits_of(weight), bits_of(solver_weight))
        assert count == 0, f"{module}: {count} weights differ between the library and the file of dequantized weights"
    return weight


def decompress(directory, solver_file=None):
    """Checks every packed module; returns (plain tensors, number of packed modules, quantization)."""
    _, quantization = read_config(directory)
    tensors = read_tensors(directory)
    packed = check_coverage(tensors, quantization)
    solver = safe_open(solver_file, "pt") if solver_file else None
    plain = {name: t for name, t in tensors.items() if not name.rsplit(".", 1)[-1].startswith("weight_")}
    for module in packed:
        solver_weight = solver.get_tensor(f"{module}.weight") if solver else None
        plain[f"{module}.weight"] = check_module(module, parts_of(tensors, module), scheme_of(module, quantization), solver_weight)
    return plain, len(packed), quantization


def write_plain(directory, tensors, target):
    """A directory of ordinary weights that loads without the compressed-tensors library."""
    target.mkdir(parents=True)
    for file in directory.iterdir():
        if file.is_file() and not file.name.startswith("model"):
            shutil.copy(file, target / file.name)
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors", metadata={"format": "pt"})


def perplexity(directory, tokens, samples):
    """exp of the mean negative log-likelihood per predicted token, over whole sequences."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    ids = torch.from_numpy(np.load(tokens)[: samples or None].astype(np.int64))
    total = 0.0
    with torch.no_grad():
        for batch in ids.split(8):
            logits = model(batch).logits[:, :-1].float()
            total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").item()
    return math.exp(total / (ids.shape[0] * (ids.shape[1] - 1)))


def check(directory, solver_file=None, tokens=None, samples=0, decompress_to=None):
    """All of it; returns what is printed."""
    plain, modules, quantization = decompress(directory, solver_file)
    result = {"directory": str(directory), "packed_modules": modules, "bits_equal": True, "compared_with_file": bool(solver_file)}
    asymmetric = any(not scheme.weights.symmetric for scheme in quantization.config_groups.values())
    experts = any(".experts." in name for name in plain)
    with tempfile.TemporaryDirectory(prefix="shardq-plain-") as scratch:
        target = pathlib.Path(decompress_to) if decompress_to else pathlib.Path(scratch) / "plain"
        if decompress_to or (asymmetric and experts):
            write_plain(directory, plain, target)
            result["decompressed_to"] = str(target) if decompress_to else "(temporary)"
        if tokens and not (asymmetric and experts):
            result["perplexity_transformers"] = perplexity(directory, tokens, samples)
        if tokens and target.exists():
            result["perplexity_decompressed"] = perplexity(target, tokens, samples)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("dequantized", nargs="?", type=pathlib.Path, help="safetensors file with NAME.weight of every packed module")
    parser.add_argument("--tokens", type=pathlib.Path, help=".npy of token ids, [samples, length]")
    parser.add_argument("--samples", type=int, default=0, help="the first N only")
    parser.add_argument("--decompress-to", type=pathlib.Path, metavar="DIR", help="write (and evaluate) plain bf16 weights")
    options = parser.parse_args()
    print(json.dumps(check(options.directory, options.dequantized, options.tokens, options.samples, options.decompress_to), indent=2))


HELDOUT, SAMPLES = MINI_MOE / "heldout_ids.npy", 16


class Written(ProgramTest):
    """What shardq writes; few calibration tokens, as the format and not the quality is looked at."""

    def checked(self, *settings):
        arguments = [part for setting in settings for part in ("--set", setting)]
        result = self.quantize(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr + result.stdout)
        out = self.scratch / "out"
        ours = read_json(run("eval", out, "--tokens", HELDOUT, "--samples", SAMPLES, "--json", "--device", "cpu"))
        seen = check(out, tokens=HELDOUT, samples=SAMPLES)
        self.assertEqual(seen["packed_modules"], 4 * (4 + 16 * 3))
        return ours["perplexity"], seen

    def test_symmetric(self):
        ours, seen = self.checked()
        self.assertAlmostEqual(seen["perplexity_transformers"] / ours, 1, delta=0.01)

    def test_three_bits(self):
        ours, seen = self.checked("quantization.num_bits=3")
        self.assertAlmostEqual(seen["perplexity_transformers"] / ours, 1, delta=0.01)

    def test_asymmetric(self):
        ours, seen = self.checked("quantization.symmetric=false")
        self.assertAlmostEqual(seen["perplexity_decompressed"] / ours, 1, delta=0.01)


class Comparison(unittest.TestCase):
    """The comparison itself: pairs that must fail."""

    def parts(self):
        codes = torch.arange(-8, 8, dtype=torch.int8).repeat(4, 2)
        scale = torch.full((4, 1), 0.3, dtype=torch.bfloat16)
        return {"weight_packed": pack_to_int32(codes, 4), "weight_scale": scale, "weight_shape": torch.tensor([4, 32])}

    def scheme(self, **weights):
        group = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "channel", **weights}}
        return QuantizationConfig.model_validate({"config_groups": {"group_0": group}}).config_groups["group_0"]

    def test_equal_and_unequal_weights(self):
        weight = check_module("m", self.parts(), self.scheme(), None)
        check_module("m", self.parts(), self.scheme(), weight)
        changed = weight.clone()
        changed.view(torch.int16)[3, 7] ^= 1
        with self.assertRaisesRegex(AssertionError, "1 weights differ"):
            check_module("m", self.parts(), self.scheme(), changed)
        with self.assertRaisesRegex(AssertionError, "128 weights differ"):
            check_module("m", self.parts(), self.scheme(), weight[:, :16])

    def test_dirty_padding(self):
        words = np.array([[0x10]], np.int32)
        np.testing.assert_array_equal(unpacked(words, 3, 2), [[-4, -2]])
        with self.assertRaisesRegex(AssertionError, "behind the last code"):
            unpacked(words, 4, 1)

    def test_coverage(self):
        def configured(**keys):
            group = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "channel"}}
            return QuantizationConfig.model_validate({"config_groups": {"group_0": group}, **keys})

        tensors = {"a.weight_packed": torch.zeros(1), "b.weight": torch.zeros(2, 2), "norm.weight": torch.zeros(2)}
        self.assertEqual(check_coverage(tensors, configured(ignore=["b"])), ["a"])
        for ignore in ([], ["a", "b"], ["re:.*"]):
            with self.assertRaises(AssertionError):
                check_coverage(tensors, configured(ignore=ignore))


if __name__ == "__main__":
    if len(sys.argv) > 1 and pathlib.Path(sys.argv[1]).is_dir():
        main()
    else:
        unittest.main()
