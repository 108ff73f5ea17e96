"""Recompute answers from the recorded runs, with pandas and scipy, without the library's code.

`python benchmarks/recompute_answers.py` compares effects, intervals and p-values with
`results/answers.csv`, names the answers that it leaves out, and exits with 1 if one differs.
"""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

RESULTS = Path(__file__).parents[1] / "results"
NAMES = {"ConViT": "convit_nano", "DeiT": "deit_nano", "CvT": "cvt_nano", "CNN": "timm/test_resnet"}
PIXELS = "chance", "nearest neighbour", "logistic regression", "support vector machine"
ORDERS = ["as they are", "in one order for all", "25% in their own order",
          "50% in their own order", "each in its own order"]  # fmt: skip
# ruff: noqa: E501, B023, RUF007
SETS = (
    "digits",
    "digits_permuted",
    "digits_shuffled_25",
    "digits_shuffled_50",
    "digits_shuffled_100",
)
PLAIN = """\
Does masking position embeddings cost DeiT more than ConViT? = D.top1 - D.no_pos - C.top1 + C.no_pos
Does masking its position embedding cost ConViT accuracy? = C.top1 - C.no_pos
Does masking content cost more than masking position? = C.position3 - C.content3
Does masking content in all gated layers leave less than in the first? = C.content1 - C.content3
Does masking content in the first gated layers cost accuracy? = C.top1 - C.content1
Does masking position in the first gated layers cost accuracy? = C.top1 - C.position1
Without position in any gated layer, does much of the accuracy remain (over half)? = C.position3 - C.top1 / 2
Does DeiT become more local early in training? = (D.start - D.early).map(np.mean)
Does DeiT's first layer stay more local than it started? = D.start.str[0] - D.end.str[0]
Does DeiT's last layer end less local than its first? = D.end.str[3] - D.end.str[0]
Do ConViT's gated layers climb late in training? = (C.end - C.early).map(lambda x: x[:3].mean())
Do ConViT's gated layers end more local than DeiT's? = (D.end - C.end).map(lambda x: x[:3].mean())
Do gates of the deeper half fall? = C.gates0.str[2] - C.gates1.str[2]
Do gates of the first half keep positional attention (above 0.1)? = C.gates1.str[0] - 0.1
Does the deeper half end with less positional attention than the first? = C.gates1.str[0] - C.gates1.str[2]
Do GPSA layers help more early in training than at the end? = c10.first / d10.first - c10.top1 / d10.top1
Is ConViT's relative gain larger with few images than with many? = 100 * (c5.top1 / d5.top1 - C.top1 / D.top1)
Trained without position embedding, does DeiT lose (a, b)? = D.top1 - N.top1
Does CvT lose less than a point without position embeddings in every stage (f, c)? = V.top1 - P.top1 + 1
With all images, are frozen convolutions above random attention (f, g)? = F.top1 - G.top1
With all images, are frozen convolutions less than a point below attention (f, e)? = F.top1 - D.top1 + 1
Is ConViT-Ti above DeiT-Ti? = ct.top1 - dt.top1
Is ConViT-B above DeiT-B? = cb.top1 - db.top1
Does the larger ConViT become less local? = (cb.end - cb.start - ct.end + ct.start).map(np.mean)
Does the larger DeiT become less local? = (db.end - db.start - dt.end + dt.start).map(np.mean)
Does the larger ConViT keep more positional attention? = (cb.gates1 - ct.gates1).map(np.mean)
Early on, is ConViT without gates above DeiT? = S.first - D.first
Without gates, is ConViT below DeiT at the end? = D.top1 - S.top1
At the end, are gates (GPSA) above none (PSA)? = C.top1 - S.top1
Is convolutional embedding above patches (d, a)? = V.top1 - E.top1
Is convolutional projection above linear (d, a)? = V.top1 - L.top1
Do ConViT's first and last gated layers leave locality more than those between? = (C.end - C.start).map(lambda x: x[[0, 2]].mean() - x[1])
Do gates of the first half fall too? = C.gates0.str[0] - C.gates1.str[0]
Do ConViT-Ti's gates fall? = (ct.gates0 - ct.gates1).map(np.mean)
Do ConViT-B's gates fall? = (cb.gates0 - cb.gates1).map(np.mean)
Do GPSA layers help early in training? = c10["first"] / d10["first"] - 1
Does ConViT's relative gain grow with the size of the model? = 100 * (cb.top1 / db.top1 - ct.top1 / dt.top1)
In the first gated layers, does masking position cost no more than masking content? = C.position1 - C.content1
Does squeezing keys and values cost less than a point (b, a)? = V.top1 - W.top1 + 1
With 5% of the images, is ConViT's top-5 above DeiT's? = c5.top5 - d5.top5
Trained without position embedding, does DeiT lose more than CvT? = D.top1 - N.top1 - P.top1 + V.top1
"""


def numbers(line):
    r = json.loads(line)
    config, m = r["config"], r["measures"]
    row = config | r["result"] | {"first": r["curve"][0]["top1"], "name": config["model.name"]}
    row |= {n: m.get(f"{n} on pixels") for n in PIXELS}
    row["no_pos"] = m.get("top1, position embedding masked")
    for part in ("content", "position"):
        row[part] = m.get(f"top1, {part} masked")
        row |= {f"{part}{n}": m.get(f"top1, {part} masked in the first {n} layers") for n in (1, 3)}
    if t := m.get("attention over training, 256 images"):
        path = np.array([layer["nonlocality"] for layer in t["layers"]]).T
        gates = [[np.mean(heads) for heads in x["gates"]] for x in t["layers"] if x["gates"]]
        row |= {"start": path[0], "early": path[t["early"]], "end": path[-1]}
        row |= {f"gates{n}": np.array(gates)[:, -n] for n in ((0, 1) if gates else ())}
    return row


def interval(values, shared, error=0.0):
    """Mean, ends and p-value; `shared` is Nadeau and Bengio's, `error` over images."""
    n, seeds = len(values), values.var(ddof=1) * (1 / len(values) + shared)
    variance, df = seeds + error**2, (n - 1) * ((seeds + error**2) / seeds) ** 2
    half = stats.t.ppf(0.975, df) * variance**0.5
    p = 2 * stats.t.sf(abs(values.mean()) / variance**0.5, df) if n > 2 else 1.0
    return values.mean(), values.mean() - half, values.mean() + half, p


found = {}
for scale in ("digits", "fashion", "fashion14"):
    lines = gzip.decompress((RESULTS / f"{scale}.runs.jsonl.gz").read_bytes()).splitlines()
    table = pd.DataFrame(map(numbers, lines)).set_index("seed", drop=False).sort_index()
    images, data = table["val_images"].iloc[0], table["data.dataset"].mode()[0]

    def arm(name="ConViT", fraction=1.0, optim=None, factor=1.0, dataset=data, **model):
        of = table[(table["name"] == NAMES[name]) & (table["data.fraction"] == fraction)]
        optim = optim or ("adamw" if (scale, name) == ("digits", "CNN") else "adamuon")
        known = {"optim.name": optim, "optim.position_lr_factor": factor, "data.dataset": dataset}
        fields = [c for c in of if c.startswith("model.") and not of[c].isna().all()]
        usual = {c: of[c].astype(str).mode()[0] for c in fields}
        known |= usual | {f"model.{key}": value for key, value in model.items()}
        return of[(of[list(known)].astype(str) == pd.Series(known).astype(str)).all(axis=1)]

    def put(text, values, *accuracies):
        if values.dropna().empty:
            return
        share = pd.Series([x.mean() / 100 for x in accuracies])
        error = 0.0 if scale == "digits" else 100 * ((share * (1 - share)).sum() / images) ** 0.5
        found[text, scale] = interval(values.dropna(), (scale == "digits") / 3, error)

    for f in sorted(table["data.fraction"].unique()):
        c, d, v, cnn = (arm(name, f) for name in NAMES)
        part = f"With {100 * f:g}% of the images, is "
        put(part + "ConViT above DeiT?", c.top1 - d.top1, c.top1, d.top1)
        best = c[list(PIXELS)].astype(float).max(axis=1, skipna=False)
        for name, x in zip(NAMES, (c, d, v), strict=False):
            put(f"{part}{name} above the CNN?", x.top1 - cnn.top1, x.top1, cnn.top1)
            put(f"{part}{name} above all baselines on pixels?", x.top1 - best, x.top1, best)
        text = "Is CvT-13 above DeiT-S?" if f == 1 else part + "CvT-13 above DeiT-S?"
        put(text, v.top1 - d.top1, v.top1, d.top1)
    if scale != "digits":
        continue
    known = {
        "np": np,
        "C": arm(),
        "D": arm("DeiT"),
        "V": arm("CvT"),
        "P": arm("CvT", use_pos_embed=True),
    }
    known |= {
        "N": arm("DeiT", use_pos_embed=False),
        "c5": arm(fraction=0.05),
        "c10": arm(fraction=0.1),
    }
    known |= {"d5": arm("DeiT", 0.05), "d10": arm("DeiT", 0.1)}
    for name, arms in (("ConViT", ("ct", "cb")), ("DeiT", ("dt", "db"))):
        known |= {arms[0]: arm(name, embed_dim=40), arms[1]: arm(name, embed_dim=108, num_heads=9)}
    frozen = {"freeze_gpsa": True, "freeze_gating": True, "gating_init": 0.0}
    known |= {"F": arm(**frozen), "G": arm(**frozen, conv_init=False)}
    known |= {"S": arm(positional_attention="psa"), "L": arm("CvT", projection="linear")}
    known["W"] = arm("CvT", kv_stride=1.0)
    known |= {"E": arm("CvT", embed_kernel=[1, 2, 1], embed_padding=0.0)}
    for line in PLAIN.splitlines():
        put(line.partition(" = ")[0], eval(line.partition(" = ")[2], known))
    for n in range(4):
        text = f"After the early phase, does DeiT's layer {n + 1} become less local?"
        put(text, known["D"].end.str[n] - known["D"].early.str[n])
    for n in range(3):
        left = known["C"].end.str[n] - known["C"].start.str[n]
        put(f"Does ConViT's gated layer {n + 1} leave locality?", left)
        rate = arm(factor=10.0**n)
        fall = (rate.gates0 - rate.gates1).map(np.mean)
        put(f"With the rate of v_pos and λ ×{10**n}, do gates fall?", fall)
    arms = {
        order: arm("ConViT", 1.0, "adamw", 10.0, x) for order, x in zip(ORDERS, SETS, strict=True)
    }
    for order, x in arms.items():
        put(f"Patches {order}: do gates fall?", (x.gates0 - x.gates1).map(np.mean))
        text = f"Patches {order}: does masking content cost more than masking position?"
        put(text, x.position - x.content)
        for n in range(3):
            text = f"Patches {order}: does layer {n + 1} become less local?"
            put(text, x.end.str[n] - x.start.str[n])
    dial = [order for order in ORDERS if order != "in one order for all"]
    for less, more in zip(dial, dial[1:], strict=False):
        lower = arms[less].gates1.map(np.mean) - arms[more].gates1.map(np.mean)
        put(f"Are gates lower with patches {more} than {less}?", lower)
answers = pd.read_csv(RESULTS / "answers.csv").set_index(["question", "scale"])
ours = pd.DataFrame(found, index=["effect", "low", "high", "p"]).T
theirs = answers[ours.columns].dropna()
both = ours.index.intersection(theirs.index)
wrong = ~np.isclose(ours.loc[both], theirs.loc[both], rtol=1e-4, atol=1e-5).all(axis=1)
print(pd.concat({"here": ours.loc[both][wrong], "answers.csv": theirs.loc[both][wrong]}, axis=1))
print("left out:", *map(" / ".join, theirs.index.difference(both)), sep="\n  ")
print(
    f"{len(both)} of {len(answers)} answers recomputed: {len(both) - wrong.sum()} equal, {wrong.sum()} not"
)
sys.exit(bool(wrong.any()))
