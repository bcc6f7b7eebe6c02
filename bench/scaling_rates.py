"""What the hardware does a second, taken from result files of this folder. Standard library only.

No rate is typed in here: each comes from rows of a kernel benchmark (h200_kernels.json, h200_forward.json), a links file, or a production run, and
`sources` says which. Operations between the measured shapes are interpolated (rates, in the logarithm of the width) or follow a short sum of terms
whose coefficients are fitted to the rows, not negative and by relative error.
"""

import itertools
import json
import math
import pathlib
import re

RESULTS = pathlib.Path(__file__).resolve().parent / "results"


def solve_linear(matrix, right):
    """x of matrix x = right by elimination with pivots; None where singular."""
    n = len(right)
    rows = [list(row) + [value] for row, value in zip(matrix, right)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        if abs(rows[pivot][i]) < 1e-300:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(n):
            if r != i:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i])]
    return [rows[i][n] / rows[i][i] for i in range(n)]


def fit(samples):
    """Coefficients c >= 0 of time = sum c_i x_i with the least sum of squared relative errors. samples: (terms x, time).
    With three or four terms all subsets of them can be tried, and the best one without a negative coefficient is the optimum."""
    count = len(samples[0][0])
    scaled = [[x / time for x in terms] for terms, time in samples]
    best, best_error = [0.0] * count, math.inf
    for size in range(1, min(count, len(samples)) + 1):
        for chosen in itertools.combinations(range(count), size):
            # Columns are scaled to length one: terms differ by many orders of magnitude.
            length = {i: math.sqrt(sum(row[i] ** 2 for row in scaled)) or 1.0 for i in chosen}
            gram = [[sum(row[i] * row[j] for row in scaled) / length[i] / length[j] for j in chosen] for i in chosen]
            answer = solve_linear(gram, [sum(row[i] for row in scaled) / length[i] for i in chosen])
            if answer is None or min(answer) < 0:
                continue
            coefficients = [0.0] * count
            for i, value in zip(chosen, answer):
                coefficients[i] = value / length[i]
            error = sum((sum(c * x for c, x in zip(coefficients, row)) - 1) ** 2 for row in scaled)
            if error < best_error - 1e-12:
                best, best_error = coefficients, error
    return best


def dot(coefficients, terms):
    return sum(c * x for c, x in zip(coefficients, terms))


def interpolate(table, at):
    """Between the points of {x: y} linearly in log x and log y; the nearest point's value outside of them."""
    points = sorted(table.items())
    if at <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if at <= x1:
            return y0 * (y1 / y0) ** (math.log(at / x0) / math.log(x1 / x0))
    return points[-1][1]


def numbers(text):
    return [int(part) for part in re.findall(r"\d+", text)]


class Rates:
    """Seconds of single operations on one GPU, and GB/s of links."""

    def __init__(self, kernels=RESULTS / "h200_kernels.json", forward=RESULTS / "h200_forward.json", links=RESULTS / "h200x2_links.json"):
        self.sources = {"kernels": str(kernels), "forward": str(forward), "links": str(links)}
        found = json.loads(pathlib.Path(kernels).read_text())
        self.device = found["device"]
        rows = {}
        for row in found["results"] + json.loads(pathlib.Path(forward).read_text())["results"]:
            rows.setdefault(row["name"], []).append(row)
        self.read_links(json.loads(pathlib.Path(links).read_text()))
        self.read_linears(rows)
        self.read_grams(rows["gram"])
        self.read_solver(rows)
        # [length] -> FLOP/s of causal attention with heads of 128; TB/s of what only moves bytes.
        self.attention = {}
        for row in rows["attention"]:
            batch = re.fullmatch(r"\d+ x (\d+), heads \d+/8 of 128", row["shape"])
            if batch:
                self.attention[int(batch[1])] = row["rate"] * 1e12
        rows.setdefault("dispatch_rows", rows.get("gather_rows"))  # its name in files of 2026-11-30
        for name in ("rms_norm", "rope", "silu_mul", "add", "dispatch_rows", "combine_rows", "sum_stack", "pack_lower", "unpack_lower", "dequantize"):
            setattr(self, name, max(row["rate"] for row in rows[name]) * 1e12)

    def read_links(self, links):
        """GB/s of bus per collective. What a file lacks stands in for by its reduce-scatter, and `assumed` says so."""
        self.bus = dict(links["bus_gb_s"])
        self.link_date = links["date"]
        self.assumed_links = [name for name in ("all_gather", "all_to_all") if name not in self.bus]
        for name in self.assumed_links:
            self.bus[name] = self.bus["reduce_scatter"]

    def read_linears(self, rows):
        self.dense = {}  # inputs -> FLOP/s; the router's narrow product is no measure for others
        for row in rows["linear"]:
            _, inputs, outputs, _ = numbers(row["shape"])
            if outputs >= 1024:
                self.dense[inputs] = max(self.dense.get(inputs, 0), row["rate"] * 1e12)
        samples = []
        for row in rows["linear_stack"]:
            count, tokens, outputs, inputs = numbers(row["shape"])
            samples.append(((2 * count * tokens * outputs * inputs, 2 * count * outputs * inputs, count), row["ms"] / 1e3))
        self.stack = fit(samples)

    def read_grams(self, rows):
        """Per width n: FLOP/s in a long chain (as 2 T n^2), for stacks of experts what a call adds per matrix."""
        self.gram, by_width = {}, {}
        for row in rows:
            expert = re.fullmatch(r"(\d+) experts, about (\d+) tokens each, n = (\d+)", row["shape"])
            if expert:
                count, tokens, n = map(int, expert.groups())
                by_width.setdefault(n, []).append((tokens, row["ms"] / 1e3 / count))
            else:
                self.gram[numbers(row["shape"])[1]] = row["rate"] * 1e12
        self.expert_gram, self.gram_start = {n: rate for n, rate in self.gram.items() if n >= 4096}, {}
        for n, points in by_width.items():
            slope, start = fit([((tokens, 1.0), seconds) for tokens, seconds in points])
            self.expert_gram[n] = 2 * n * n / slope
            self.gram_start[n] = start / (n * n)  # seconds for each element of the sum: it is read and written

    def read_solver(self, rows):
        """Factorisation by n^3, n^2 and the chain of n columns; the column loop by its updates, elements and chain; scales by elements."""
        samples = []
        for row in rows["factorize"]:
            if "ordered" not in row["shape"]:
                count, n = numbers(row["shape"])
                samples.append((factor_terms(count, n), row["ms"] / 1e3))
        self.factor = fit(samples)
        shapes = {}
        for row in rows["gptq_block"]:
            match = re.fullmatch(r"(.+) (\d+) x \[(\d+), (\d+)\]", row["shape"])
            if match:
                shapes[match[1]] = tuple(map(int, match.groups()[1:]))
        loop, scales, other = [], [], []
        for row in rows["solve"]:
            name, _, observer = row["shape"].rpartition(", ")
            if observer == "hessian" and name in shapes:
                terms, figures = loop_terms(*shapes[name]), row["figures"]
                loop.append((terms, (figures["loop_ms"] + figures.get("update_ms", 0.0)) / 1e3))
                scales.append((terms[1:], figures["scales_ms"] / 1e3))
                other.append(((terms[1], shapes[name][0] * shapes[name][2] ** 2, 1.0), figures["other_ms"] / 1e3))
        self.loop, self.scales, self.other = fit(loop), fit(scales), fit(other)

    # ---- seconds of one operation --------------------------------------------------------------------
    def linear_seconds(self, tokens, outputs, inputs, count=1, calls=1):
        """tokens: rows of all matrices together."""
        flops = 2 * tokens * outputs * inputs
        if count == 1:
            return flops / interpolate(self.dense, inputs)
        return dot(self.stack, (flops, calls * 2 * count * outputs * inputs, calls * count))

    def attention_seconds(self, flops, length):
        return flops / interpolate(self.attention, length)

    def gram_seconds(self, tokens, n, count=1, calls=1):
        rate = interpolate(self.expert_gram if count > 1 else self.gram, n)
        return 2 * tokens * n * n / rate + calls * count * n * n * interpolate(self.gram_start, n)

    def solve_seconds(self, count, rows, cols, hessians):
        """hessians: factorisations, which are `count`, or 1 where a matrix is shared out by rows."""
        if count * rows == 0:
            return 0.0
        terms = loop_terms(count, rows, cols)
        other = dot(self.other, (terms[1], hessians * cols**2, 1.0))
        return dot(self.factor, factor_terms(hessians, cols)) + dot(self.loop, terms) + dot(self.scales, terms[1:]) + other


def factor_terms(count, n):
    return (count * n**3 / 3, count * n * n, n)


def loop_terms(count, rows, cols):
    return (count * rows * cols * cols, count * rows * cols, cols)
