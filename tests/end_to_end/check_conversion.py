"""jobs/gguf_to_hf.py and jobs/tokenize_text.py: a small GGUF file with known weights comes out as a Hugging Face directory, text as token files."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import gguf
    import numpy as np
    from safetensors import safe_open  # noqa: F401
    from tokenizers import Tokenizer
except ImportError as missing:
    print(f"skipped: {missing} (bash jobs/setup.sh tests installs it)")
    sys.exit(77)

from program import SOURCE, read_safetensors

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, LAYERS = 32, 4, 2, 64, 2
# Bytes as GPT-2's alphabet spells them, two merges, and two control tokens in front.
CHARACTERS = sorted("abcdefghijklmnopqrstuvwxyz0123456789.,'") + ["Ġ", "Ċ"]
MERGES = ["t h", "th e"]
TOKENS = ["<|endoftext|>", "<|im_end|>"] + CHARACTERS + ["th", "the"]


def llama_cpp_permuted(weight, heads):
    """Row order of q and k in a GGUF file, written out element by element: rows i and i + d/2 of a head become 2i and 2i + 1."""
    permuted = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            for half in range(2):
                permuted[head * size + 2 * i + half] = weight[head * size + half * (size // 2) + i]
    return permuted


def write_gguf(path, pre="smollm"):
    """Writes the file and returns the Hugging Face weights that it stands for; values are multiples of 1/8, exact in bf16."""
    random = np.random.default_rng(5)

    def values(*shape):
        return (random.integers(-64, 64, shape) / 8).astype(np.float32)

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)

    expected = {}

    def add(gguf_name, hf_name, weight, heads=0):
        expected[hf_name] = weight
        writer.add_tensor(gguf_name, llama_cpp_permuted(weight, heads) if heads else weight)

    size = HIDDEN // HEADS
    add("token_embd.weight", "model.embed_tokens.weight", values(len(TOKENS), HIDDEN))
    add("output_norm.weight", "model.norm.weight", values(HIDDEN))
    for layer in range(LAYERS):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        add(f"{theirs}.attn_norm.weight", f"{ours}.input_layernorm.weight", values(HIDDEN))
        add(f"{theirs}.ffn_norm.weight", f"{ours}.post_attention_layernorm.weight", values(HIDDEN))
        add(f"{theirs}.attn_q.weight", f"{ours}.self_attn.q_proj.weight", values(HIDDEN, HIDDEN), HEADS)
        add(f"{theirs}.attn_k.weight", f"{ours}.self_attn.k_proj.weight", values(KV_HEADS * size, HIDDEN), KV_HEADS)
        add(f"{theirs}.attn_v.weight", f"{ours}.self_attn.v_proj.weight", values(KV_HEADS * size, HIDDEN))
        add(f"{theirs}.attn_output.weight", f"{ours}.self_attn.o_proj.weight", values(HIDDEN, HIDDEN))
        add(f"{theirs}.ffn_gate.weight", f"{ours}.mlp.gate_proj.weight", values(INTERMEDIATE, HIDDEN))
        add(f"{theirs}.ffn_up.weight", f"{ours}.mlp.up_proj.weight", values(INTERMEDIATE, HIDDEN))
        add(f"{theirs}.ffn_down.weight", f"{ours}.mlp.down_proj.weight", values(HIDDEN, INTERMEDIATE))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def script(name, *arguments):
    return subprocess.run([sys.executable, "-B", SOURCE / "jobs" / name, *map(str, arguments)], capture_output=True, text=True)


class Conversion(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="shardq-test-")
        self.addCleanup(scratch.cleanup)
        self.scratch = pathlib.Path(scratch.name)
        self.model = self.scratch / "model"

    def convert(self, **options):
        expected = write_gguf(self.scratch / "tiny.gguf", **options)
        return expected, script("gguf_to_hf.py", self.scratch / "tiny.gguf", self.model)

    def test_weights_config_and_tokenizer(self):
        expected, result = self.convert()
        self.assertEqual(result.returncode, 0, result.stderr)
        header, buffer = read_safetensors(self.model / "model.safetensors")
        self.assertEqual(set(header) - {"__metadata__"}, set(expected))
        for name, weight in expected.items():
            begin, end = header[name]["data_offsets"]
            bits = np.frombuffer(buffer[begin:end], np.uint16).astype(np.uint32) << 16
            np.testing.assert_array_equal(bits.view(np.float32).reshape(header[name]["shape"]), weight, name)

        config = json.loads((self.model / "config.json").read_text())
        self.assertEqual((config["rms_norm_eps"], config["rope_theta"], config["head_dim"]), (1e-5, 50000.0, HIDDEN // HEADS))
        self.assertTrue(config["tie_word_embeddings"])
        tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        self.assertEqual(tokenizer.encode("the 12<|im_end|>").tokens, ["the", "Ġ", "1", "2", "<|im_end|>"])
        self.assertEqual(tokenizer.decode(tokenizer.encode("the cat, 12").ids), "the cat, 12")

    def test_refusals(self):
        _, result = self.convert(pre="unheard-of")
        self.assertEqual(result.returncode, 1)
        self.assertIn("unheard-of", result.stderr)
        self.assertFalse(self.model.exists())
        self.model.mkdir()
        self.assertIn("already there", self.convert()[1].stderr)

    def test_token_files(self):
        self.convert()
        (self.scratch / "a.txt").write_text("the cat\f\nthe dog")
        (self.scratch / "b.jsonl").write_text('{"text": "the end"}\n')
        common = ["--model", self.model, self.scratch / "a.txt", self.scratch / "b.jsonl"]
        ids = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        documents = [ids.encode(text).ids for text in ("the cat", "the dog", "the end")]

        packed = self.scratch / "packed.npy"
        result = script("tokenize_text.py", "--length", 4, "--output", packed, *common)
        self.assertEqual(result.returncode, 0, result.stderr)
        stream = [token for document in documents for token in document + [0]]  # 0: <|endoftext|>
        np.testing.assert_array_equal(np.load(packed), np.reshape(stream[: len(stream) // 4 * 4], (-1, 4)))
        self.assertEqual(np.load(packed).dtype, np.int32)

        ragged = self.scratch / "ragged.jsonl"
        self.assertEqual(script("tokenize_text.py", "--ragged", "--output", ragged, *common).returncode, 0)
        self.assertEqual([json.loads(line)["input_ids"] for line in ragged.read_text().splitlines()], documents)

        chosen = self.scratch / "chosen.npy"
        for _ in range(2):  # the same seed chooses the same sequences
            script("tokenize_text.py", "--length", 4, "--samples", 2, "--seed", 3, "--output", chosen, *common)
            self.assertEqual(np.load(chosen).shape, (2, 4))
        self.assertIn("fewer than one sequence", script("tokenize_text.py", "--length", 99, "--output", packed, *common).stderr)


if __name__ == "__main__":
    unittest.main()
