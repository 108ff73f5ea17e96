"""Recompute answers from the recorded runs, with pandas and scipy, without the library's code.

`python benchmarks/recompute_answers.py` compares effects, intervals and p-values of ConViT's
Table 2 and of the shuffled images with `results/answers.csv`, and exits with 1 if one differs.
"""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

RESULTS = Path(__file__).parents[1] / "results"
SHUFFLED = {"as they are": "digits", "in one order for all": "digits_permuted"}
SHUFFLED |= {f"{n}% in their own order": f"digits_shuffled_{n}" for n in (25, 50)}
SHUFFLED |= {"each in its own order": "digits_shuffled_100"}


def runs(scale):
    lines = gzip.decompress((RESULTS / f"{scale}.runs.jsonl.gz").read_bytes()).splitlines()
    return pd.DataFrame(
        [r["config"] | {"record": r, **r["result"]} for r in map(json.loads, lines)]
    )


def gates(record, end):
    layers = record["measures"]["attention over training, 256 images"]["layers"]
    return np.mean([layer["gates"][end] for layer in layers if layer["gates"]])


def interval(values, shared, error=0.0):
    """Mean, ends and p-value; `shared` is Nadeau and Bengio's, `error` over images."""
    n, seeds = len(values), values.var(ddof=1) * (1 / len(values) + shared)
    variance, df = seeds + error**2, (n - 1) * ((seeds + error**2) / seeds) ** 2
    half = stats.t.ppf(0.975, df) * variance**0.5
    p = 2 * stats.t.sf(abs(values.mean()) / variance**0.5, df) if n > 2 else 1.0
    return values.mean(), values.mean() - half, values.mean() + half, p


found = {}
for scale in ("digits", "fashion", "fashion14"):
    table = runs(scale)
    plain = table[(table["optim.name"] == "adamuon") & (table["optim.position_lr_factor"] == 1)]
    plain = plain[(plain["data.dataset"] == plain["data.dataset"].mode()[0])]
    for fraction in plain["data.fraction"].unique():
        part = plain[plain["data.fraction"] == fraction]
        top1 = part.pivot_table(index="seed", columns="model.name", values="top1")
        top1 = top1[["convit_nano", "deit_nano"]].dropna()
        share, n = top1.mean() / 100, part["val_images"].iloc[0]
        error = 0.0 if scale == "digits" else 100 * ((share * (1 - share)).sum() / n) ** 0.5
        text = f"With {100 * fraction:g}% of the images, is ConViT above DeiT?"
        difference = top1["convit_nano"] - top1["deit_nano"]
        found[text, scale] = interval(difference, (scale == "digits") / 3, error)
table = runs("digits")
for label, dataset in SHUFFLED.items():
    own = table[(table["optim.name"] == "adamw") & (table["data.dataset"] == dataset)]
    own = own[own["optim.position_lr_factor"] == 10]["record"]
    fall = own.map(lambda r: gates(r, 0) - gates(r, -1))
    masks = [
        own.map(lambda r, m=m: r["measures"][f"top1, {m} masked"]) for m in ("position", "content")
    ]
    found[f"Patches {label}: do gates fall?", "digits"] = interval(fall, 1 / 3)
    text = f"Patches {label}: does masking content cost more than masking position?"
    found[text, "digits"] = interval(masks[0] - masks[1], 1 / 3)
answers = pd.read_csv(RESULTS / "answers.csv").set_index(["question", "scale"])
ours = pd.DataFrame(found, index=["effect", "low", "high", "p"]).T
theirs = answers.loc[ours.index, ours.columns]
wrong = ~np.isclose(ours, theirs, rtol=1e-4, atol=1e-5).all(axis=1)
print(
    pd.concat({"here": ours, "answers.csv": theirs}, axis=1).to_string(float_format="{:.5g}".format)
)
print(f"{len(ours)} answers recomputed, {wrong.sum()} differ")
sys.exit(bool(wrong.any()))
