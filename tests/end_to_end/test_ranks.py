"""The number of ranks, the plan of reduction and the memory budget decide how a run is carried out, not what comes out of it.

On the CPU, sums are order-free and chunks are fixed, so outputs are the same bytes. With parallel.reproducible=false sums differ in their last bits; then
one code on a rounding boundary moves every later activation a little, and the share of codes that differ grows over the layers."""

import json
import random
import unittest

from checkpoints import differing_codes, module_records, same_files, tensors
from program import MINI_MOE, SOURCE, ProgramTest, run

SHARE = 1e-2  # of codes that may differ where sums are not order-free (4 layers, 4096 calibration tokens)


class Ranks(ProgramTest):
    def job(self, name, *arguments, ranks=1, tokens=None, fault=None, environment=None):
        output, work = self.scratch / name, self.scratch / f"{name}.work"
        result = run("quantize", SOURCE / "configs/mini-moe.yaml", "--model", MINI_MOE, "--tokens", tokens or MINI_MOE / "calib_ids.npy",
                     "--output", output, "--work", work, "--device", "cpu", "--set", "calibration.max_samples=32",
                     "--set", "calibration.max_length=128", *arguments, ranks=ranks, threads=1, fault=fault, environment=environment)  # fmt: skip
        self.assertEqual(result.returncode, 0, result.stderr + result.stdout)
        self.said = result.stdout + result.stderr
        return output

    def assert_same(self, one, other, exact=True):
        differing, compared = differing_codes(one, other)
        print(f"{other.name} against {one.name}: {differing} of {compared} codes differ")
        self.assertLessEqual(differing, 0 if exact else SHARE * compared)
        if exact:
            self.assertEqual(same_files(one, other), [])
        left, right = (module_records(d.with_name(d.name + ".work")) for d in (one, other))
        self.assertEqual(left.keys(), right.keys())
        for module, record in left.items():
            for key in ("verdict", "tokens", "dead_columns"):
                self.assertEqual(record[key], right[module][key], f"{module} {key}")
            # Damping is a fixed share of the Hessian's mean diagonal, so it tells whether the Hessians agree.
            self.assertAlmostEqual(record["damping"], right[module]["damping"], delta=(1e-12 if exact else 1e-3) * abs(record["damping"]), msg=module)

    def test_the_comparison_sees_a_flipped_code(self):
        one = self.job("one")
        copy = self.scratch / "copy"
        copy.mkdir()
        for path in one.iterdir():
            data = bytearray(path.read_bytes())
            if path.name.startswith("model-00001"):
                name = next(n for n in tensors(one) if n.startswith("model.layers.0.") and n.endswith("packed"))
                data[data.find(tensors(one)[name][2])] ^= 1
            (copy / path.name).write_bytes(data)
        self.assertEqual(differing_codes(one, copy)[0], 1)
        self.assertEqual(same_files(one, copy), ["model-00001-of-00005.safetensors"])

    def test_one_to_four_ranks(self):
        one = self.job("ranks1")
        for ranks in (2, 3, 4):
            other = self.job(f"ranks{ranks}", ranks=ranks)
            self.assert_same(one, other)
            if ranks == 3:
                self.assertEqual(same_files(other, self.job("ranks3again", ranks=3)), [], "the same job twice")

    def test_reductions_to_owners_and_to_all_give_the_same(self):
        scatter = self.job("scatter", "--set", "parallel.reduce=reduce_scatter", ranks=3)
        everywhere = self.job("everywhere", "--set", "parallel.reduce=all_reduce", ranks=3)
        self.assert_same(scatter, everywhere)

    def test_tokens_to_the_owners_of_experts_give_the_same(self):
        owners = ("--set", "parallel.reduce=all_to_all")
        one = self.job("one")
        for ranks in (2, 3, 4):
            self.assert_same(one, self.job(f"owners{ranks}", *owners, ranks=ranks))
        # More ranks than chunks, and in three waves: ranks without tokens and owners that walk their rows several times.
        self.assert_same(one, self.job("owner_waves", *owners, "--set", f"memory.hessian_budget={2 * 128 * 128 * 4}", ranks=3))
        for arguments in (("--set", "calibration.sequential=layer"), ("--set", "quantization.method=rtn"),
                          ("--set", 'ignore=[lm_head, "re:.*mlp.gate$", "re:.*layers.2.mlp.experts.3"]')):  # fmt: skip
            name = arguments[1].split("=")[0]
            self.assert_same(self.job(name + "1", *arguments), self.job(name + "3", *arguments, *owners, ranks=3))
        plain = ("--set", "parallel.reproducible=false")
        self.assert_same(one, self.job("plain", *plain, *owners, ranks=2), exact=False)

    def test_tokens_to_owners_of_a_ragged_set(self):
        choose = random.Random(6)
        path = self.scratch / "ragged.jsonl"
        path.write_text("\n".join(json.dumps([choose.randrange(2048) for _ in range(choose.randint(1, 900))]) for _ in range(9)))
        arguments = ("--set", "calibration.max_length=0")
        self.assert_same(self.job("ragged1", *arguments, tokens=path), self.job("ragged4", *arguments, "--set", "parallel.reduce=all_to_all", tokens=path, ranks=4))

    def test_collectives_may_be_as_late_as_they_like(self):
        """Deferred ones then run at the last moment, on whatever their memory holds by then; on a GPU they run beside other work."""
        one, late = self.job("one"), {"SHARDQ_LATE_COLLECTIVES": "1"}
        chunks = ("--set", "calibration.chunk_tokens=512")
        small = self.job("small", *chunks)
        for plan in ("all_reduce", "reduce_scatter", "all_to_all"):
            reduce = ("--set", f"parallel.reduce={plan}")
            self.assert_same(one, self.job("late_" + plan, *reduce, ranks=3, environment=late))
            self.assert_same(small, self.job("late_small_" + plan, *reduce, *chunks, "--set", "parallel.read=share", ranks=2, environment=late))
        plain = ("--set", "parallel.reproducible=false", "--set", "calibration.sequential=layer", *chunks)
        for plan in ("reduce_scatter", "all_to_all"):
            reduce = ("--set", f"parallel.reduce={plan}")
            self.assert_same(self.job("now_" + plan, *plain, *reduce, ranks=2), self.job("late_layer_" + plan, *plain, *reduce, ranks=2, environment=late))

    def test_sums_that_leave_in_slices_are_those_that_leave_at_once(self):
        """Without order-free sums, Hessians of experts set out while the last chunk is added, in slices with a part of every owner's matrices."""
        plain = ("--set", "parallel.reproducible=false", "--set", "calibration.chunk_tokens=512")
        waves = ("--set", f"memory.hessian_budget={5 * 128 * 128 * 4}")
        for ranks, plan, more in ((2, "reduce_scatter", ()), (3, "reduce_scatter", ()), (3, "all_reduce", ()), (3, "reduce_scatter", waves)):
            arguments = (*plain, "--set", f"parallel.reduce={plan}", *more)
            name = f"{plan}{ranks}{len(more)}"
            once = self.job(name, *arguments, ranks=ranks, environment={"SHARDQ_REDUCE_SLICES": "0"})
            for slices in (1, 3):
                for late in ({}, {"SHARDQ_LATE_COLLECTIVES": "1"}):
                    other = self.job(f"{name}.{slices}{len(late)}", *arguments, ranks=ranks, environment={"SHARDQ_REDUCE_SLICES": str(slices), **late})
                    self.assert_same(once, other)
        # Ranks with fewer chunks than others, and with none, take part in every slice, at the same place among the collectives.
        for ranks, plan, samples in ((4, "reduce_scatter", 2), (2, "reduce_scatter", 3), (3, "all_reduce", 5)):
            few = (*plain[:2], "--set", "calibration.chunk_tokens=128", "--set", f"calibration.max_samples={samples}", "--set", f"parallel.reduce={plan}",
                   "--set", "watchdog_seconds=20")  # fmt: skip
            once = self.job(f"few{ranks}", *few, ranks=ranks, environment={"SHARDQ_REDUCE_SLICES": "0"})
            for slices in ("1", "3", "auto"):
                self.assert_same(once, self.job(f"few{ranks}.{slices}", *few, ranks=ranks, environment={"SHARDQ_REDUCE_SLICES": slices}))

    def test_shares_of_the_weights_give_the_same(self):
        one, share = self.job("one"), ("--set", "parallel.read=share")
        for ranks in (2, 3):
            self.assert_same(one, self.job(f"share{ranks}", *share, ranks=ranks))
        self.assert_same(one, self.job("share_owners", *share, "--set", "parallel.reduce=all_to_all", ranks=3))

    def test_activations_in_host_memory_give_the_same(self):
        one, away = self.job("one"), ("--set", "memory.offload=always")
        self.assert_same(one, self.job("away1", *away))
        self.assert_same(one, self.job("away3", *away, "--set", "parallel.reduce=all_to_all", ranks=3))
        self.assert_same(self.job("layer", "--set", "calibration.sequential=layer"), self.job("layer_away", *away, "--set", "calibration.sequential=layer"))

    def test_memory_that_runs_out_sends_activations_away(self):
        sums = ("--set", "calibration.chunk_tokens=512", "--set", "parallel.reduce=reduce_scatter")
        one = self.job("one", *sums)
        for visit in (3, 9, 20):
            self.assert_same(one, self.job(f"out{visit}", *sums, ranks=2, fault=f"oom@forward#{visit},rank=1"))
            self.assertIn("activations go to host memory", self.said)
        self.assert_same(one, self.job("hessian", *sums, fault="oom@new_hessian#5"))
        # Where other ranks take part there is no second try: the job ends, and says of what.
        name = self.scratch / "owners"
        result = run("quantize", SOURCE / "configs/mini-moe.yaml", "--model", MINI_MOE, "--tokens", MINI_MOE / "calib_ids.npy", "--output", name,
                     "--work", f"{name}.work", "--device", "cpu", "--set", "calibration.max_samples=8", "--set", "parallel.reduce=all_to_all", ranks=2,
                     threads=1, fault="oom@forward#3,rank=1")  # fmt: skip
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("out of memory", result.stderr)
        self.assertIn("rank 1", result.stderr)

    def test_every_architecture(self):
        """The tiny models of every architecture and of every way to store experts."""
        models = [path for path in sorted((SOURCE / "tests/golden/data").iterdir()) if path.is_dir()]
        self.assertGreaterEqual(len(models), 18)
        for model in models:
            choose, vocabulary = random.Random(1), json.loads((model / "config.json").read_text())["vocab_size"]
            tokens = self.scratch / f"{model.name}.jsonl"
            tokens.write_text("\n".join(json.dumps([choose.randrange(vocabulary) for _ in range(choose.randint(1, 60))]) for _ in range(11)))
            outputs = []
            for ranks, arguments in ((1, ()), (3, ("parallel.reduce=all_to_all", "parallel.read=share")), (2, ("parallel.read=share", "memory.offload=always"))):
                outputs.append(self.scratch / f"{model.name}.{ranks}")
                result = run("quantize", "--model", model, "--tokens", tokens, "--output", outputs[-1], "--work", f"{outputs[-1]}.work", "--device", "cpu",
                             "--set", "quantization.group_size=-1", *(word for argument in arguments for word in ("--set", argument)), ranks=ranks,
                             threads=1)  # fmt: skip
                self.assertEqual(result.returncode, 0, f"{model.name}: {result.stderr}")
                self.assertEqual(same_files(outputs[0], outputs[-1]), [], model.name)

    def test_plain_sums_differ_a_little_only(self):
        plain = ("--set", "parallel.reproducible=false")
        one, scatter = self.job("plain1", *plain), self.job("plain3", *plain, "--set", "parallel.reduce=reduce_scatter", ranks=3)
        self.assert_same(one, scatter, exact=False)
        self.assert_same(scatter, self.job("plain_all", *plain, "--set", "parallel.reduce=all_reduce", ranks=3), exact=False)
        self.assert_same(one, self.job("exact1"), exact=False)

    def test_ragged_samples(self):
        choose = random.Random(5)
        path = self.scratch / "ragged.jsonl"
        path.write_text("\n".join(json.dumps([choose.randrange(2048) for _ in range(choose.randint(1, 200))]) for _ in range(23)))
        arguments = ("--set", "calibration.max_length=0")
        self.assert_same(self.job("ragged1", *arguments, tokens=path), self.job("ragged4", *arguments, tokens=path, ranks=4))

    def test_waves_change_nothing(self):
        # 16 experts with Hessians of 128 x 128 floats; six of them fit, so three waves.
        one = self.job("whole")
        waves = self.job("waves", "--set", f"memory.hessian_budget={6 * 128 * 128 * 4}")
        self.assert_same(one, waves)
        self.assert_same(one, self.job("waves2", "--set", f"memory.hessian_budget={6 * 128 * 128 * 4}", ranks=2))

    def test_every_expert_sees_every_token(self):
        arguments = ("--set", "calibration.experts=all", "--set", "calibration.max_samples=8")
        one = self.job("all1", *arguments)
        self.assert_same(one, self.job("all2", *arguments, ranks=2))
        for record in module_records(self.scratch / "all1.work").values():
            self.assertEqual(record["tokens"], 8 * 128)

    def test_layer_by_layer(self):
        arguments = ("--set", "calibration.sequential=layer")
        self.assert_same(self.job("layer1", *arguments), self.job("layer2", *arguments, ranks=2))
        # Sums that are reduced while another tap is solved, and the pool of experts beside them.
        plain = (*arguments, "--set", "parallel.reproducible=false", "--set", "parallel.reduce=reduce_scatter")
        differing, compared = differing_codes(self.job("plain1", *plain), self.job("plain2", *plain, ranks=2))
        print(f"plain layer by layer: {differing} of {compared} codes differ")
        self.assertLessEqual(differing, SHARE * compared)

    def test_ignored_linears_stay_as_they_are(self):
        out = self.job("ignoring", "--set", 'ignore=[lm_head, "re:.*mlp.gate$", "re:.*layers.1.self_attn.k_proj", "re:.*layers.2.mlp.experts"]')
        names, before = tensors(out), tensors(MINI_MOE)
        for kept in ("model.layers.1.self_attn.k_proj.weight", "model.layers.2.mlp.experts.3.up_proj.weight", "lm_head.weight"):
            self.assertEqual(names[kept], before[kept])
        self.assertIn("model.layers.1.self_attn.q_proj.weight_packed", names)
        self.assertNotIn("model.layers.1.self_attn.k_proj.weight_packed", names)
        ignore = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
        self.assertIn("model.layers.1.self_attn.k_proj", ignore)
        self.assertIn("model.layers.0.mlp.gate", ignore)


if __name__ == "__main__":
    unittest.main()
