"""Perplexity of the bundled model before and after, as `shardq eval` sees the written files, two ranks."""

import functools
import json
import unittest

from program import MINI_MOE, SOURCE, ProgramTest, read_json, run

HELDOUT = 128  # the first held-out sequences
# Per cent over full precision. Rounding to nearest gives 5.8 and 36.0, so neither bound is met by accident.
BOUNDS = {4: 3.2, 3: 16.5}


def perplexity(directory, samples):
    return read_json(run("eval", directory, "--tokens", MINI_MOE / "heldout_ids.npy", "--samples", samples, "--json", "--device", "cpu"))


class Quality(ProgramTest):
    def test_full_precision_over_all_held_out_sequences(self):
        # 10.4366 by transformers in fp32, 10.440 in bf16.
        result = perplexity(MINI_MOE, 0)
        self.assertAlmostEqual(result["perplexity"], 10.44, delta=0.01)
        self.assertEqual(result["tokens"], 256 * 511)

    def quantized(self, *settings):
        arguments = [part for setting in settings for part in ("--set", setting)]
        result = run("quantize", SOURCE / "configs/mini-moe.yaml", "--output", self.scratch / "out", "--work", self.scratch / "work",
                     "--device", "cpu", *arguments, ranks=2, threads=1)  # fmt: skip
        self.assertEqual(result.returncode, 0, result.stderr + result.stdout)
        return perplexity(self.scratch / "out", HELDOUT)

    @staticmethod
    @functools.cache
    def before():
        return perplexity(MINI_MOE, HELDOUT)["perplexity"]

    def increase(self, quantized):
        before = Quality.before()
        self.assertAlmostEqual(before, 8.285, delta=0.01)
        return 100 * (quantized["perplexity"] / before - 1)

    def test_four_bits_in_groups_of_32(self):
        increase = self.increase(self.quantized())
        print(f"W4 g32: {increase:+.2f} %")
        self.assertLessEqual(increase, BOUNDS[4])
        self.assertGreater(increase, 0.5, "better than any 4-bit rounding can be: are these the quantized weights?")

        report = json.loads((self.scratch / "work/report.json").read_text())
        self.assertTrue(report["phases"])
        modules = [json.loads(line) for line in (self.scratch / "work/metrics.jsonl").read_text().splitlines()]
        named = {entry["module"]: entry for entry in modules if "module" in entry}
        self.assertEqual(len(named), 4 * (4 + 16 * 3))  # 4 layers: q, k, v, o and 16 experts of three
        for name, entry in named.items():
            self.assertTrue(entry["verdict"].startswith("gptq"), f"{name}: {entry}")

    def test_three_bits_in_groups_of_32(self):
        increase = self.increase(self.quantized("quantization.num_bits=3"))
        print(f"W3 g32: {increase:+.2f} %")
        self.assertLessEqual(increase, BOUNDS[3])
        self.assertGreater(increase, 5)

    def test_rounding_to_nearest_is_worse(self):
        """The bounds mean something: without GPTQ they are missed by far."""
        increase = self.increase(self.quantized("quantization.num_bits=3", "quantization.method=rtn", "quantization.observer=minmax"))
        print(f"W3 g32, rounded: {increase:+.2f} %")
        self.assertGreater(increase, 1.5 * BOUNDS[3])


if __name__ == "__main__":
    unittest.main()
