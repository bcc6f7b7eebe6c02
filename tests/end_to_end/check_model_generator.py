"""bench/make_model.py: transformers opens what it writes, activations are finite, a seed gives the same bytes."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
try:
    import numpy
    import torch
    from transformers import AutoModelForCausalLM
except ImportError as error:
    print(f"skipped: {error} (jobs/setup.sh tests installs it)")
    sys.exit(77)


def generate(directory, shape, *arguments):
    program = [sys.executable, "-B", str(SOURCE / "bench/make_model.py"), str(directory), "--shape", shape]
    settings = ["--scale", "tiny", "--shard-gb", "0.0005", *arguments]
    subprocess.run(program + settings, check=True, stdout=subprocess.DEVNULL)


class ModelGenerator(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.scratch = pathlib.Path(scratch.name)

    def test_transformers_opens_every_shape(self):
        for shape in ("qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b", "llama-3-8b", "llama-3-70b", "deepseek-v3-experts"):
            with self.subTest(shape):
                directory, tokens = self.scratch / shape, self.scratch / f"{shape}.npy"
                shape_of_tokens = ("--samples", "4", "--length", "96")
                generate(directory, shape, "--layers", "3", "--tokens-out", str(tokens), *shape_of_tokens)
                model, loading = AutoModelForCausalLM.from_pretrained(
                    directory, dtype=torch.bfloat16, output_loading_info=True
                )
                for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
                    self.assertFalse(loading[key], key)
                self.assertEqual(len(model.model.layers), 3)
                ids = torch.tensor(numpy.load(tokens)).long()
                self.assertEqual(tuple(ids.shape), (4, 96))
                with torch.no_grad():
                    result = model(ids, output_hidden_states=True)
                self.assertTrue(torch.isfinite(result.logits).all())
                for hidden in result.hidden_states:
                    self.assertLess(hidden.float().std().item(), 10)
                    self.assertGreater(hidden.float().std().item(), 0.1)

    def test_the_seed_decides_the_bytes_and_the_number_of_threads_does_not(self):
        for name, arguments in (("a", ("--threads", "1")), ("b", ("--threads", "3")), ("c", ("--seed", "1"))):
            generate(self.scratch / name, "qwen3-30b-a3b", *arguments)
        files = sorted(path.name for path in (self.scratch / "a").glob("*.safetensors"))
        self.assertGreater(len(files), 1)
        for file in files:
            first, second, other = ((self.scratch / name / file).read_bytes() for name in "abc")
            self.assertEqual(first, second)
            self.assertNotEqual(first, other)


if __name__ == "__main__":
    unittest.main()
