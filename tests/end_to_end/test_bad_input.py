"""What a user or a file can get wrong: one clear line, the documented exit code, nothing left under the output's name."""

import json
import os
import resource
import shutil
import struct
import subprocess
import unittest

from program import DISK, INPUT, MINI_MOE, SOURCE, USAGE, ProgramTest, read_safetensors, run, write_safetensors

SHARD = "model-00002-of-00002.safetensors"


class DamagedModel(ProgramTest):
    """Every case edits one shard or the index of a copy of the bundled model."""

    def setUp(self):
        super().setUp()
        self.model = self.model_copy()
        self.shard = self.model / SHARD

    def edit_header(self, change):
        """change(header, names): names are the tensors in file order. Returns their names."""
        header, buffer = read_safetensors(self.shard)
        names = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
        change(header, names)
        write_safetensors(self.shard, header, buffer)
        return names

    def test_the_copy_itself_is_fine(self):
        result = self.quantize(model=self.model)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_missing_shard(self):
        self.shard.unlink()
        self.assert_refused(self.quantize(model=self.model), INPUT, SHARD)

    def test_truncated_shard(self):
        os.truncate(self.shard, self.shard.stat().st_size - 1)
        self.assert_refused(self.quantize(model=self.model), INPUT, SHARD)

    def test_index_names_a_tensor_that_its_shard_lacks(self):
        index = self.model / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"]["model.layers.0.self_attn.extra.weight"] = SHARD
        index.write_text(json.dumps(content))
        self.assert_refused(self.quantize(model=self.model), INPUT, "model.layers.0.self_attn.extra.weight", SHARD)

    def test_header_longer_than_the_file(self):
        data = bytearray(self.shard.read_bytes())
        struct.pack_into("<Q", data, 0, len(data))
        self.shard.write_bytes(data)
        self.assert_refused(self.quantize(model=self.model), INPUT, SHARD, "header")

    def test_overlapping_offsets(self):
        def overlap(header, names):
            begin, end = header[names[1]]["data_offsets"]
            header[names[1]]["data_offsets"] = [begin - 2, end - 2]

        names = self.edit_header(overlap)
        result = self.quantize(model=self.model)
        self.assert_refused(result, INPUT, SHARD)
        self.assertTrue(any(name in result.stderr for name in names[:3]), result.stderr)

    def test_offsets_outside_the_file(self):
        def outside(header, names):
            header[names[-1]]["data_offsets"][1] += 1 << 40

        names = self.edit_header(outside)
        self.assert_refused(self.quantize(model=self.model), INPUT, SHARD, names[-1])

    def test_duplicate_key(self):
        header, buffer = read_safetensors(self.shard)
        name = next(n for n in header if n != "__metadata__")
        text = json.dumps(header)
        write_safetensors(self.shard, f'{{"{name}": {json.dumps(header[name])}, {text[1:]}', buffer)
        self.assert_refused(self.quantize(model=self.model), INPUT, SHARD, name)

    def test_shape_that_does_not_match_the_bytes(self):
        def reshape(header, names):
            header[names[0]]["shape"][0] += 1

        names = self.edit_header(reshape)
        self.assert_refused(self.quantize(model=self.model), INPUT, SHARD, names[0])

    def nonfinite(self, bits):
        header, buffer = read_safetensors(self.shard)
        name = next(n for n in sorted(header) if n.endswith("experts.3.down_proj.weight"))
        begin, _ = header[name]["data_offsets"]
        damaged = bytearray(buffer)
        struct.pack_into("<H", damaged, begin + 2 * 12345, bits)  # bf16, flat index 12345
        write_safetensors(self.shard, header, bytes(damaged))
        row, column = divmod(12345, header[name]["shape"][1])
        result = self.quantize(model=self.model)
        self.assert_refused(result, INPUT, name)
        self.assertTrue("12345" in result.stderr or f"{row}, {column}" in result.stderr, result.stderr)

    def test_nan_in_a_weight(self):
        self.nonfinite(0x7FC0)

    def test_infinity_in_a_weight(self):
        self.nonfinite(0xFF80)

    def plant_nan(self, name):
        for shard in sorted(self.model.glob("*.safetensors")):
            header, buffer = read_safetensors(shard)
            if name in header:
                damaged = bytearray(buffer)
                struct.pack_into("<H", damaged, header[name]["data_offsets"][0] + 2 * 77, 0x7FC0)
                write_safetensors(shard, header, bytes(damaged))
                return
        self.fail(f"no tensor {name}")

    def test_nan_outside_the_layers(self):
        for name in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"):
            with self.subTest(name):
                shutil.rmtree(self.model)
                self.model_copy()
                self.plant_nan(name)
                self.assert_refused(self.quantize(model=self.model, ranks=2, limit_s=60), INPUT, name, "77")

    def test_nan_that_nobody_looked_for_shows_in_the_loss(self):
        self.plant_nan("model.layers.1.mlp.experts.3.down_proj.weight")
        self.assert_refused(self.quantize("--set", "calibration.check_finite=false", model=self.model), INPUT, "layers.1", "not finite")

    def test_unknown_architecture(self):
        config = json.loads((self.model / "config.json").read_text())
        config["architectures"], config["model_type"] = ["MambaForCausalLM"], "mamba"
        (self.model / "config.json").write_text(json.dumps(config))
        self.assert_refused(self.quantize(model=self.model), INPUT, "mamba")

    def test_unknown_activation(self):
        config = json.loads((self.model / "config.json").read_text())
        config["hidden_act"] = "squareplus"
        (self.model / "config.json").write_text(json.dumps(config))
        self.assert_refused(self.quantize(model=self.model), INPUT, "squareplus")

    def test_already_quantized_by_something_else(self):
        config = json.loads((self.model / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "awq", "bits": 4}
        (self.model / "config.json").write_text(json.dumps(config))
        self.assert_refused(self.quantize(model=self.model), INPUT, "awq")

    def test_two_ranks_end_with_the_same_message(self):
        self.shard.unlink()
        result = self.quantize(model=self.model, ranks=2, limit_s=60)
        self.assertEqual(result.returncode, INPUT, result.stderr)
        self.assertIn(SHARD, result.stderr)


class BadTokens(ProgramTest):
    def tokens(self, lines):
        path = self.scratch / "tokens.jsonl"
        path.write_text("".join(line + "\n" for line in lines))
        return path

    def test_good_lines_are_fine(self):
        result = self.quantize(tokens=self.tokens(["[1, 2, 3]", '{"input_ids": [5, 6, 7, 8]}']))
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_token_id_beyond_the_vocabulary(self):
        path = self.tokens(["[1, 2, 3]", "[4, 2048, 6]"])
        self.assert_refused(self.quantize(tokens=path), INPUT, "tokens.jsonl", "2048")

    def test_negative_token_id(self):
        self.assert_refused(self.quantize(tokens=self.tokens(["[1, -7, 3]"])), INPUT, "tokens.jsonl", "-7")

    def test_empty_sample(self):
        self.assert_refused(self.quantize(tokens=self.tokens(["[1, 2, 3]", "[]"])), INPUT, "tokens.jsonl", "empty")

    def test_malformed_line(self):
        self.assert_refused(self.quantize(tokens=self.tokens(["[1, 2, 3]", "[4, "])), INPUT, "tokens.jsonl")

    def test_no_samples(self):
        self.assert_refused(self.quantize(tokens=self.tokens([])), INPUT, "tokens.jsonl")

    def test_missing_file(self):
        self.assert_refused(self.quantize(tokens=self.scratch / "absent.npy"), INPUT, "absent.npy")


class BadRecipe(ProgramTest):
    def recipe(self, text):
        path = self.scratch / "recipe.yaml"
        path.write_text(text)
        return run("quantize", path, "--model", MINI_MOE, "--tokens", MINI_MOE / "calib_ids.npy",
                   "--output", self.scratch / "out", "--work", self.scratch / "work")  # fmt: skip

    def test_unknown_key_with_the_nearest_known_one(self):
        result = self.recipe("scheme: W4A16\nquantization:\n  grup_size: 32\n")
        self.assert_refused(result, USAGE, "recipe.yaml:3", "grup_size", "quantization.group_size")

    def test_unknown_key_on_the_command_line(self):
        self.assert_refused(self.quantize("--set", "solver.dampening_fraction=0.1"), USAGE, "solver.dampening_frac")

    def test_value_of_the_wrong_kind(self):
        self.assert_refused(self.recipe("solver:\n  block_size: many\n"), USAGE, "recipe.yaml:2", "block_size", "many")

    def test_not_yaml(self):
        self.assert_refused(self.recipe("scheme: [W4A16\n"), USAGE, "recipe.yaml")

    def test_missing_recipe(self):
        self.assert_refused(run("quantize", self.scratch / "absent.yaml"), USAGE, "absent.yaml")

    def test_unknown_scheme(self):
        self.assert_refused(self.quantize("--scheme", "W4A15"), USAGE, "W4A15", "W4A16")

    def test_scheme_that_the_output_format_cannot_hold(self):
        self.assert_refused(self.quantize("--set", "quantization.num_bits=9"), USAGE, "num_bits", "9")

    def test_group_that_divides_no_layer_lists_them_all(self):
        result = self.quantize("--set", "quantization.group_size=96")
        self.assertEqual(result.returncode, USAGE, result.stderr)
        for layer in range(4):  # the experts of a layer are alike: the first stands for them
            for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.experts.0.down_proj"):
                self.assertIn(f"model.layers.{layer}.{module}", result.stderr)

    def test_targets_that_match_nothing(self):
        self.assert_refused(self.recipe("targets: [\"re:.*no_such_proj\"]\n"), USAGE, "no linear to quantize")

    def test_bad_regular_expression(self):
        self.assert_refused(self.recipe("ignore: [\"re:(\"]\n"), USAGE, "re:(")

    def test_missing_model(self):
        self.assert_refused(run("quantize", "--tokens", MINI_MOE / "calib_ids.npy", "--output", self.scratch / "out"), USAGE, "model")

    def test_counts_and_sizes_out_of_range(self):
        for ranks in ("0", "-3"):
            self.assertNotEqual(run("plan", SOURCE / "configs/mini-moe.yaml", "--ranks", ranks).returncode, 0)
        self.assert_refused(self.quantize("--set", "memory.hessian_budget=99999999999999999999GiB"), USAGE, "hessian_budget", "size")
        self.assert_refused(self.quantize("--set", "compute=f8"), USAGE, "one of bf16, f32")

    def test_resume_required_with_nothing_to_resume(self):
        self.assert_refused(self.quantize("--resume", "require"), USAGE, "resume")


class BadOutput(ProgramTest):
    def test_output_that_already_holds_something(self):
        (self.scratch / "out").mkdir()
        keep = self.scratch / "out/precious.txt"
        keep.write_text("mine")
        self.assert_refused(self.quantize(), USAGE, "out")
        self.assertEqual(keep.read_text(), "mine")

    def test_output_is_the_source(self):
        self.assert_refused(self.quantize(output=MINI_MOE), USAGE, "mini-moe")

    def test_a_write_that_fails_half_way(self):
        """No file may pass 300 kB: writes fail with EFBIG, as they fail with ENOSPC on a full disk."""

        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

        # restore_signals=False: Python ignores SIGXFSZ, and so does the program then.
        result = self.quantize(preexec_fn=limit, restore_signals=False)
        self.assert_refused(result, DISK, "cannot write", self.scratch)
        self.assertFalse((self.scratch / "out").exists(), "half a checkpoint under the final name")

    def test_full_disk(self):
        small = self.scratch / "small"
        small.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], capture_output=True).returncode != 0:
            self.skipTest("mounting a small file system needs root")
        self.addCleanup(subprocess.run, ["umount", small])
        result = self.quantize(output=small / "out")
        self.assertEqual(result.returncode, DISK, result.stderr)
        self.assertIn(str(small), result.stderr)
        self.assertFalse((small / "out").exists(), "half a checkpoint under the final name")


class QuantizedSource(ProgramTest):
    def test_a_model_that_is_quantized_already(self):
        first = self.scratch / "first"
        done = self.quantize("--set", "quantization.method=rtn", output=first)
        self.assertEqual(done.returncode, 0, done.stderr)
        result = self.quantize(model=first)
        self.assert_refused(result, INPUT, first, "quantized already")


class BadCommandLine(unittest.TestCase):
    def test_no_subcommand(self):
        self.assertEqual(run().returncode, USAGE)

    def test_unknown_flag(self):
        result = run("quantize", "--modle", "x")
        self.assertEqual(result.returncode, USAGE)
        self.assertIn("--modle", result.stderr + result.stdout)

    def test_unknown_device(self):
        result = run("eval", MINI_MOE, "--tokens", MINI_MOE / "heldout_ids.npy", "--device", "abacus")
        self.assertEqual(result.returncode, USAGE)

    def test_eval_of_a_directory_that_is_none(self):
        result = run("eval", SOURCE / "configs", "--tokens", MINI_MOE / "heldout_ids.npy")
        self.assertEqual(result.returncode, INPUT)
        self.assertIn("config.json", result.stderr)


if __name__ == "__main__":
    unittest.main()
