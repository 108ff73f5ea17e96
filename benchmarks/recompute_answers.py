"""Recompute answers from the recorded runs, with pandas and scipy, without the library's code.

`python benchmarks/recompute_answers.py` compares effects, intervals, p-values and, by their
families, answers with `results/answers.csv`, names what it leaves out, and exits with 1 if
anything differs.
"""

import base64
import gzip
import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import yaml
from scipy import stats

# ruff: noqa: E501, B023
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PROTOCOL = yaml.safe_load((ROOT / "src/locality_papers/protocol.yaml").read_text())
NAMES = {"ConViT": "convit_nano", "DeiT": "deit_nano", "CvT": "cvt_nano", "CNN": "timm/test_resnet"}
PIXELS = "chance", "nearest neighbour", "logistic regression", "support vector machine"
ORDERS = {
    "as they are": "",
    "in one order for all": "_permuted",
    "25% in their own order": "_shuffled_25",
    "50% in their own order": "_shuffled_50",
    "each in its own order": "_shuffled_100",
}
# Accuracies of an arm: column → the measure that has them, and which images are right.
MASKS = {"no_pos": "position embedding masked"} | {
    f"{part}{n}": f"{part} masked{f' in the first {n} layers' if n else ''}"
    for part in ("content", "position") for n in ("", 1, 2, 3)
}  # fmt: skip
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
Does DeiT's last layer end less local than its first? = D.end.str[-1] - D.end.str[0]
Do ConViT's gated layers climb late in training? = (C.end - C.early).map(lambda x: x[:3].mean())
Do ConViT's gated layers end more local than DeiT's? = (D.end - C.end).map(lambda x: x[:3].mean())
Do gates of the deeper half fall? = C.gates0.str[-1] - C.gates1.str[-1]
Do gates of the first half keep positional attention (above 0.1)? = C.gates1.str[0]
Does the deeper half end with less positional attention than the first? = C.gates1.str[0] - C.gates1.str[-1]
Do GPSA layers help more early in training than at the end? = c10.early1 / d10.early1 - c10.top1 / d10.top1
Is ConViT's relative gain larger with few images than with many? = 100 * (c0.top1 / d0.top1 - c9.top1 / d9.top1)
Trained without position embedding, does DeiT lose (a, b)? = D.top1 - N.top1
Does CvT lose less than a point without position embeddings in every stage (f, c)? = V.top1 - P.top1
With all images, are frozen convolutions above random attention (f, g)? = F.top1 - G.top1
With all images, are frozen convolutions less than a point below attention (f, e)? = F.top1 - D.top1
Is ConViT-Ti above DeiT-Ti? = ct.top1 - dt.top1
Is ConViT-B above DeiT-B? = cb.top1 - db.top1
Does the larger ConViT become less local? = (cb.end - cb.start - ct.end + ct.start).map(np.mean)
Does the larger DeiT become less local? = (db.end - db.start - dt.end + dt.start).map(np.mean)
Does the larger ConViT keep more positional attention? = (cb.gates1 - ct.gates1).map(np.mean)
Early on, is ConViT without gates above DeiT? = S.early1 - D.early1
Without gates, is ConViT below DeiT at the end? = D.top1 - S.top1
At the end, are gates (GPSA) above none (PSA)? = C.top1 - S.top1
Is convolutional embedding above patches (d, a)? = V.top1 - E.top1
Is convolutional projection above linear (d, a)? = V.top1 - L.top1
Do ConViT's first and last gated layers leave locality more than those between? = (C.end - C.start).map(lambda x: x[[0, 2]].mean() - x[1])
Do gates of the first half fall too? = C.gates0.str[0] - C.gates1.str[0]
Do ConViT-Ti's gates fall? = (ct.gates0 - ct.gates1).map(np.mean)
Do ConViT-B's gates fall? = (cb.gates0 - cb.gates1).map(np.mean)
Do GPSA layers help early in training? = c10.early1 / d10.early1 - 1
Does ConViT's relative gain grow with the size of the model? = 100 * (cb.top1 / db.top1 - ct.top1 / dt.top1)
In the first gated layers, does masking position cost no more than masking content? = C.position1 - C.content1
Does squeezing keys and values cost less than a point (b, a)? = V.top1 - W.top1
With {FEWEST} of the images, is ConViT's top-5 above DeiT's? = c0.top5 - d0.top5
Trained without position embedding, does DeiT lose more than CvT? = D.top1 - N.top1 - P.top1 + V.top1
Do heads of ConViT's layer 2 differ more in their nonlocality than DeiT's? = (ct.heads - dt.heads)
Does CvT lose less than a point without position embeddings in the first stage (f, d)? = V.top1 - Q.top1
Does CvT lose less than a point without position embeddings in the last stage (f, e)? = V.top1 - U.top1
With position embeddings, is convolutional embedding above patches (c, b)? = P.top1 - B.top1
Do patches gain from position embeddings (b, a)? = B.top1 - E.top1
Do position embeddings bring more to patches than to convolutions? = B.top1 - E.top1 - P.top1 + V.top1
Does convolutional projection help in stage 1 (b, a)? = M.top1 - L.top1
Does it help in stage 2 too (c, b)? = O.top1 - M.top1
Does it help in stage 3 too (d, c)? = V.top1 - O.top1
Is CvT-13 above DeiT-S? = V.top1 - D.top1
"""


def numbers(line):
    r = json.loads(line)
    config, m = r["config"], r["measures"]
    row = config | r["result"] | {"early1": r["curve"][0]["top1"], "name": config["model.name"]}
    row |= {n: m.get(f"{n} on pixels") for n in PIXELS} | {"right:top1": r.get("right")}
    for column, name in MASKS.items():
        value = m.get(f"top1, {name}")
        of = value if isinstance(value, dict) else {"top1": value, "right": None}
        row |= {column: of["top1"], f"right:{column}": of["right"]}
    if t := m.get("attention over training, 256 images"):
        path = np.array([layer["nonlocality"] for layer in t["layers"]]).T
        gates = [[np.mean(heads) for heads in x["gates"]] for x in t["layers"] if x["gates"]]
        row |= {"start": path[0], "early": path[t["early"]], "end": path[-1]}
        row["heads"] = np.std(t["layers"][1]["nonlocality_per_head"][-1], ddof=1)
        row |= {f"gates{n}": np.array(gates)[:, -n] for n in ((0, 1) if gates else ())}
    return row


def interval(values, at, shared=0.0, error=0.0, by_image=None):
    """Mean, ends and p-value of "it is `at`"; `shared` is Nadeau and Bengio's, `error` over images,
    `by_image` (seeds, images) two-way tables."""
    n, mean = len(values), values.mean()
    if n == 1:
        return mean, np.nan, np.nan, 1.0
    seeds = values.var(ddof=1) * (1 / n + shared)
    variance, df = seeds + error**2, (n - 1) * ((seeds + error**2) / seeds) ** 2
    if by_image is not None:
        k = by_image.shape[1]
        rows, columns = by_image.mean(axis=1), by_image.mean(axis=0)
        rest = by_image - rows[:, None] - columns + by_image.mean()
        squares = k * rows.var(ddof=1), n * columns.var(ddof=1), (rest**2).sum() / (n - 1) / (k - 1)
        total = max(squares[0] + squares[1] - squares[2], squares[2])
        parts = squares[0] ** 2 / (n - 1) + squares[1] ** 2 / (k - 1)
        variance = total / n / k
        df = total**2 / (parts + squares[2] ** 2 / (n - 1) / (k - 1))
    half = stats.t.ppf(0.975, df) * variance**0.5
    p = 2 * stats.t.sf(abs(mean - at) / variance**0.5, df) if n > 2 else 1.0
    return mean, mean - half, mean + half, p


answers = pd.read_csv(RESULTS / "answers.csv", dtype={"protocol": str}).set_index(
    ["question", "scale"]
)
found = {}
for scale in ("photographs", "digits", "fashion", "fashion14"):
    if not (file := RESULTS / f"{scale}.runs.jsonl.gz").exists():
        continue
    table = pd.DataFrame(map(numbers, gzip.decompress(file.read_bytes()).splitlines()))
    if scale == "photographs":  # without the trials, which have images of their own
        table = table[table["data.train_part"].map(tuple) == (0.0, 0.9)]
    table = table.set_index("seed", drop=False).sort_index()
    images, data = (
        table["val_images"].iloc[0],
        table["data.dataset"].mode()[0].partition("_shuf")[0],
    )
    base, photographs = (0.05 if scale == "photographs" else 1.0), scale == "photographs"

    def arm(name="ConViT", fraction=base, optim=None, factor=None, dataset=data, **model):
        of = table[(table["name"] == NAMES[name]) & (table["data.fraction"] == fraction)]
        if factor is None:
            factor = 10.0 if photographs and name == "ConViT" else 1.0
        usual_optim = "adamw" if (scale, name) == ("digits", "CNN") else "adamuon"
        if photographs and not of.empty:  # the trials' choice
            usual_optim = of[of["data.dataset"] == data]["optim.name"].mode()[0]
        known = {"optim.name": optim or usual_optim, "optim.position_lr_factor": factor}
        known["data.dataset"] = dataset
        fields = [c for c in of if c.startswith("model.") and not of[c].isna().all()]
        usual = table[table["name"] == NAMES[name]]
        known |= {c: usual[c].astype(str).mode()[0] for c in fields}
        known |= {f"model.{key}": value for key, value in model.items()}
        if not set(known) <= set(of):
            return of[:0]
        of = of[(of[list(known)].astype(str) == pd.Series(known).astype(str)).all(axis=1)]
        return of[of["augment.pad"] != 0] if dataset == data and optim is None else of

    def evaluated(formula, **moved):
        """A formula with accuracies moved by a little."""
        for term, step in moved.items():
            formula = re.sub(
                rf"\b{term.replace('__', '[.]')}\b",
                f"({term.replace('__', '.')} + {step})",
                formula,
            )
        return eval(formula, {"np": np} | known)

    def put(text, formula):
        if (text, scale) not in answers.index:
            return
        values = evaluated(formula).dropna().astype(float)
        if values.empty:
            return
        at = answers.loc[(text, scale), "threshold"]
        at = 0.0 if np.isnan(at) else at
        if scale == "digits":
            found[text, scale] = interval(values, at, 1 / 3)
            return
        pattern = rf"\b(\w+)\.(top1|top5|early1|best|{'|'.join(MASKS)})\b"
        terms = list(dict.fromkeys(re.findall(pattern, formula)))
        slopes, shares, right = [], [], []
        for name, column in terms:
            of = known[name].loc[values.index]
            slopes.append(
                (evaluated(formula, **{f"{name}__{column}": 1e-3}) - values).mean() / 1e-3
            )
            shares.append(
                (pixels.mean().max() if column == "best" else of[column].astype(float).mean()) / 100
            )
            bits = of.get(f"right:{column}", pd.Series([None]))
            right.append(
                None
                if bits.isna().any()
                else np.array(
                    [
                        np.unpackbits(np.frombuffer(base64.b64decode(x), np.uint8))[:images]
                        for x in bits
                    ]
                )
            )
        if not terms:
            found[text, scale] = interval(values, at)
        elif all(x is not None for x in right) and len(values) > 1:
            by_image = 100 * np.tensordot(slopes, right, 1)
            by_image += (values.to_numpy() - by_image.mean(axis=1))[:, None]
            found[text, scale] = interval(values, at, by_image=by_image)
        else:  # independent where subtracted; of two that add up, all in one that can be in both
            pairs = [
                (a * b, p, q)
                for a, p in zip(slopes, shares, strict=True)
                for b, q in zip(slopes, shares, strict=True)
            ]
            error = sum(ab * (min(p, q) - p * q) for ab, p, q in pairs if ab > 0)
            found[text, scale] = interval(values, at, error=100 * (error / images) ** 0.5)

    fractions = sorted(table[table["data.dataset"] == data]["data.fraction"].unique())
    known = {"C": arm(), "D": arm("DeiT"), "V": arm("CvT"), "P": arm("CvT", use_pos_embed=True)}
    known |= {
        "Q": arm("CvT", use_pos_embed=[True, False, False]),
        "U": arm("CvT", use_pos_embed=[False, False, True]),
    }
    known |= {
        "N": arm("DeiT", use_pos_embed=False),
        "c10": arm(fraction=0.1),
        "d10": arm("DeiT", 0.1),
    }
    for name, f in (("0", fractions[0]), ("9", fractions[-1])):
        known |= {f"c{name}": arm(fraction=f), f"d{name}": arm("DeiT", f)}
    for name, (tiny, large) in (("ConViT", ("ct", "cb")), ("DeiT", ("dt", "db"))):
        known |= {tiny: arm(name, embed_dim=40), large: arm(name, embed_dim=108, num_heads=9)}
    frozen = {"freeze_gpsa": True, "freeze_gating": True, "gating_init": 0.0}
    known |= {
        "F": arm(**frozen),
        "G": arm(**frozen, conv_init=False),
        "S": arm(positional_attention="psa"),
    }
    known |= {"W": arm("CvT", kv_stride=1.0), "L": arm("CvT", projection="linear")}
    known |= {
        "M": arm("CvT", projection=["conv", "linear", "linear"]),
        "O": arm("CvT", projection=["conv", "conv", "linear"]),
    }
    patches = {"embed_kernel": [1, 2, 1] if scale == "digits" else [2, 2, 1], "embed_padding": 0.0}
    known |= {"E": arm("CvT", **patches), "B": arm("CvT", **patches, use_pos_embed=True)}
    depth = 4 if scale == "digits" else 5
    for f in fractions:
        part = f"With {100 * f:g}% of the images, is "
        arms = {name: arm(name, f) for name in NAMES}
        pixels = arms["ConViT"][list(PIXELS)].astype(float)
        known |= {name.lower(): of for name, of in arms.items()} | {
            "pixels": pd.DataFrame({"best": pixels.max(axis=1, skipna=False)})
        }
        put(part + "ConViT above DeiT?", "convit.top1 - deit.top1")
        put(part + "CvT-13 above DeiT-S?", "cvt.top1 - deit.top1")
        for name in ("ConViT", "DeiT", "CvT"):
            put(f"{part}{name} above the CNN?", f"{name.lower()}.top1 - cnn.top1")
            put(
                f"{part}{name} above all baselines on pixels?", f"{name.lower()}.top1 - pixels.best"
            )
    for line in PLAIN.replace("{FEWEST}", f"{100 * fractions[0]:g}%").splitlines():
        text, _, formula = line.partition(" = ")
        put(text, formula)
    if "start" not in table:
        continue
    for n in range(depth):
        put(
            f"After the early phase, does DeiT's layer {n + 1} become less local?",
            f"D.end.str[{n}] - D.early.str[{n}]",
        )
    for n in range(3):
        put(
            f"Does ConViT's gated layer {n + 1} leave locality?",
            f"C.end.str[{n}] - C.start.str[{n}]",
        )
        known["R"] = arm(factor=10.0**n)
        if scale == "fashion":  # planned with the scale's few seeds
            known["R"] = known["R"].loc[:2]
        put(
            f"With the rate of v_pos and λ ×{10**n}, do gates fall?",
            "(R.gates0 - R.gates1).map(np.mean)",
        )
    for number, (order, suffix) in enumerate(ORDERS.items()):
        of = known[f"X{number}"] = arm(optim="adamw", factor=10.0, dataset=data + suffix)
        known[f"X{number}"] = of[of["augment.pad"] == 0]
        x = f"X{number}"
        put(f"Patches {order}: do gates fall?", f"({x}.gates0 - {x}.gates1).map(np.mean)")
        put(
            f"Patches {order}: does masking content cost more than masking position?",
            f"{x}.position - {x}.content",
        )
        for n in range(3):
            put(
                f"Patches {order}: does layer {n + 1} become less local?",
                f"{x}.end.str[{n}] - {x}.start.str[{n}]",
            )
    dial = [(n, order) for n, order in enumerate(ORDERS) if n != 1]
    for (a, less), (b, more) in itertools.pairwise(dial):
        put(
            f"Are gates lower with patches {more} than {less}?",
            f"X{a}.gates1.map(np.mean) - X{b}.gates1.map(np.mean)",
        )


def holm(p):
    """Which of p-values are below Holm's bounds."""
    order, passed = np.argsort(p), np.zeros(len(p), bool)
    for rank, index in enumerate(order):
        if p[index] > 0.05 / (len(p) - rank):
            break
        passed[index] = True
    return passed


def verdict(family, listed):
    """Answers of a family, given the number of listed questions without runs."""
    side = np.where(family.index.get_level_values(0).str.contains("below 1%"), -1, 1)
    distance = side * (family["effect"] - family["threshold"].fillna(0))
    out = pd.Series("cannot tell", family.index)
    differs = holm([*family["p"], *[1.0] * listed])[: len(family)]
    out[differs] = np.where(distance[differs] > 0, "yes", "no")
    bound = side * (family["paper"] - family["threshold"].fillna(0))
    bound = bound.where(bound > 0, np.where(family["unit"] == "points", 1.0, np.nan))
    rest = ~differs & bound.notna()
    half = (family["high"] - family["low"]) / 2
    below = []
    for key in family.index[rest]:
        n, d, b, h, p0 = (
            family.loc[key, "n"],
            distance[key],
            bound[key],
            half[key],
            family.loc[key, "p"],
        )
        if (
            not n > 2
            or d >= b
            or (family.loc[key, "protocol"] == "planned" and n != family.loc[key, "planned"])
        ):
            below.append(1.0)
            continue
        # Degrees of freedom from the interval and the p-value of 0.
        grid = np.geomspace(n - 1, 1e6, 200_001)
        gap = 2 * stats.t.sf(abs(d) / h * stats.t.ppf(0.975, grid), grid) - p0
        df = grid[np.argmin(abs(gap))] if abs(d) > 1e-6 * h else n - 1
        below.append(2 * stats.t.sf((b - d) / h * stats.t.ppf(0.975, df), df))
    planned = holm([*below, *[1.0] * listed])[: len(below)]
    out[family.index[rest][planned]] = "less"
    return out


ours = pd.DataFrame(found, index=["effect", "low", "high", "p"]).T
runs = answers[answers["n"].notna()]
# Nothing of a planned experiment counts before all its questions have all seeds.
partial = (runs["protocol"] == "planned") & (runs["n"] != runs["planned"])
for (experiment, scale), of in runs[runs["protocol"] == "planned"].groupby(
    ["experiment", runs.index.get_level_values(1)[runs["protocol"] == "planned"]]
):
    short = len(of) < len(PROTOCOL[scale]["families"][experiment]) or partial[of.index].any()
    partial[of.index] |= short
both = ours.index.intersection(runs.index)
ours.loc[both[partial[both]], "p"] = 1.0
theirs = runs.loc[both, ours.columns]
wrong = ~np.isclose(ours.loc[both], theirs, rtol=1e-4, atol=1e-5, equal_nan=True).all(axis=1)
print(pd.concat({"here": ours.loc[both][wrong], "answers.csv": theirs[wrong]}, axis=1).to_string())
print("left out:", *map(" / ".join, runs.index.difference(both)), sep="\n  ")
print(
    f"{len(both)} of {len(runs)} effects of runs recomputed: {len(both) - wrong.sum()} equal, {wrong.sum()} not"
)
families = answers.assign(papers=answers["where"].notna(), rule=answers["protocol"].fillna(""))
differ = 0
for (experiment, scale, _papers, rule), family in families.groupby(
    ["experiment", families.index.get_level_values(1), "papers", "rule"]
):
    asked = PROTOCOL.get(scale, {}).get("families", {}).get(experiment, [])
    left = len(asked) - len(family) if rule == "planned" else 0
    theirs = family["answer"]
    again = verdict(family, left)
    if rule == "" and experiment in PROTOCOL.get(scale, {}).get("families", {}):
        continue  # counted
    for key in family.index[again != theirs]:
        print("answer:", key, "here", again[key], "answers.csv", theirs[key])
        differ += 1
print(f"{len(answers)} answers by their families: {len(answers) - differ} equal, {differ} not")
sys.exit(bool(wrong.any() or differ))
