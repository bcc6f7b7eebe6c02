#!/usr/bin/env python3
"""Predicts the seconds of every phase, the bytes sent and the memory of a rank, for models, calibration sizes, GPUs and communication plans.

    scaling_model.py --output bench/results/scaling_predicted                          # tables and figures
    scaling_model.py --models qwen3-30b-a3b,deepseek-v3 --gpus 1,8,64 --tokens 1048576 --set nic_gbit_s=200
    scaling_model.py --validate bench/results/h200x2_production.json                   # prediction beside measurement

Rates of operations come from result files (scaling_rates.py). What nobody has measured here is a named assumption (`Assumptions`), printed with every table
and settable by --set. bench/README.md, "Scaling", has the formulas. Tables need the standard library only, figures matplotlib.
"""

import argparse
import csv
import dataclasses
import json
import math
import pathlib
import sys
import time

from model_shapes import SHAPES
from scaling_layers import gathered_bytes, model_of, pool_bytes, sent_bytes
from scaling_rates import RESULTS, Rates

PLANS = ("all_reduce", "reduce_scatter", "all_to_all")
PHASES = ("forward", "hessian", "solve", "reduce", "gather", "read", "write")
COMPUTE, COMMUNICATION = PHASES[:3], PHASES[3:5]
CHUNK_TOKENS = 65536  # what goes through a layer at once on a GPU (src/pipeline/preflight.cpp)


@dataclasses.dataclass
class Assumptions:
    """Not measured by any file of this folder."""

    gpus_per_node: int = 8
    nic_gbit_s: float = 400.0  # network of one GPU
    nic_efficiency: float = 0.8  # of that, payload of large messages
    nvlink_factor: float = 1.0  # bus rate inside a node of more than two GPUs over that of two
    latency_us: float = 30.0  # of a collective, for each doubling of the ranks
    expert_imbalance: float = 1.1  # rows of the busiest owner of experts over the mean
    device_memory_gib: float = 140.0
    hessian_share: float = 0.25  # of it for expert Hessians (memory.hessian_budget)
    disk_read_gb_s: float = 1.0  # of a node; see --validate for what a run saw
    disk_write_gb_s: float = 1.0


# ---- one layer on one rank ---------------------------------------------------------------------------


class Job:
    """A model, a calibration set and a machine. The rank with the most work counts."""

    def __init__(self, model, tokens, gpus, plan, rates, assumed, length=2048, read="share"):
        self.model, self.tokens, self.ranks, self.rates, self.assumed = model, tokens, gpus, rates, assumed
        self.plan, self.length, self.read = plan, min(length, tokens), read
        samples = max(1, tokens // self.length)
        self.mine = math.ceil(samples / gpus) * self.length  # tokens of the busiest rank
        self.calls = math.ceil(self.mine / CHUNK_TOKENS)
        self.nodes = math.ceil(gpus / assumed.gpus_per_node)

    def owned(self, tap):
        return math.ceil(tap.count / self.ranks)

    def routed_rows(self, layer):
        """(rows that this rank pushes through experts, experts that it holds)"""
        if self.plan != "all_to_all" or self.ranks == 1 or not layer.experts:
            return self.mine * layer.top_k, layer.experts
        own = math.ceil(layer.experts / self.ranks)
        return self.tokens * layer.top_k * own / layer.experts * self.assumed.expert_imbalance, own

    def waves(self, tap):
        if not tap.routed:
            return 1
        held = self.owned(tap) if self.plan == "all_to_all" else tap.count
        fit = max(1, int(self.assumed.device_memory_gib * 2**30 * self.assumed.hessian_share / (tap.cols**2 * 4)))
        return math.ceil(held / fit)

    def wire_seconds(self, kind, sent):
        """A ring's rate is that of its slowest hop: between nodes the GPUs' network ports together. Rows for owners go straight through each
        GPU's own port, those inside the node over NVLink at the same time."""
        if self.ranks == 1 or sent == 0:
            return 0.0
        a = self.assumed
        nvlink = self.rates.bus[kind] * 1e9 * (a.nvlink_factor if self.ranks > 2 else 1.0)
        port = a.nic_gbit_s / 8 * 1e9 * a.nic_efficiency
        wait = a.latency_us * 1e-6 * math.log2(self.ranks)
        if self.nodes == 1:
            return wait + sent / nvlink
        if kind == "all_to_all":
            to_one = sent / (self.ranks - 1)
            return wait + max(to_one * (a.gpus_per_node - 1) / nvlink, to_one * (self.ranks - a.gpus_per_node) / port)
        return wait + sent / min(nvlink, port * a.gpus_per_node)

    def forward_seconds(self, layer):
        r, tokens, hidden = self.rates, self.mine, layer.hidden
        seconds = r.attention_seconds(tokens * layer.attention_flops(self.length), self.length)
        q = layer.heads * layer.qk_dim
        # Norms (two, read and write), additions to the residual (two reads, one write), rope on q; 2 bytes an element.
        seconds += tokens * (2 * hidden * 4 / r.rms_norm + 2 * hidden * 6 / r.add + 2 * q * 4 / r.rope)
        for tap in layer.taps:
            if tap.routed:
                rows, held = self.routed_rows(layer)
                seconds += r.linear_seconds(rows, tap.rows, tap.cols, held, self.calls)
            else:
                rows = tokens
                seconds += r.linear_seconds(tokens, tap.rows, tap.cols)
            if tap.name.endswith("down"):
                seconds += rows * tap.cols * 6 / r.silu_mul
        if layer.experts:
            slots = tokens * layer.top_k
            seconds += slots * hidden * 4 / r.dispatch_rows + (slots + tokens) * hidden * 2 / r.combine_rows
        return seconds + layer.weight_bytes() * 0.75 / r.dequantize  # one byte a code in, two out, as the benchmark counts

    def hessian_seconds(self, layer):
        seconds = 0.0
        for tap in layer.taps:
            if tap.routed:
                rows, held = self.routed_rows(layer)
                passes = 2 if self.waves(tap) > 1 else 1  # several waves: the pool takes a pass of its own
                seconds += passes * self.rates.gram_seconds(rows, tap.cols, held, self.calls)
                seconds += held * tap.cols**2 * 4 / self.rates.sum_stack
            else:
                seconds += self.rates.gram_seconds(self.mine, tap.cols, 1, self.calls)
        return seconds

    def solve_seconds(self, layer):
        seconds = 0.0
        for tap in layer.taps:
            if tap.routed:
                own = self.owned(tap)
                seconds += self.rates.solve_seconds(own, tap.rows, tap.cols, own)
            else:  # rows are shared out, the factorisation is everybody's
                seconds += self.rates.solve_seconds(1, math.ceil(tap.rows / self.ranks), tap.cols, 1)
        return seconds

    def reduce_seconds(self, layer):
        if self.ranks == 1:
            return 0.0
        sent = sent_bytes(layer, self.tokens, self.ranks, self.plan)
        seconds = sum(self.wire_seconds(kind, count) for kind, count in sent.items())
        seconds += self.wire_seconds("all_reduce", pool_bytes(layer, self.ranks))
        for tap in layer.taps:
            packed = 0 if tap.routed and self.plan == "all_to_all" else tap.count
            back = self.owned(tap) if tap.routed and self.plan == "reduce_scatter" else packed
            seconds += tap.cols**2 * 4 * (packed / self.rates.pack_lower + back / self.rates.unpack_lower)
        return seconds

    def read_seconds(self, layer):
        """(from disk, behind the computing of the layer before; from other ranks)"""
        routed = sum(2 * t.count * t.rows * t.cols for t in layer.taps if t.routed)
        whole, node_gpus = layer.weight_bytes(), min(self.ranks, self.assumed.gpus_per_node)
        owners = self.plan == "all_to_all" and self.ranks > 1
        disk = self.assumed.disk_read_gb_s * 1e9
        if self.read == "all":
            # Ranks of a node read the same files: once from disk, then from memory. Of experts, a node reads what its ranks own.
            own = min(1.0, node_gpus * math.ceil(layer.experts / self.ranks) / layer.experts) if owners and layer.experts else 1.0
            return (whole - routed + routed * own) / disk, 0.0
        others = whole - routed if owners else whole
        return whole / self.nodes / disk, self.wire_seconds("all_gather", others * (self.ranks - 1) / self.ranks)

    def memory(self, layer):
        """Bytes of a rank at its fullest tap, with what is held through the layer."""
        rows, held = self.routed_rows(layer)
        owners = self.plan == "all_to_all" and self.ranks > 1
        weights = hessians = solve = 0
        kept = max(2 * self.mine * t.cols for t in layer.taps if t.name == "o")
        for tap in layer.taps:
            count = held if tap.routed and owners else tap.count
            weights += 2 * count * tap.rows * tap.cols
            hessians = max(hessians, math.ceil(count / self.waves(tap)) * tap.cols**2 * 4)
            if tap.name.endswith("down"):
                kept = max(kept, 2 * (rows if tap.routed else self.mine) * tap.cols)
            own = math.ceil(self.owned(tap) / self.waves(tap))
            mine = own * tap.rows if tap.routed else math.ceil(tap.rows / self.ranks)
            solve = max(solve, mine * tap.cols * 8 + tap.count * tap.rows * tap.cols + own * tap.cols**2 * 4)
        if owners and layer.experts:
            kept = max(kept, 2 * rows * (layer.hidden + max(t.cols for t in layer.taps if t.name == "down")))
        return {"hessian_bytes": hessians, "weight_bytes": weights, "activation_bytes": 2 * self.mine * layer.hidden + kept, "solve_bytes": solve}

    def predict(self):
        """Seconds of every phase over the whole model, and what a rank holds and sends."""
        seconds, sent, memory = dict.fromkeys(PHASES, 0.0), 0.0, {}
        embedding = 2 * self.model.vocab * self.model.hidden
        disk = self.assumed.disk_read_gb_s * 1e9
        seconds["read"] = embedding / disk
        for index, layer in enumerate(self.model.layers):
            phases = {name: getattr(self, f"{name}_seconds")(layer) for name in ("forward", "hessian", "solve", "reduce")}
            phases["gather"] = self.wire_seconds("all_gather", gathered_bytes(layer, self.ranks))
            from_disk, from_ranks = self.read_seconds(layer)
            busy = sum(phases.values())
            exposed = max(0.0, from_disk - busy)
            seconds["read"] += exposed * layer.number + from_ranks * layer.number + (from_disk - exposed if index == 0 else 0.0)
            for name, value in phases.items():
                seconds[name] += value * layer.number
            sent += layer.number * (sum(sent_bytes(layer, self.tokens, self.ranks, self.plan).values()) if self.ranks > 1 else 0)
            for name, value in self.memory(layer).items():
                memory[name] = max(memory.get(name, 0), value)
        # Shards are written while later layers compute; embedding and head are copied at the end.
        writing = (self.model.output_bytes() - 2 * embedding) / self.nodes / (self.assumed.disk_write_gb_s * 1e9)
        seconds["write"] = max(0.0, writing - sum(seconds.values())) + 2 * embedding / (self.assumed.disk_write_gb_s * 1e9)
        total = sum(seconds.values())
        compute, wire = sum(seconds[p] for p in COMPUTE), sum(seconds[p] for p in COMMUNICATION)
        peak = sum(memory.values())
        return {
            "model": self.model.name, "tokens": self.tokens, "gpus": self.ranks, "plan": self.plan if self.ranks > 1 else "-", **seconds, "total": total,
            "compute": compute, "wire": wire, "wire_share": wire / (compute + wire), "sent_bytes": sent, **memory, "peak_bytes": peak,
            "fits": peak <= self.assumed.device_memory_gib * 2**30,
        }  # fmt: skip


# ---- tables ------------------------------------------------------------------------------------------


def crossing_tokens(model, gpus, plan, rates, assumed):
    """Tokens at which the Hessians take as long as the solve (bisection over whole samples of the shortest length that keeps all ranks busy)."""

    def ratio(tokens):
        length = max(1, min(2048, tokens // gpus))
        row = Job(model, tokens, gpus, plan, rates, assumed, length).predict()
        return row["hessian"] / row["solve"]

    low, high = gpus, 1 << 34
    if ratio(low) >= 1 or ratio(high) <= 1:
        return None
    while high / low > 1.01:
        middle = int(math.sqrt(low * high))
        low, high = (middle, high) if ratio(middle) < 1 else (low, middle)
    return high


def predict_all(models, gpus, tokens, rates, assumed, length=2048):
    """A row for each model, number of GPUs and plan, with speed-up over one GPU and which plan wins (least total of what fits)."""
    rows = []
    for name in models:
        model = model_of(name)
        base = Job(model, tokens, 1, "reduce_scatter", rates, assumed, length).predict()
        for count in gpus:
            # Dense models have one plan; tokens go to owners only where every rank can own an expert.
            experts = max(layer.experts for layer in model.layers)
            plans = PLANS[1:2] if count == 1 or not experts else PLANS[: 3 if experts >= count else 2]
            same = [Job(model, tokens, count, plan, rates, assumed, length).predict() for plan in plans]
            fitting = [row for row in same if row["fits"]] or same
            best = min(fitting, key=lambda row: row["compute"] + row["wire"])
            for row in same:
                row["wins"] = row is best
                row["speedup"] = base["compute"] / (row["compute"] + row["wire"])
                row["efficiency"] = row["speedup"] / count
                row["crossing_tokens"] = crossing_tokens(model, count, row["plan"] if count > 1 else "reduce_scatter", rates, assumed)
            rows += same
    return rows


def token_curves(name, rows, rates, assumed):
    """(label, [(tokens, hessian, solve)]) for one GPU and for the plan that wins on eight (or the most below)."""
    most = max((row["gpus"] for row in rows if row["gpus"] <= 8), default=1)
    winner = next(row["plan"] for row in rows if row["model"] == name and row["gpus"] == most and row["wins"])
    curves = []
    for gpus, plan in dict.fromkeys(((1, "reduce_scatter"), (most, winner if most > 1 else "reduce_scatter"))):
        points = []
        for exponent in range(11, 25):
            tokens = 1 << exponent
            row = Job(model_of(name), tokens, gpus, plan, rates, assumed, min(2048, tokens // gpus)).predict()
            points.append((tokens, row["hessian"], row["solve"]))
        curves.append((f"{gpus} GPU" + (f"s, {plan}" if gpus > 1 else ""), points))
    return curves


def describe(rates, assumed):
    lines = [f"measured ({', '.join(pathlib.Path(p).name for p in rates.sources.values())}): {rates.device}"]
    measured = {name: rate for name, rate in rates.bus.items() if name not in rates.assumed_links}
    lines.append("measured, 2 GPUs: bus GB/s " + ", ".join(f"{name} {rate:g}" for name, rate in measured.items()))
    if rates.assumed_links:
        lines.append(f"assumed: {' and '.join(rates.assumed_links)} as fast as reduce_scatter")
    lines.append("assumed: " + ", ".join(f"{f.name} {getattr(assumed, f.name):g}" for f in dataclasses.fields(assumed)))
    lines.append("nothing overlaps but reading and writing files: exposed communication is an upper bound")
    return lines


def table(rows):
    """Markdown, one table a model."""
    lines = []
    for name in dict.fromkeys(row["model"] for row in rows):
        lines += ["", f"**{name}**, {rows[0]['tokens']:,} tokens", ""]
        memory = "GB a rank: Hessians, weights, activations, all"
        lines.append(f"| GPUs | plan | forward | Hessian | solve | reduce | gather | compute and wire | wire | efficiency | {memory} | cross at tokens |")
        lines.append("|" + "---|" * 12)
        for row in (row for row in rows if row["model"] == name):
            gb = [f"{row[key] / 1e9:.1f}" for key in ("hessian_bytes", "weight_bytes", "activation_bytes", "peak_bytes")]
            cross = row["crossing_tokens"]
            plan = f"**{row['plan']}**" if row["wins"] and row["gpus"] > 1 else row["plan"]
            lines.append(
                f"| {row['gpus']} | {plan} | " + " | ".join(f"{row[p]:.2f}" for p in PHASES[:5]) + f" | {row['compute'] + row['wire']:.2f} | "
                f"{100 * row['wire_share']:.1f} % | {100 * row['efficiency']:.0f} % | {', '.join(gb)}{'' if row['fits'] else ' (does not fit)'} | "
                f"{f'{cross:,.0f}' if cross else '-'} |"
            )  # fmt: skip
    return "\n".join(lines)


def compact_table(rows):
    """Markdown, the plan with the least time for each model and number of GPUs: what bench/README.md shows."""
    lines = ["| model | GPUs | plan | forward | Hessian | solve | wire | all, by plan | efficiency | GB a rank | cross at |", "|" + "---|" * 11]
    for best in (row for row in rows if row["wins"]):
        same = [row for row in rows if (row["model"], row["gpus"]) == (best["model"], best["gpus"])]
        everything = " / ".join(f"{row['compute'] + row['wire']:.1f}" for row in same)
        cross = f"{best['crossing_tokens'] / 1e6:.1f} M" if best["crossing_tokens"] else "-"
        lines.append(
            f"| {best['model'] if best['gpus'] == 1 else ''} | {best['gpus']} | {best['plan']} | "
            f"{best['forward']:.1f} | {best['hessian']:.1f} | {best['solve']:.1f} | {best['wire']:.1f} ({100 * best['wire_share']:.0f} %) | {everything} | "
            f"{100 * best['efficiency']:.0f} % | {best['peak_bytes'] / 1e9:.0f}{'' if best['fits'] else ' (too much)'} | {cross} |"
        )
    return "\n".join(lines)


# ---- beside measurements -----------------------------------------------------------------------------

PARTS = {"forward": ("forward", "embed"), "hessian": ("hessian",), "solve": ("factor", "scales", "loop", "other", "update"), "gather": ("gather",),
         "reduce": ("reduce", "exchange"), "read": ("read", "spread"), "write": ("write",)}  # fmt: skip


def measured_runs(path):
    """Runs of a file of production.py or of scaling_study.py's phases.json, in one form."""
    for run in json.loads(pathlib.Path(path).read_text())["runs"]:
        shape, layers, *size = run.get("job", run.get("model", "")).split(":") + [""]
        if shape not in SHAPES:
            print(f"{path}: {shape or 'a run without a model'}: no generated shape, left out", file=sys.stderr)
            continue
        length = int(size[0].split("x")[1]) if size[0] else run["length"]
        plan = next((s.split("=")[1] for s in run.get("settings", []) if s.startswith("parallel.reduce=")), run.get("plan") or "reduce_scatter")
        seconds = {part: sum(run["phases"].get(name, 0.0) for name in names) for part, names in PARTS.items()}
        yield shape, int(layers), run["tokens"], length, run["ranks"], plan if plan in PLANS else "reduce_scatter", seconds


def validate(path, rates, assumed):
    """Prediction beside measurement, per phase. Nothing is fitted to these runs."""
    print("seconds predicted / measured (relative error)")
    worst = []
    for shape, layers, tokens, length, ranks, plan, measured in measured_runs(path):
        job = Job(model_of(shape, layers), tokens, ranks, plan, rates, assumed, length)
        row = job.predict()
        parts = []
        for part in (*PHASES, "compute"):
            got = sum(measured[p] for p in COMPUTE) if part == "compute" else measured[part]
            if max(got, row[part]) < 0.05:
                continue
            error = f"{100 * (row[part] / got - 1):+.0f} %" if got > 0 else "-"
            parts.append(f"{part} {row[part]:.2f} / {got:.2f} ({error})")
            if part == "compute":
                worst.append((shape, tokens, ranks, row[part] / got - 1))
        print(f"{shape}:{layers}:{tokens // length}x{length} on {ranks}{' ' + plan if ranks > 1 else ''}:\n   " + "\n   ".join(parts))
    print("read and write are the machine's disk and its cache; their rates are assumptions")
    return worst


def write_csv(rows, path):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, ["kind", *rows[0]])
        writer.writeheader()
        writer.writerows({"kind": "predicted", **{k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}} for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-30b-a3b,qwen3-235b-a22b,deepseek-v3,kimi-k2")
    parser.add_argument("--gpus", default="1,2,4,8,64,512")
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--kernels", type=pathlib.Path, default=RESULTS / "h200_kernels.json")
    parser.add_argument("--forward", type=pathlib.Path, default=RESULTS / "h200_forward.json")
    parser.add_argument("--links", type=pathlib.Path, default=RESULTS / "h200x2_links.json", help="a file of bench/links.py")
    parser.add_argument("--set", action="append", default=[], metavar="ASSUMPTION=VALUE")
    parser.add_argument("--validate", type=pathlib.Path, metavar="FILE", help="of production.py, or a phases.json of scaling_study.py")
    parser.add_argument("--output", type=pathlib.Path, help="folder for predicted.csv, predicted.md, predicted.png and .svg")
    options = parser.parse_args()
    assumed = Assumptions()
    for setting in options.set:
        name, _, value = setting.partition("=")
        if name not in vars(assumed):
            parser.error(f"--set: expected one of {', '.join(vars(assumed))}, found {name}")
        setattr(assumed, name, type(getattr(assumed, name))(value))
    rates = Rates(options.kernels, options.forward, options.links)
    if options.validate:
        print("\n".join(describe(rates, assumed)))
        validate(options.validate, rates, assumed)
        return
    rows = predict_all(options.models.split(","), [int(g) for g in options.gpus.split(",")], options.tokens, rates, assumed, options.length)
    head = ["PREDICTED, not measured: seconds of a whole job", "", *(f"- {line}" for line in describe(rates, assumed)), ""]
    text = "\n".join([*head, "The plan with the least time (all, by plan: all_reduce / reduce_scatter / all_to_all):", "", compact_table(rows), table(rows)])
    print(text)
    if options.output:
        from scaling_figures import draw_prediction

        options.output.mkdir(parents=True, exist_ok=True)
        write_csv(rows, options.output / "predicted.csv")
        (options.output / "predicted.md").write_text(f"Made by bench/scaling_model.py on {time.strftime('%Y-%m-%d')}.\n\n{text}\n")
        curves = {name: token_curves(name, rows, rates, assumed) for name in options.models.split(",")}
        network = f"{assumed.nic_gbit_s:g} Gb/s a GPU between nodes of {assumed.gpus_per_node}, assumed"
        title = f"PREDICTED from rates of {rates.device.partition(' ')[2]} ({network}), {options.tokens:,} tokens"
        draw_prediction(rows, curves, title, options.output)


if __name__ == "__main__":
    main()
