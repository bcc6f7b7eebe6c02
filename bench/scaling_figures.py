"""Figures of bench/scaling_study.py (measured) and bench/scaling_model.py (predicted). Needs matplotlib."""

import math

FAMILY_COLOURS = {"forward": "#4c78a8", "hessian": "#f58518", "solve": "#54a24b", "communication": "#e45756", "waiting": "#b279a2", "files": "#bab0ac", "other": "#79706e"}
PLAN_MARKS = {"-": "o", "reduce_scatter": "o", "all_reduce": "s", "all_to_all": "^"}
PLAN_SHORT = {"-": "", "reduce_scatter": "rs", "all_reduce": "ar", "all_to_all": "a2a"}


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "shardq"  # the same figure, the same bytes
    import matplotlib.pyplot as plt

    return plt


def save(figure, output, name):
    for kind in ("png", "svg"):
        figure.savefig(output / f"{name}.{kind}", dpi=110, metadata={"Date": None} if kind == "svg" else None)


def crossing(points):
    """Tokens at which the Hessian's time passes the solve's, by interpolation in the logarithm; None if it never does.
    points: (tokens, hessian, solve), ascending in tokens."""
    for (t0, h0, s0), (t1, h1, s1) in zip(points, points[1:]):
        if min(h0, s0, h1, s1) <= 0:
            continue
        before, after = math.log(h0 / s0), math.log(h1 / s1)
        if before < 0 <= after:
            return t0 * (t1 / t0) ** (-before / (after - before))
    return None


def tokens_text(tokens):
    return f"{tokens / 2**20:g}M" if tokens >= 2**20 else f"{tokens / 1024:g}k" if tokens >= 1024 else f"{tokens:g}"


def plans_of(rows, ranks):
    return list(dict.fromkeys(row["plan"] for row in rows if row["ranks"] == ranks))


def mark_crossing(axis, points, colour, row):
    """A dotted line at the crossing; labels of several lines stand below each other."""
    cross = crossing(points)
    if cross:
        axis.axvline(cross, color=colour, linewidth=0.9, linestyle=":")
        place = (cross, 0.03 + 0.06 * row)
        axis.annotate(f" {cross:,.0f}", place, xycoords=axis.get_xaxis_transform(), color=colour, fontsize=8, ha="left")


def draw_times(axis, rows, colours):
    """Hessian against solve over tokens. Plans differ little in both, so each number of ranks shows its first plan."""
    for index, (ranks, colour) in enumerate(colours.items()):
        plan = plans_of(rows, ranks)[0]
        points = sorted((r["tokens"], r["hessian"], r["solve"]) for r in rows if r["ranks"] == ranks and r["plan"] == plan)
        tokens, hessian, solve = zip(*points)
        axis.plot(tokens, hessian, "o-", color=colour, label=f"Hessian, {ranks} rank{'s' * (ranks > 1)}")
        axis.plot(tokens, solve, "s--", color=colour, label=f"solve, {ranks} rank{'s' * (ranks > 1)}")
        mark_crossing(axis, points, colour, index)
    axis.set(xscale="log", yscale="log", xlabel="calibration tokens", ylabel="seconds", title="Hessian against solve, crossing dotted")
    ticks = sorted({row["tokens"] for row in rows})
    axis.set_xticks(ticks, [tokens_text(t) for t in ticks])
    axis.minorticks_off()
    axis.legend(fontsize=8)


def draw_stacks(axis, rows, families):
    """Phases at the largest calibration size, for each number of ranks and plan."""
    largest = max(row["tokens"] for row in rows)
    shown = [row for row in rows if row["tokens"] == largest]
    labels = [f"{row['ranks']}" + (f" {PLAN_SHORT.get(row['plan'], row['plan'])}" if row["plan"] != "-" else "") for row in shown]
    bottom = [0.0] * len(shown)
    for family in families:
        values = [row[family] for row in shown]
        axis.bar(range(len(shown)), values, bottom=bottom, label=family, color=FAMILY_COLOURS[family])
        bottom = [b + v for b, v in zip(bottom, values)]
    axis.set_xticks(range(len(shown)), labels)
    axis.set(ylabel="seconds of rank 0", xlabel="ranks and plan", title=f"Phases, {largest:,} tokens", ylim=(0, 1.2 * max(bottom)))
    axis.set_axisbelow(True)
    axis.legend(fontsize=8, ncols=3, loc="upper center")


def draw_speed(axis, rows, table, tokens_list):
    """table: (ranks, tokens, plan) -> (speed-up, efficiency)."""
    ranks_list = sorted({row["ranks"] for row in rows})
    for index, tokens in enumerate(tokens_list):
        for plan in dict.fromkeys(row["plan"] for row in rows if row["plan"] != "-"):
            ranks = [r for r in ranks_list if (r, tokens, plan) in table or (r == ranks_list[0] and (r, tokens, "-") in table)]
            if len(ranks) < 2:
                continue
            values = [100 * table.get((r, tokens, plan), table.get((r, tokens, "-")))[1] for r in ranks]
            style = {"marker": PLAN_MARKS.get(plan, "x"), "color": f"C{index}", "linestyle": "-" if plan == "reduce_scatter" else "--"}
            axis.plot(ranks, values, label=f"{tokens_text(tokens)} {PLAN_SHORT.get(plan, plan)}", **style)
    axis.axhline(100, color="k", linestyle=":")
    axis.set(xlabel="ranks", ylabel="per cent", title="Efficiency of everything but files", ylim=(0, 115))
    if len(ranks_list) > 1:
        axis.set_xscale("log", base=2)
    axis.set_xticks(ranks_list, [str(r) for r in ranks_list])
    axis.minorticks_off()
    axis.legend(fontsize=8, ncols=2)


def draw_share(axis, rows):
    """Share of the time without files that a rank spends in communication; within it, waiting for a rank that comes late."""
    for ranks in sorted({row["ranks"] for row in rows if row["ranks"] > 1}):
        for plan in plans_of(rows, ranks):
            points = sorted((r["tokens"], 100 * r["communication"] / max(r["busy"], 1e-9)) for r in rows if r["ranks"] == ranks and r["plan"] == plan)
            axis.plot(*zip(*points), marker=PLAN_MARKS.get(plan, "x"), label=f"{ranks} ranks, {PLAN_SHORT.get(plan, plan)}")
    axis.set(xscale="log", xlabel="calibration tokens", ylabel="per cent", title="Exposed communication", ylim=(0, None))
    ticks = sorted({row["tokens"] for row in rows})
    axis.set_xticks(ticks, [tokens_text(t) for t in ticks])
    axis.minorticks_off()
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)


def draw_study(rows, families, table, title, output, name):
    """Four figures of one model's measured runs."""
    plt = pyplot()
    ranks_list = sorted({row["ranks"] for row in rows})
    colours = {r: plt.cm.viridis(0.85 * i / max(len(ranks_list) - 1, 1)) for i, r in enumerate(ranks_list)}
    figure, axes = plt.subplots(2, 2, figsize=(12, 9), constrained_layout=True)
    figure.suptitle(title)
    draw_times(axes[0][0], rows, colours)
    draw_stacks(axes[0][1], rows, families)
    tokens_list = sorted({row["tokens"] for row in rows})
    draw_speed(axes[1][0], rows, table, tokens_list if len(tokens_list) < 4 else tokens_list[-3:])
    draw_share(axes[1][1], rows)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
    save(figure, output, name)
    plt.close(figure)


def draw_prediction(rows, curves, title, output):
    """rows of scaling_model.predict_all; curves: model -> [(label, [(tokens, hessian, solve)])]."""
    plt = pyplot()
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(2, len(models), figsize=(4.6 * len(models), 9), constrained_layout=True, squeeze=False)
    figure.suptitle(title)
    parts = ("forward", "hessian", "solve", "reduce", "gather")
    colours = dict(zip(parts, ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2")))
    for column, model in enumerate(models):
        axis, shown = axes[0][column], [row for row in rows if row["model"] == model]
        bottom = [0.0] * len(shown)
        for part in parts:
            values = [row[part] * row["gpus"] / 3600 for row in shown]
            axis.bar(range(len(shown)), values, bottom=bottom, label=part, color=colours[part])
            bottom = [b + v for b, v in zip(bottom, values)]
        base = bottom[0]
        for x, (row, top) in enumerate(zip(shown, bottom)):
            if top > 4.2 * base:
                axis.annotate(f"{top / base:.0f}x", (x, 4.05 * base), ha="center", fontsize=7)
            if not row["fits"]:
                axis.annotate("memory", (x, min(top, 4 * base)), ha="center", va="bottom", fontsize=7, rotation=90)
        labels = [f"{row['gpus']} {PLAN_SHORT[row['plan']]}" + (" *" if row["wins"] and row["gpus"] > 1 else "") for row in shown]
        axis.set_xticks(range(len(shown)), labels, rotation=90, fontsize=8)
        axis.set(title=f"{model}\nflat: perfect scaling; *: least time", ylim=(0, 4.3 * base), ylabel="GPU-hours" if column == 0 else "")
        axis.legend(fontsize=8, loc="upper left")
        axis = axes[1][column]
        for index, (label, points) in enumerate(curves[model]):
            axis.plot([p[0] for p in points], [p[1] for p in points], "-", color=f"C{index}", label=f"Hessian, {label}")
            axis.plot([p[0] for p in points], [p[2] for p in points], "--", color=f"C{index}", label=f"solve, {label}")
            mark_crossing(axis, points, f"C{index}", index)
        axis.set(
            xscale="log", yscale="log", xlabel="calibration tokens", ylabel="seconds" if column == 0 else "", title="Hessian against solve, crossing dotted"
        )
        axis.legend(fontsize=8)
        axis.grid(alpha=0.25)
    save(figure, output, "predicted")
    plt.close(figure)
