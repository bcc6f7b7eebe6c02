#!/usr/bin/env python3
"""Writes a Hugging Face model directory of production shape from a seed, at disk speed, and token ids for it.

    make_model.py DIR --shape qwen3-30b-a3b [--layers N] [--scale tiny] [--seed S] [--shard-gb 2] [--threads N]
    make_model.py --tokens-out ids.npy --shape qwen3-30b-a3b [--samples 512] [--length 2048] [--seed S]

The weights are random, the activations are not white noise: embeddings have a decaying spectrum, so that Hessians are
correlated as those of trained models are; norms have a few large channels; every row of a linear has its own scale;
routers give loads that are ragged but leave no expert empty. Values are finite at any depth.

How it is fast: for each input width one pool of bf16 rows (noise plus a low-rank part) is drawn once; a tensor is a
window of its pool at its own offset, with a sign and a power of two for every row. Both are integer operations on the
bf16 bits, which run at memory speed, and files are written by several threads. Needs numpy alone. The same seed gives
the same bytes.
"""

import argparse
import json
import os
import pathlib
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy

from model_shapes import SHAPES

COMMON = {"hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02, "tie_word_embeddings": False,
          "torch_dtype": "bfloat16", "use_cache": True, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 160, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4,
        "num_local_experts": 8, "vocab_size": 512, "max_position_embeddings": 512}  # fmt: skip

SMALLEST = (127 - 40) << 7  # 2^-40 in bf16
POOL_ELEMENTS = 48 << 20
POOL_RANK = 16
EMBEDDING = "model.embed_tokens.weight"
EMBEDDING_RANK = 96
DRAW_ROWS = 1024

# Standard deviation of a linear's output for a normalised input, by the last part of its name. The two that write to
# the residual stream are small, so that the embeddings' structure survives dozens of layers.
GAINS = {"o_proj": 0.5, "down_proj": 0.5, "w2": 0.5, "lm_head": 1.0, "gate": 1.0}


def make_config(shape, layers, scale):
    config = {**SHAPES[shape], **COMMON}
    if scale == "tiny":
        tiny = {key: value for key, value in TINY.items() if key in config}
        if "num_experts" not in config:
            tiny.pop("num_experts_per_tok", None)  # of 8 experts, two
        config.update(tiny)
    if layers:
        config["num_hidden_layers"] = layers
    return config


def tensor_table(config):
    """Name -> shape, in the order in which a model runs."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    qwen, mixtral = config["model_type"] == "qwen3_moe", config["model_type"] == "mixtral"
    table = {EMBEDDING: (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        table[layer + "input_layernorm.weight"] = (hidden,)
        table[layer + "self_attn.q_proj.weight"] = (q, hidden)
        table[layer + "self_attn.k_proj.weight"] = (kv, hidden)
        table[layer + "self_attn.v_proj.weight"] = (kv, hidden)
        table[layer + "self_attn.o_proj.weight"] = (hidden, q)
        if qwen:
            table[layer + "self_attn.q_norm.weight"] = (head,)
            table[layer + "self_attn.k_norm.weight"] = (head,)
        table[layer + "post_attention_layernorm.weight"] = (hidden,)
        if qwen or mixtral:
            block = layer + ("mlp." if qwen else "block_sparse_moe.")
            gate, up, down = ("gate_proj", "up_proj", "down_proj") if qwen else ("w1", "w3", "w2")
            experts = config["num_experts" if qwen else "num_local_experts"]
            inner = config["moe_intermediate_size" if qwen else "intermediate_size"]
            table[block + "gate.weight"] = (experts, hidden)
            for e in range(experts):
                table[f"{block}experts.{e}.{gate}.weight"] = (inner, hidden)
                table[f"{block}experts.{e}.{up}.weight"] = (inner, hidden)
                table[f"{block}experts.{e}.{down}.weight"] = (hidden, inner)
        else:
            inner = config["intermediate_size"]
            table[layer + "mlp.gate_proj.weight"] = (inner, hidden)
            table[layer + "mlp.up_proj.weight"] = (inner, hidden)
            table[layer + "mlp.down_proj.weight"] = (hidden, inner)
    table["model.norm.weight"] = (hidden,)
    table["lm_head.weight"] = (vocab, hidden)
    return table


def to_bf16(values):
    """Bits of float32 values rounded to bf16; magnitudes below 2^-40 become 2^-40, so that exponents can be shifted.
    Uses up `values`."""
    bits = values.view(numpy.uint32)
    bits += 0x7FFF + ((bits >> 16) & 1)
    out = (bits >> 16).astype(numpy.uint16)
    out[(out & 0x7FFF) < SMALLEST] = SMALLEST
    return out


def generator(seed, name):
    return numpy.random.Generator(numpy.random.Philox(key=[seed, zlib.crc32(name.encode())]))


def draw_rows(name, seed, rows, factor, columns, noise, threads):
    """[rows, width] bf16: (noise N + N factor) columns, N standard normal; several threads draw blocks of rows."""
    out = numpy.empty((rows, factor.shape[1]), numpy.uint16)

    def draw(begin):
        random = generator(seed, f"{name} {begin}")
        count = min(DRAW_ROWS, rows - begin)
        block = random.standard_normal((count, factor.shape[1]), dtype=numpy.float32)
        block *= numpy.float32(noise)
        block += random.standard_normal((count, len(factor)), dtype=numpy.float32) @ factor
        block *= columns
        out[begin : begin + count] = to_bf16(block)

    with ThreadPoolExecutor(threads) as workers:
        list(workers.map(draw, range(0, rows, DRAW_ROWS)))
    return out


class Pools:
    """For each width, bf16 rows with unit gain: noise and a low-rank part, columns of unequal size."""

    def __init__(self, seed, demand, threads):
        """demand: width -> rows of the largest window and of all tensors of that width."""
        self.rows = {}
        for width, (window, total) in sorted(demand.items()):
            rows = max(min(POOL_ELEMENTS // width, total), window + 1)
            random = generator(seed, f"pool {width}")
            columns = numpy.exp2(0.3 * random.standard_normal(width, dtype=numpy.float32))
            columns /= numpy.float32(width**0.5)
            factor = random.standard_normal((POOL_RANK, width), dtype=numpy.float32)
            factor /= numpy.float32(2 * POOL_RANK**0.5)
            self.rows[width] = draw_rows(f"pool {width}", seed, rows, factor, columns, 1, threads)

    def window(self, random, rows, width, exponent, spread):
        """Rows of the pool from a random one on, each with a random sign and a factor 2^exponent, or with `spread`
        2^(exponent + {-1, 0, 0, 1})."""
        pool = self.rows[width]
        begin = int(random.integers(0, len(pool) - rows + 1))
        scale = exponent + random.choice(numpy.array([-1, 0, 0, 1] if spread else [0]), rows)
        change = (scale.astype(numpy.int32) << 7).astype(numpy.uint16)  # modulo 2^16: lowers the exponent as well
        out = pool[begin : begin + rows] + change[:, None]
        out ^= (random.integers(0, 2, rows, dtype=numpy.uint16) << 15)[:, None]
        return out


def norm_weight(random, size):
    """Around one, with a few channels several times larger."""
    weight = 1 + 0.1 * random.standard_normal(size)
    weight[random.integers(0, size, max(1, size // 256))] *= 4
    return to_bf16(weight.astype(numpy.float32))


def embedding(seed, vocab, hidden, threads):
    """Standard deviation about one, singular values that fall like 1 / sqrt(i), and some noise."""
    rank = min(EMBEDDING_RANK, hidden // 2)
    basis = generator(seed, "embedding basis").standard_normal((rank, hidden), dtype=numpy.float32)
    basis *= (1 / numpy.sqrt(numpy.arange(1, rank + 1, dtype=numpy.float32)))[:, None]
    basis *= numpy.float32(0.9) / numpy.sqrt((basis**2).sum(0).mean()).astype(numpy.float32)
    return draw_rows("embedding", seed, vocab, basis, numpy.float32(1), 0.4, threads)


def window_rows(width):
    """Rows that are made and written at once: 32 MiB."""
    return max(1, (16 << 20) // width)


def tensor_blocks(name, shape, seed, pools):
    """The tensor's bf16 bits, piece by piece."""
    if name == EMBEDDING:
        yield pools.embedding
        return
    random = generator(seed, name)
    if len(shape) == 1:
        yield norm_weight(random, shape[0])
        return
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    exponent = int(numpy.log2(GAINS.get(kind, 1.0)))
    step = window_rows(shape[1])
    for begin in range(0, shape[0], step):
        yield pools.window(random, min(step, shape[0] - begin), shape[1], exponent, kind != "gate")


def cut_shards(table, limit):
    """Lists of names, each of at most `limit` bytes (or one tensor)."""
    shards, size = [[]], 0
    for name, shape in table.items():
        nbytes = 2 * int(numpy.prod(shape))
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def write_shard(path, names, table, seed, pools):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in names:
        end = offset + 2 * int(numpy.prod(table[name]))
        header[name] = {"dtype": "BF16", "shape": list(table[name]), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for block in tensor_blocks(name, table[name], seed, pools):
                data = memoryview(block).cast("B")
                while len(data):
                    data = data[file.write(data) :]
        assert file.tell() == 8 + len(text) + offset, path
    return offset


def write_model(directory, config, seed, shard_bytes, threads):
    start = time.perf_counter()
    table = tensor_table(config)
    shards = cut_shards(table, shard_bytes)
    total = 2 * sum(int(numpy.prod(shape)) for shape in table.values())
    directory.mkdir(parents=True, exist_ok=True)
    free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    if total > free:
        sizes = f"the model takes {total / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        sys.exit(f"make_model.py: {directory}: {sizes} (use --layers)")
    demand = {}
    for name, shape in table.items():
        if len(shape) == 2 and name != EMBEDDING:
            window, rows = demand.get(shape[1], (0, 0))
            demand[shape[1]] = (max(window, min(shape[0], window_rows(shape[1]))), rows + shape[0])
    pools = Pools(seed, demand, threads)
    pools.embedding = embedding(seed, *table[EMBEDDING], threads)
    drawn = time.perf_counter()

    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    with ThreadPoolExecutor(threads) as workers:
        write = lambda path, shard: write_shard(directory / path, shard, table, seed, pools)  # noqa: E731
        written = list(workers.map(write, names, shards))
    assert sum(written) == total
    weight_map = {name: path for path, shard in zip(names, shards) for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    end = time.perf_counter()
    print(
        f"{directory}: {len(table)} tensors in {len(shards)} files, {total / 1e9:.2f} GB; "
        f"pools {drawn - start:.1f} s, files {end - drawn:.1f} s, {total / (end - drawn) / 1e9:.2f} GB/s"
    )


def write_tokens(path, vocab, samples, length, seed):
    """Zipf-distributed ids: a few tokens are very frequent, most are rare, as in text."""
    random = generator(seed, "tokens")
    ranks = numpy.exp(random.random((samples, length)) * numpy.log(vocab)).astype(numpy.int64) - 1
    ids = random.permutation(vocab)[numpy.clip(ranks, 0, vocab - 1)]
    numpy.save(path, ids.astype(numpy.int32))
    print(f"{path}: {samples} x {length} ids below {vocab}, {len(numpy.unique(ids))} different")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=pathlib.Path)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the model has")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard-gb", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--tokens-out", type=pathlib.Path)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--length", type=int, default=2048)
    options = parser.parse_args()
    if not options.directory and not options.tokens_out:
        parser.error("give a directory, or --tokens-out, or both")
    if options.layers < 0 or options.samples < 1 or options.length < 1 or options.threads < 1 or options.shard_gb <= 0:
        parser.error("--layers must not be negative; --samples, --length, --threads and --shard-gb must be positive")
    config = make_config(options.shape, options.layers, options.scale)
    if options.directory:
        write_model(options.directory, config, options.seed, int(options.shard_gb * 1e9), options.threads)
    if options.tokens_out:
        write_tokens(options.tokens_out, config["vocab_size"], options.samples, options.length, options.seed)


if __name__ == "__main__":
    main()
