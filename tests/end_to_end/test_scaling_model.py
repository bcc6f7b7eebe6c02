"""bench/scaling_model.py reckons with the bytes and FLOPs that `shardq plan` prints and with numbers worked out by hand; bench/scaling_study.py goes on where
it was cut off. Standard library only: without matplotlib the study draws nothing."""

import json
import subprocess
import sys
import unittest

from program import BINARY, MINI_MOE, SOURCE, ProgramTest, read_json, run

sys.path.insert(0, str(SOURCE / "bench"))
import scaling_layers  # noqa: E402
import scaling_model  # noqa: E402
import scaling_rates  # noqa: E402

MILLION = 1 << 20


class AgainstThePlan(ProgramTest):
    def test_bytes_and_flops(self):
        config = json.loads((MINI_MOE / "config.json").read_text())
        model = scaling_layers.model_from_config("mini-moe", config)
        (layer,) = model.layers
        self.assertEqual(layer.number, config["num_hidden_layers"])
        for ranks in (2, 3, 8):
            plan = read_json(run("plan", SOURCE / "configs/mini-moe.yaml", "--json", "--ranks", ranks, "--device", "cpu"))
            (kind,) = plan["layers"]
            tokens, length = plan["tokens"], plan["longest"]
            self.assertAlmostEqual(kind["forward_flops"], layer.forward_flops(tokens, length), delta=1e-9 * kind["forward_flops"])
            self.assertAlmostEqual(kind["hessian_flops"], layer.hessian_flops(tokens), delta=1e-9 * kind["hessian_flops"])
            for name in scaling_model.PLANS:
                sent = sum(scaling_layers.sent_bytes(layer, tokens, ranks, name).values())
                self.assertAlmostEqual(kind[f"sent_{name}"], sent, delta=len(layer.taps), msg=f"{name} on {ranks}")  # each tap is rounded down
            # The plan counts codes alone; scales of 4 bytes a group come on top.
            codes = scaling_layers.gathered_bytes(layer, ranks) / (1 + 4 / scaling_layers.GROUP)
            self.assertAlmostEqual(kind["sent_codes"], codes, delta=len(layer.taps))


class ByHand(unittest.TestCase):
    def test_deepseek_v3_on_eight_ranks(self):
        model = scaling_layers.model_of("deepseek-v3")
        dense, moe = model.layers
        self.assertEqual((dense.number, moe.number), (3, 58))
        # 256 experts, triangles of 7168 and 2048 inputs, fp32; an all-reduce sends 2 x 7/8 of it.
        experts = 256 * (7168 * 7169 / 2 + 2048 * 2049 / 2) * 4
        # Inputs of q_a with kv_a, q_b, kv_b and o, and the shared expert's.
        others = sum(n * (n + 1) / 2 * 4 for n in (7168, 1536, 512, 128 * 128, 7168, 2048))
        sent = {name: scaling_layers.sent_bytes(moe, MILLION, 8, name) for name in scaling_model.PLANS}
        self.assertAlmostEqual(sent["all_reduce"]["all_reduce"], 1.75 * (experts + others), delta=1)
        self.assertAlmostEqual(1.75 * experts / 1e9, 49.8, delta=0.1)
        self.assertAlmostEqual(sent["reduce_scatter"]["reduce_scatter"], 0.875 * experts, delta=1)
        # 131,072 tokens a rank, 8 rows each of 7168 bf16, 7/8 of them to others: 13.2 GB there, as much back.
        self.assertAlmostEqual(sent["all_to_all"]["all_to_all"], 2 * 131072 * 8 * 7168 * 2 * 7 / 8, delta=1)
        self.assertAlmostEqual(sent["all_to_all"]["all_to_all"] / 2e9, 13.2, delta=0.1)
        # 671 billion parameters: linears of layers, embedding and head, less norms and routers.
        self.assertAlmostEqual(model.linears() + 2 * 129280 * 7168, 671e9, delta=1e9)

    def test_other_published_sizes(self):
        for name, parameters in (("qwen3-30b-a3b", 30.5e9), ("qwen3-235b-a22b", 235e9), ("kimi-k2", 1026e9), ("llama-3-8b", 8.03e9), ("mixtral-8x7b", 46.7e9)):
            model = scaling_layers.model_of(name)
            self.assertAlmostEqual(model.linears() + 2 * model.vocab * model.hidden, parameters, delta=0.006 * parameters, msg=name)

    def test_memory_of_owners(self):
        rates, assumed = scaling_rates.Rates(), scaling_model.Assumptions()
        model = scaling_layers.model_of("deepseek-v3")
        rows = {plan: scaling_model.Job(model, MILLION, 8, plan, rates, assumed).predict() for plan in scaling_model.PLANS}
        self.assertEqual(rows["all_to_all"]["hessian_bytes"], 32 * 7168**2 * 4)  # its own 32 experts
        self.assertEqual(rows["all_reduce"]["hessian_bytes"], 128 * 7168**2 * 4)  # two waves of a quarter of the device's memory
        self.assertLess(rows["all_to_all"]["weight_bytes"], rows["all_reduce"]["weight_bytes"] / 4)
        self.assertEqual(rows["all_reduce"]["activation_bytes"], 2 * 131072 * (7168 + 18432))  # hidden states and the input of a dense down


class Fits(unittest.TestCase):
    def test_coefficients_come_back(self):
        terms = [(n**3, n**2, 1.0) for n in (10, 50, 200, 1000)]
        for wanted in ((2e-12, 3e-9, 5e-6), (2e-12, 0.0, 5e-6), (0.0, 1e-9, 0.0)):
            got = scaling_rates.fit([(x, scaling_rates.dot(wanted, x)) for x in terms])
            for g, w in zip(got, wanted):
                self.assertAlmostEqual(g, w, delta=1e-6 * max(wanted))

    def test_a_negative_coefficient_is_not_taken(self):
        got = scaling_rates.fit([((x, 1.0), 2 * x - 1) for x in (1.0, 2.0, 3.0)])
        self.assertGreaterEqual(min(got), 0)
        self.assertGreater(got[0], 1)

    def test_interpolation(self):
        table = {100: 1.0, 10000: 4.0}
        for at, wanted in ((1, 1.0), (100, 1.0), (1000, 2.0), (10000, 4.0), (10**6, 4.0)):
            self.assertAlmostEqual(scaling_rates.interpolate(table, at), wanted)

    def test_every_rate_is_positive(self):
        rates = scaling_rates.Rates()
        self.assertGreater(rates.linear_seconds(1024, 4096, 4096), 0)
        self.assertGreater(rates.gram_seconds(8192, 2048, 128, 2), rates.gram_seconds(8192, 2048, 128, 1))
        self.assertGreater(rates.solve_seconds(128, 1536, 2048, 128), rates.solve_seconds(64, 1536, 2048, 64))
        self.assertEqual(rates.solve_seconds(0, 1536, 2048, 0), 0)


class Study(ProgramTest):
    def study(self, samples):
        command = [sys.executable, "-B", SOURCE / "bench/scaling_study.py", "--shardq", BINARY, "--recipe", SOURCE / "configs/mini-moe.yaml", "--ranks", "1,2",
                   "--plans", "reduce_scatter,no_such_plan", "--samples", samples, "--set", "calibration.max_length=32", "--threads", "1",
                   "--output", self.scratch / "study", "--scratch", self.scratch]  # fmt: skip
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=SOURCE, timeout=300)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout

    def test_goes_on_where_it_was(self):
        first = self.study("2")
        self.assertIn("no_such_plan: this program does not know the plan, skipped", first)
        second = self.study("2,4")
        self.assertNotIn("1 rank -, 2 samples", second)
        runs = json.loads((self.scratch / "study/phases.json").read_text())["runs"]
        found = sorted((run["samples"], run["ranks"], run["plan"], run["tokens"]) for run in runs)
        self.assertEqual(found, [(2, 1, "-", 64), (2, 2, "reduce_scatter", 64), (4, 1, "-", 128), (4, 2, "reduce_scatter", 128)])
        self.assertEqual(len((self.scratch / "study/runs.csv").read_text().splitlines()), 5)
        self.assertEqual([path.name for path in self.scratch.iterdir() if path.is_dir()], ["study"], "scratch folders are left")


if __name__ == "__main__":
    unittest.main()
