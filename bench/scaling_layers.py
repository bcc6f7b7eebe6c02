"""Models as layers of linears that share inputs, with their FLOPs and the bytes that ranks send, by the same formulas as src/pipeline/plan.cpp.
Standard library only."""

import dataclasses

from model_shapes import PUBLISHED, SHAPES

GROUP = 128  # columns that share a scale (W4A16)


@dataclasses.dataclass(frozen=True)
class Tap:
    """Linears that share an input, stacked by rows: `count` matrices [rows, cols] with a Hessian each."""

    name: str
    rows: int
    cols: int
    count: int = 1
    routed: bool = False  # count experts, of which a token sees top_k


@dataclasses.dataclass(frozen=True)
class Layer:
    number: int  # of layers like this one
    taps: tuple
    hidden: int
    experts: int
    top_k: int
    heads: int
    qk_dim: int
    v_dim: int

    def attention_flops(self, length):
        """Of one token: scores and their product with v over (length + 1) / 2 keys in the mean."""
        return 2 * self.heads * (self.qk_dim + self.v_dim) * (length + 1) / 2

    def rows(self, tap, tokens):
        return tokens * (self.top_k if tap.routed else 1)

    def weight_bytes(self):
        return sum(2 * t.count * t.rows * t.cols for t in self.taps)

    def forward_flops(self, tokens, length):
        linears = sum(2 * self.rows(t, tokens) * t.rows * t.cols for t in self.taps)
        return linears + tokens * (2 * self.hidden * self.experts + self.attention_flops(length))

    def hessian_flops(self, tokens):
        return sum(2 * self.rows(t, tokens) * t.cols**2 for t in self.taps)


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    layers: tuple
    hidden: int
    vocab: int

    def linears(self):
        return sum(layer.number * layer.weight_bytes() // 2 for layer in self.layers)

    def input_bytes(self):
        return 2 * self.linears() + 4 * self.vocab * self.hidden

    def output_bytes(self):
        return int(self.linears() * (0.5 + 2 / GROUP)) + 4 * self.vocab * self.hidden


def attention_of(c):
    """(taps before the MLP, heads, width of q and k, width of v) of a config.json."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    if "kv_lora_rank" in c:
        qk, v = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["v_head_dim"]
        taps = (
            Tap("qkv", c["q_lora_rank"] + c["kv_lora_rank"] + c["qk_rope_head_dim"], hidden),
            Tap("q_b", heads * qk, c["q_lora_rank"]),
            Tap("kv_b", heads * (c["qk_nope_head_dim"] + v), c["kv_lora_rank"]),
            Tap("o", hidden, heads * v),
        )
        return taps, heads, qk, v
    head = c.get("head_dim") or hidden // heads
    return (Tap("qkv", (heads + 2 * c["num_key_value_heads"]) * head, hidden), Tap("o", hidden, heads * head)), heads, head, head


def model_of(name, layers=0):
    return model_from_config(name, {**SHAPES, **PUBLISHED}[name], layers)


def model_from_config(name, c, layers=0):
    """A model from its config.json's numbers; layers 0: all."""
    hidden, (attention, heads, qk, v) = c["hidden_size"], attention_of(c)
    experts = c.get("num_experts") or c.get("num_local_experts") or 0
    total = layers or c["num_hidden_layers"]
    dense = min(total, c.get("first_k_dense_replace", 0)) if experts else total
    common = {"hidden": hidden, "heads": heads, "qk_dim": qk, "v_dim": v}
    kinds = []
    if dense:
        inner = c["intermediate_size"]
        taps = (*attention, Tap("gate_up", 2 * inner, hidden), Tap("down", hidden, inner))
        kinds.append(Layer(number=dense, taps=taps, experts=0, top_k=1, **common))
    if total > dense:
        inner = c.get("moe_intermediate_size") or c["intermediate_size"]
        taps = (*attention, Tap("gate_up", 2 * inner, hidden, experts, True), Tap("down", hidden, inner, experts, True))
        shared = inner * c.get("n_shared_experts", 0)
        if shared:
            taps += (Tap("shared_gate_up", 2 * shared, hidden), Tap("shared_down", hidden, shared))
        kinds.append(Layer(number=total - dense, taps=taps, experts=experts, top_k=c["num_experts_per_tok"], **common))
    return Model(name, tuple(kinds), hidden, c["vocab_size"])


# ---- bytes that a rank sends for one layer -----------------------------------------------------------


def triangle_bytes(tap):
    return tap.count * tap.cols * (tap.cols + 1) / 2 * 4


def sent_bytes(layer, tokens, ranks, plan):
    """Bytes by kind of collective; the sum of reductions is what `shardq plan` names sent_all_reduce and sent_reduce_scatter."""
    away = (ranks - 1) / ranks
    sent = {"all_reduce": 0.0, "reduce_scatter": 0.0, "all_to_all": 0.0}
    for tap in layer.taps:
        if not tap.routed or plan == "all_reduce":
            sent["all_reduce"] += 2 * away * triangle_bytes(tap)
        elif plan == "reduce_scatter":
            sent["reduce_scatter"] += away * triangle_bytes(tap)
    if layer.experts and plan == "all_to_all":
        # Inputs of gate/up go to their expert's owner, outputs of down come back: bf16 [rows, hidden] each.
        sent["all_to_all"] = 2 * (tokens / ranks) * layer.top_k * layer.hidden * 2 * away
    return sent


def pool_bytes(layer, ranks):
    """Every plan also sums the experts' mean Hessian of each tap, for shrinkage."""
    return sum(2 * (ranks - 1) / ranks * t.cols * (t.cols + 1) / 2 * 4 for t in layer.taps if t.routed)


def gathered_bytes(layer, ranks):
    """Codes (one byte each) and fp32 scales of what the others solved."""
    return (ranks - 1) / ranks * sum(t.count * t.rows * t.cols * (1 + 4 / GROUP) for t in layer.taps)
