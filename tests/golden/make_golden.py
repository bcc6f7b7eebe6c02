"""Makes tests/golden/data: tiny random models saved by transformers, and what transformers computes with them.

One directory per case holds a model (config.json, safetensors) and golden.safetensors: token ids and lengths of a few
sequences, the residual stream after each layer, and the logits, all in float32. rope_tables.* holds rotary tables alone,
mini_moe.json losses of the bundled model. Usage: python make_golden.py [--mini-moe DIR]
"""
import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

DATA = Path(__file__).resolve().parent / "data"

BASE = dict(vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=False,
            bos_token_id=0, eos_token_id=1, pad_token_id=None)
MOE = dict(num_experts_per_tok=3, num_hidden_layers=2)


def rope(kind, **keys):
    return {"rope_type": kind, "rope_theta": 1000.0, **keys}


# name: model type, changes to the configuration, and how to save it.
CASES = {
    "llama": ("llama", dict(rope_parameters=rope("default"))),
    "llama_heads": ("llama", dict(rope_parameters=rope("default"), head_dim=16, num_key_value_heads=1)),
    "llama_llama3": ("llama", dict(rope_parameters=rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                        original_max_position_embeddings=32)), "old"),
    "llama_linear": ("llama", dict(rope_parameters=rope("linear", factor=4.0)), "old"),
    "llama_dynamic": ("llama", dict(rope_parameters=rope("dynamic", factor=3.0), max_position_embeddings=16)),
    "llama_yarn": ("llama", dict(rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=32)), "old"),
    "llama_bias": ("llama", dict(rope_parameters=rope("default"), attention_bias=True, mlp_bias=True)),
    "llama_tied": ("llama", dict(rope_parameters=rope("default"), tie_word_embeddings=True)),
    "mistral_window": ("mistral", dict(rope_parameters=rope("default"), sliding_window=7), "f16"),
    "qwen2": ("qwen2", dict(rope_parameters=rope("default")), "bf16"),
    "qwen2_window": ("qwen2", dict(rope_parameters=rope("default"), use_sliding_window=True, sliding_window=5,
                                   max_window_layers=1, num_hidden_layers=3), "old"),
    "qwen3": ("qwen3", dict(rope_parameters=rope("default"), head_dim=16)),
    "mixtral": ("mixtral", dict(rope_parameters=rope("default"), num_local_experts=6, **MOE)),
    "mixtral_fused": ("mixtral", dict(rope_parameters=rope("default"), num_local_experts=6, **MOE), "fused"),
    "qwen3_moe": ("qwen3_moe", dict(rope_parameters=rope("default"), head_dim=16, num_experts=8, moe_intermediate_size=24,
                                    norm_topk_prob=True, **MOE), "sharded"),
    "qwen3_moe_dense": ("qwen3_moe", dict(rope_parameters=rope("default"), head_dim=16, num_experts=8, moe_intermediate_size=24,
                                          norm_topk_prob=False, num_experts_per_tok=3, num_hidden_layers=3,
                                          mlp_only_layers=[1])),
    "qwen3_moe_step": ("qwen3_moe", dict(rope_parameters=rope("default"), head_dim=16, num_experts=8, moe_intermediate_size=24,
                                         norm_topk_prob=True, decoder_sparse_step=2, **MOE), "old"),
    "qwen3_moe_fused": ("qwen3_moe", dict(rope_parameters=rope("default"), head_dim=16, num_experts=8, moe_intermediate_size=24,
                                          norm_topk_prob=True, **MOE), "fused"),
}


def make_config(model_type, changes):
    config = AutoConfig.for_model(model_type, **{**BASE, **changes})
    config._attn_implementation = "eager"
    return config


def randomise(model, generator):
    """Weights large enough that attention is peaked and routing is decided, so that a wrong rotation, mask or expert shows."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if "norm" in name:
                p.copy_(1.0 + 0.3 * noise)
            elif name.endswith("bias"):
                p.copy_(0.3 * noise)
            elif "embed" in name:
                p.copy_(noise)
            else:
                gain = 2.0 if any(k in name for k in ("q_proj", "k_proj", "gate.weight")) else 1.2
                p.copy_(gain / p.shape[-1] ** 0.5 * noise)


def run(model, ids):
    """Residual stream after each layer, and the logits."""
    states = []
    hooks = [layer.register_forward_hook(
        lambda _, __, out: states.append((out[0] if isinstance(out, tuple) else out).detach())) for layer in model.model.layers]
    with torch.no_grad():
        logits = model(input_ids=ids[None].long(), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return [s.reshape(len(ids), -1) for s in states], logits[0]


def old_spelling(config):
    """config.json as transformers 4 wrote it."""
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {("rope_type" if kind == "llama3" else "type"): kind, **parameters}
    config["torch_dtype"] = config.pop("dtype")
    if "num_local_experts" in config and config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    config.pop("layer_types", None)
    return config


def save(model, directory, how):
    if how == "fused":
        directory.mkdir(parents=True)
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, directory / "model.safetensors",
                  metadata={"format": "pt"})
        model.config.save_pretrained(directory)
    else:
        model.save_pretrained(directory, max_shard_size="100KB" if how == "sharded" else "5GB")
    for extra in ("generation_config.json",):
        (directory / extra).unlink(missing_ok=True)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = {"f16": "float16", "bf16": "bfloat16"}.get(how, "float32")
    if how == "old":
        config = old_spelling(config)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make_case(name, model_type, changes, how=""):
    generator = torch.Generator().manual_seed(sum(map(ord, name.replace("_fused", ""))))
    model = AutoModelForCausalLM.from_config(make_config(model_type, changes)).eval()
    randomise(model, generator)
    if model.config.tie_word_embeddings:
        model.tie_weights()
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}.get(how, torch.float32)
    model.to(dtype)
    directory = DATA / name
    shutil.rmtree(directory, ignore_errors=True)
    save(model, directory, how)
    # The values are those of the stored weights, computed in float32. The rotary tables are rebuilt, as .to() rounded them.
    exact = AutoModelForCausalLM.from_config(make_config(model_type, changes)).eval()
    exact.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    lengths = [37, 37] if "dynamic" in name else [37, 1, 22]
    ids = [torch.randint(0, BASE["vocab_size"], (n,), generator=generator, dtype=torch.int32) for n in lengths]
    outputs = [run(exact, i) for i in ids]
    tensors = {"input_ids": torch.cat(ids), "lengths": torch.tensor(lengths, dtype=torch.int32),
               "logits": torch.cat([o[1] for o in outputs])}
    for layer in range(len(outputs[0][0])):
        tensors[f"hidden.{layer}"] = torch.cat([o[0][layer] for o in outputs])
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "golden.safetensors")


ROPE_TABLES = {
    "default": (rope("default"), 64),
    "linear": (rope("linear", factor=2.5), 64),
    "dynamic_short": (rope("dynamic", factor=2.0), 20),
    "dynamic_long": (rope("dynamic", factor=2.0), 64),
    "llama3": (rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=24), 64),
    "yarn": (rope("yarn", factor=4.0, original_max_position_embeddings=24), 64),
    "yarn_attention_factor": (rope("yarn", factor=4.0, original_max_position_embeddings=24, attention_factor=0.7), 64),
    "yarn_mscale": (rope("yarn", factor=4.0, original_max_position_embeddings=24, mscale=0.8, mscale_all_dim=0.3), 64),
    "yarn_betas": (rope("yarn", factor=16.0, original_max_position_embeddings=24, beta_fast=8.0, beta_slow=2.0,
                        truncate=False), 64),
    "yarn_derived_factor": (rope("yarn", factor=None, original_max_position_embeddings=16), 64),
}


def make_rope_tables():
    tensors, configs = {}, {}
    for name, (parameters, length) in ROPE_TABLES.items():
        config = make_config("llama", dict(head_dim=24, max_position_embeddings=32, rope_parameters=dict(parameters)))
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
        half = cos.shape[-1] // 2
        tensors[f"{name}.cos"], tensors[f"{name}.sin"] = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        configs[name] = json.loads(config.to_json_string(use_diff=False))
    save_file(tensors, DATA / "rope_tables.safetensors")
    (DATA / "rope_tables.json").write_text(json.dumps(configs, indent=1, sort_keys=True) + "\n")


def make_mini_moe(directory, samples=6):
    ids = torch.from_numpy(np.load(directory / "heldout_ids.npy")[:samples].astype(np.int64))
    result = {"samples": samples}
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
        losses, best = [], []
        for row in ids:
            with torch.no_grad():
                logits = model(input_ids=row[None]).logits[0, :-1].float()
            losses.append(torch.nn.functional.cross_entropy(logits.double(), row[1:], reduction="sum").item())
            best.append(int((logits.argmax(-1) == row[1:]).sum()))
        result[str(dtype).split(".")[1]] = {"loss_sums": losses, "correct": best}
    (DATA / "mini_moe.json").write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mini-moe", type=Path, default=Path(__file__).resolve().parents[2] / "models" / "mini-moe")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    DATA.mkdir(exist_ok=True)
    for case, spec in CASES.items():
        make_case(case, *spec)
    make_rope_tables()
    make_mini_moe(arguments.mini_moe)
    (DATA / "VERSIONS").write_text(f"transformers {transformers.__version__}, torch {torch.__version__}\n")
