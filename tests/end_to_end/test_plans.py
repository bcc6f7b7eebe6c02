"""Which way Hessians, tokens and weights take over the ranks: `shardq plan` on models of production shape. Their files are sparse (headers and
holes), since a plan reads no weights."""

import json
import struct
import sys
import unittest

from program import SOURCE, USAGE, ProgramTest, read_json, run

sys.path.insert(0, str(SOURCE / "bench"))
from model_shapes import SHAPES  # noqa: E402

SAMPLES, LENGTH = 512, 2048
TOKENS = SAMPLES * LENGTH


def tensors_of_one_layer(config):
    """Names and shapes of a Qwen3-MoE model with a single layer."""
    hidden, head, experts = config["hidden_size"], config["head_dim"], config["num_experts"]
    heads, kv, inner = config["num_attention_heads"] * head, config["num_key_value_heads"] * head, config["moe_intermediate_size"]
    layer = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "lm_head.weight": (config["vocab_size"], hidden),
              "model.norm.weight": (hidden,), layer + "input_layernorm.weight": (hidden,), layer + "post_attention_layernorm.weight": (hidden,),
              layer + "self_attn.q_proj.weight": (heads, hidden), layer + "self_attn.k_proj.weight": (kv, hidden),
              layer + "self_attn.v_proj.weight": (kv, hidden), layer + "self_attn.o_proj.weight": (hidden, heads),
              layer + "self_attn.q_norm.weight": (head,), layer + "self_attn.k_norm.weight": (head,), layer + "mlp.gate.weight": (experts, hidden)}  # fmt: skip
    for e in range(experts):
        for linear, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner))):
            shapes[f"{layer}mlp.experts.{e}.{linear}.weight"] = shape
    return shapes


class Plans(ProgramTest):
    def setUp(self):
        super().setUp()
        self.tokens = self.scratch / "tokens.npy"
        header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': ({SAMPLES}, {LENGTH}), }}".encode()
        header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
        self.tokens.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(4 * TOKENS))

    def model(self, shape):
        directory = self.scratch / shape
        if directory.exists():
            return directory
        directory.mkdir()
        config = SHAPES[shape] | {"num_hidden_layers": 1, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
        (directory / "config.json").write_text(json.dumps(config))
        header, end = {}, 0
        for name, dims in tensors_of_one_layer(config).items():
            size = 2
            for dim in dims:
                size *= dim
            header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        with open(directory / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        return directory

    def plan(self, shape, ranks, *arguments):
        return run("plan", SOURCE / "configs/qwen3-30b-a3b.yaml", "--model", self.model(shape), "--tokens", self.tokens, "--output", self.scratch / "out",
                   "--device", "cuda", "--ranks", ranks, "--json", *arguments)  # fmt: skip

    def layer(self, shape, ranks, *arguments):
        plan = read_json(self.plan(shape, ranks, *arguments))
        (layer,) = plan["layers"]
        return plan, layer

    def test_bytes_are_those_of_the_arithmetic(self):
        plan, layer = self.layer("deepseek-v3-experts", 8)
        hidden, inner, experts, attention = 7168, 2048, 256, 8192
        triangle = lambda n: 4 * n * (n + 1) // 2  # noqa: E731
        dense = triangle(hidden) + triangle(attention)
        routed = experts * (triangle(hidden) + triangle(inner))
        weights = 2 * experts * 3 * hidden * inner
        attention_weights = 2 * (2 * 8192 * hidden + 2 * 1024 * hidden)
        share = 7 / 8
        for key, expected in {"sent_all_reduce": 2 * (dense + routed) * share, "sent_reduce_scatter": (2 * dense + routed) * share,
                              "sent_all_to_all": 2 * dense * share + 2 * TOKENS // 8 * 8 * hidden * 2 * share,
                              "sent_weights": (weights + attention_weights) * share, "sent_weights_owned": attention_weights * share,
                              "sent_codes": (weights + attention_weights) / 2 * share}.items():  # fmt: skip
            self.assertAlmostEqual(layer[key], expected, delta=16, msg=key)
        self.assertAlmostEqual(layer["sent_all_reduce"] / 1e9, 50, delta=1)  # of DeepSeek-V3, as published arithmetic has it
        self.assertEqual(plan["tokens"], TOKENS)

    def test_the_cheapest_is_chosen(self):
        """Many tokens a weight: sums travel. Large experts: tokens travel, and each rank holds an eighth of the experts."""
        room = ("--set", "memory.hessian_budget=64GiB")  # no waves with either
        plan, layer = self.layer("deepseek-v3-experts", 8, *room)
        self.assertEqual((plan["reduce"], plan["read"]), ("all_to_all", "share"))
        sums, whole = self.layer("deepseek-v3-experts", 8, *room, "--set", "parallel.reduce=reduce_scatter")
        self.assertEqual(sums["reduce"], "reduce_scatter")
        self.assertLess(8 * layer["hessian_bytes"], 1.01 * whole["hessian_bytes"])
        self.assertLess(plan["memory_per_rank"]["peak_bytes"], sums["memory_per_rank"]["peak_bytes"])
        self.assertLess(plan["seconds"]["wire"], sums["seconds"]["wire"])
        plan, layer = self.layer("qwen3-30b-a3b", 8)
        self.assertEqual(plan["reduce"], "reduce_scatter")
        self.assertLess(layer["sent_reduce_scatter"] + layer["sent_weights"], layer["sent_all_to_all"] + layer["sent_weights_owned"])

    def test_where_tokens_cannot_travel(self):
        for ranks, arguments in ((1, ()), (300, ()), (8, ("--set", "calibration.experts=all")), (8, ("--set", "quantization.method=rtn"))):
            self.assertEqual(self.layer("deepseek-v3-experts", ranks, *arguments)[0]["reduce"], "reduce_scatter", f"{ranks} {arguments}")
        self.assertEqual(self.layer("deepseek-v3-experts", 1)[1]["sent_all_to_all"], 0)
        refused = self.plan("deepseek-v3-experts", 8, "--set", "calibration.experts=all", "--set", "parallel.reduce=all_to_all")
        self.assert_refused(refused, USAGE, "all_to_all", "calibration.experts")

    def test_the_text_names_all_three(self):
        result = run("plan", SOURCE / "configs/qwen3-30b-a3b.yaml", "--model", self.model("qwen3-30b-a3b"), "--tokens", self.tokens, "--output",
                     self.scratch / "out", "--device", "cuda", "--ranks", 8)  # fmt: skip
        self.assertEqual(result.returncode, 0, result.stderr)
        (wire,) = [line for line in result.stdout.splitlines() if line.startswith("wire")]
        for word in ("reduce_scatter", "all_reduce", "all_to_all", "weights", "codes"):
            self.assertIn(word, wire)


if __name__ == "__main__":
    unittest.main()
