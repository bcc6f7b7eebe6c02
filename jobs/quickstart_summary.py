#!/usr/bin/env python3
"""Prints what the quick start did: perplexity, size, verdicts, time, files. Standard library only.

    python3 jobs/quickstart_summary.py MODEL FOLDER      FOLDER holds before.json, after.json, model/ and work/
"""

import json
import pathlib
import sys


def weight_bytes(directory):
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def readable_bytes(count):
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000


def scheme(directory):
    """How the output says it is quantized, e.g. int4, symmetric, groups of 32."""
    weights = json.loads((directory / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]["weights"]
    group = f"groups of {weights['group_size']}" if weights.get("group_size", -1) and weights["group_size"] > 0 else "one scale a row"
    return f"int{weights['num_bits']}, {'symmetric' if weights['symmetric'] else 'with zero points'}, {group}"


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: quickstart_summary.py MODEL FOLDER")
    source, folder = map(pathlib.Path, sys.argv[1:])
    before, after = (json.loads((folder / name).read_text()) for name in ("before.json", "after.json"))
    report = json.loads((folder / "work/report.json").read_text())
    size_before, size_after = weight_bytes(source), weight_bytes(folder / "model")
    change = 100 * (after["perplexity"] / before["perplexity"] - 1)
    phases = sorted(((name, seconds) for name, seconds in report["phases"].items() if seconds >= 0.005), key=lambda item: -item[1])
    # Losses relative to plain rounding: what the calibration bought.
    ratios = [module["loss_over_rtn"] for module in report["modules"] if module.get("loss_over_rtn") is not None]

    rows = [
        ("model", f"{source}, {scheme(folder / 'model')}"),
        ("perplexity", f"{before['perplexity']:.3f} before, {after['perplexity']:.3f} after ({change:+.2f} %), over {after['tokens']:,} held-out tokens"),
        ("size", f"{readable_bytes(size_before)} before, {readable_bytes(size_after)} after ({size_before / size_after:.2f} times smaller)"),
        ("modules", ", ".join(f"{count} {verdict}" for verdict, count in sorted(report["verdicts"].items()))),
    ]
    if ratios:
        rows.append(("error", f"{sum(ratios) / len(ratios):.2f} of plain rounding's, mean over {len(ratios)} modules"))
    rows += [
        ("time", f"{report['seconds']:.1f} s on {report['ranks']} ranks ({report['device']}), {report['tokens']:,} calibration tokens"),
        ("", "rank 0: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases)),
        ("files", f"{folder}/model          the quantized model (compressed-tensors)"),
        ("", f"{folder}/work           report.json, metrics.jsonl"),
    ]
    print("\n" + "\n".join(f"  {name:<11} {text}" for name, text in rows))


if __name__ == "__main__":
    main()
