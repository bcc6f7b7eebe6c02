"""plan, eval, inspect and version: what they print is JSON or text that says the truth about the bundled model and a run on it."""

import json
import unittest

from program import INPUT, MINI_MOE, SOURCE, ProgramTest, read_json, run

RECIPE = SOURCE / "configs/mini-moe.yaml"
LINEARS = 4 * (4 + 16 * 3)  # 4 layers: q, k, v, o and 16 experts of three


class Plan(ProgramTest):
    def plan(self, *arguments):
        return run("plan", RECIPE, "--output", self.scratch / "out", *arguments)

    def test_counts_and_bytes(self):
        plan = read_json(self.plan("--json"))
        self.assertEqual((plan["quantized_linears"], plan["ignored_linears"]), (LINEARS, 1 + 4))  # lm_head and four routers
        self.assertEqual((plan["samples"], plan["tokens"], plan["longest"]), (256, 256 * 512, 512))
        weights = json.loads((MINI_MOE / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
        self.assertEqual(plan["disk"]["input_bytes"], weights)
        (layer,) = plan["layers"]
        self.assertEqual((layer["count"], layer["hessian_bytes"]), (4, 16 * 128 * 128 * 4))
        self.assertGreater(plan["memory_per_rank"]["peak_bytes"], plan["memory_per_rank"]["hidden_bytes"])
        self.assertGreater(plan["seconds"]["total"], 0)
        self.assertFalse((self.scratch / "out").exists(), "a plan wrote something")

    def test_half_the_hidden_states_on_two_ranks(self):
        one, two = (read_json(self.plan("--json", "--ranks", ranks))["memory_per_rank"]["hidden_bytes"] for ranks in (1, 2))
        self.assertEqual(one, 2 * two)

    def test_a_small_budget_makes_waves(self):
        (layer,) = read_json(self.plan("--json", "--set", "memory.hessian_budget=400KiB"))["layers"]
        self.assertEqual(layer["waves"], 3)  # 16 experts of 64 KiB, six at once

    def test_text(self):
        result = self.plan()
        self.assertEqual(result.returncode, 0, result.stderr)
        for word in ("memory", "Hessian", "disk", "time"):
            self.assertIn(word, result.stdout)

    def test_every_recipe_is_read(self):
        """The recipes of models that are not here fail at the model, not at a key."""
        recipes = sorted((SOURCE / "configs").glob("*.yaml"))
        self.assertGreaterEqual(len(recipes), 5)
        for recipe in recipes:
            result = run("plan", recipe, "--model", self.scratch / "absent")
            self.assertEqual(result.returncode, INPUT, f"{recipe}: {result.stderr}")
            self.assertIn("absent", result.stderr)


class AfterARun(ProgramTest):
    def test_written_files_and_what_inspect_says(self):
        result = self.quantize()
        self.assertEqual(result.returncode, 0, result.stderr)
        report = read_json(run("inspect", self.scratch / "work", "--json"))
        self.assertEqual(len(report["modules"]), LINEARS)
        self.assertEqual(sum(report["verdicts"].values()), LINEARS)
        self.assertEqual((report["samples"], report["tokens"], report["ranks"]), (4, 4 * 64, 1))
        self.assertEqual(report["output_bytes"], sum(file.stat().st_size for file in (self.scratch / "out").glob("*.safetensors")))
        for layer in range(4):  # four experts a token
            used = [m["tokens"] for m in report["modules"] if m["layer"] == layer and m["module"].endswith("down_proj")]
            self.assertEqual(sum(used), 4 * report["tokens"])
        text = run("inspect", self.scratch / "work").stdout
        self.assertIn("tokens per expert", text)
        weights = read_json(run("inspect", self.scratch / "out", "--json"))["config_groups"]["group_0"]["weights"]
        self.assertEqual((weights["num_bits"], weights["group_size"], weights["symmetric"]), (4, 32, True))

        # Everything that is no weight came along; the recipe lies beside it.
        for file in MINI_MOE.iterdir():
            if file.suffix not in (".safetensors", ".npy") and file.name not in ("config.json", "model.safetensors.index.json"):
                self.assertEqual((self.scratch / "out" / file.name).read_bytes(), file.read_bytes(), file.name)
        self.assertTrue(list((self.scratch / "out").glob("*.yaml")), "no resolved recipe in the output")

        again = self.quantize()
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertIn("already finished", again.stdout)

    def test_the_resolved_recipe_runs_again(self):
        """The recipe written next to the output is complete: run as it stands, it gives the same bytes."""
        self.assertEqual(self.quantize().returncode, 0)
        (recipe,) = (self.scratch / "out").glob("*.yaml")
        again = run("quantize", recipe, "--output", self.scratch / "again", "--work", self.scratch / "again.work")
        self.assertEqual(again.returncode, 0, again.stderr)
        for file in (self.scratch / "out").glob("*.safetensors"):
            self.assertEqual(file.read_bytes(), (self.scratch / "again" / file.name).read_bytes(), file.name)


class Eval(ProgramTest):
    def evaluate(self, *arguments, **options):
        return read_json(run("eval", MINI_MOE, "--tokens", MINI_MOE / "heldout_ids.npy", "--device", "cpu", "--json", *arguments, **options))

    def test_ranks_share_the_samples(self):
        one, two = self.evaluate("--samples", 5), self.evaluate("--samples", 5, ranks=2)
        self.assertEqual(one["tokens"], 5 * 511)
        self.assertEqual(two["tokens"], one["tokens"])
        self.assertAlmostEqual(two["perplexity"], one["perplexity"], delta=1e-4 * one["perplexity"])

    def test_a_model_agrees_with_itself(self):
        self.assertEqual(self.evaluate("--samples", 2, "--against", MINI_MOE)["top1_agreement"], 1)

    def test_text(self):
        result = run("eval", MINI_MOE, "--tokens", MINI_MOE / "heldout_ids.npy", "--samples", 1, "--device", "cpu")
        self.assertRegex(result.stdout, r"perplexity \d+\.\d+ over 511 tokens")


class Version(unittest.TestCase):
    def test_says_what_was_built(self):
        self.assertRegex(run("version").stdout, r"^shardq \d+\.\d+\.\d+ \(.*CUDA .*MPI ")


if __name__ == "__main__":
    unittest.main()
