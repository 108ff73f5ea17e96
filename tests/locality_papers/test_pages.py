"""Pages are made from records only, with answers at every scale beside the paper's."""

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from locality.analysis.statistics import holm
from locality_papers.answers import COLUMNS
from locality_papers.pages import write_all
from locality_papers.text import said

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_pages_of_the_repository_are_made_from_the_records(tmp_path):
    shutil.copytree(ROOT / "results", tmp_path / "results")
    shutil.copy(ROOT / "README.md", tmp_path)
    write_all(tmp_path)
    made = [path.relative_to(tmp_path) for path in (tmp_path / "docs").rglob("*.md")]
    pages = {path.name for path in (ROOT / "docs/results").glob("*.md")}
    assert pages - {"superseded.md"} == {path.name for path in made if "results" in path.parts}
    for path in [*made, Path("README.md"), Path("results/answers.csv")]:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), path
    pictures = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.png")}
    assert pictures == {path.relative_to(ROOT) for path in (ROOT / "results").rglob("*.png")}


FALL = "Do gates of the (deeper|first) half fall"
# Words of "Measured here" and of findings' first screen, and what they claim: data set, answer and
# the questions that match.
CLAIMS = {
    "With 1 and 20%, too, the CNN is above all three, and CvT above DeiT": [
        ("photographs", "no", "With .* (ConViT|DeiT|CvT) above the CNN"),
        ("photographs", "yes", "With .* is CvT-13 above DeiT-S"),
    ],
    "ConViT is above DeiT with 5 and 20%, loses less when position embeddings are masked": [
        ("photographs", "yes", "With (5|20)% of the images, is ConViT above DeiT"),
        ("photographs", "yes", "Does masking position embeddings cost DeiT more than ConViT"),
    ],
    "gain is not seen to grow as images get fewer": [
        ("photographs", "cannot tell", "Is ConViT's relative gain larger with few images"),
    ],
    "Position does most of the work in ConViT's gated layers: masking content costs 0.9 points, "
    "masking position 18.3": [
        ("photographs", "yes", "Does masking content in the first gated layers cost accuracy"),
        ("photographs", "no", "Does masking content cost more than masking position"),
    ],
    "fall in the first gated layer and rise in the other two; on digits and clothes, at the": [
        ("fashion", "no", FALL),
        ("digits", "no", FALL),
        ("photographs", "yes", "Do gates of the first half fall"),
        ("photographs", "no", "Do gates of the deeper half fall"),
    ],
    "a small CNN is above CvT, ConViT and DeiT with every share of the images, and CvT is above": [
        ("photographs", "no", "With .* (ConViT|DeiT|CvT) above the CNN"),
        ("photographs", "yes", "With .* is CvT-13 above DeiT-S"),
    ],
    "Trained without position embeddings, CvT loses less than a point, DeiT": [
        ("photographs", "yes", "Does CvT lose less than a point without position embeddings"),
        ("photographs", "yes", "Trained without position embedding, does DeiT lose"),
    ],
    "is above patches; convolutional projection is above linear, thanks to its third stage": [
        ("photographs", "yes", "Is convolutional embedding above patches"),
        ("photographs", "yes", "Is convolutional projection above linear"),
    ],
    "Squeezed keys and values cost two points": [
        ("photographs", "no", "Does squeezing keys and values cost less than a point"),
    ],
    "leaves locality in its first and last gated layers, and keeps over half of its accuracy": [
        ("photographs", "yes", "Without position in any gated layer"),
        ("photographs", "yes", "Do ConViT's first and last gated layers leave locality"),
    ],
    "Masking position costs far more than masking content": [
        ("photographs", "no", "Does masking content cost more than masking position"),
    ],
    "They fall where each image's patches are shuffled in an order of its own": [
        ("photographs", "yes", "Patches each in its own order: do gates fall?"),
        ("digits", "yes", "Patches each in its own order: do gates fall?"),
    ],
    "On digits, too, gates rise, and masking content in the gated layers costs next to": [
        ("digits", "no", FALL),
        ("digits", "less", "Does masking content in "),
        ("digits", "no", "Does masking content cost more than masking position?"),
    ],
    "With all 10,000 images ConViT is 0.8 points above DeiT": [
        ("fashion", "yes", "With 100% of the images, is ConViT above DeiT"),
    ],
    "without it in the gated layers 25 of 90% remain": [
        ("fashion", "no", "Without position in any gated layer"),
        ("fashion", "no", "Does masking content cost more than masking position"),
    ],
    "All gates rise, and only the last gated layer leaves locality": [
        ("fashion", "no", FALL),
        ("fashion", "no", "Does ConViT's gated layer [12] leave locality"),
        ("fashion", "yes", "Does ConViT's gated layer 3 leave locality"),
    ],
    "On photographs gates fall in both cases (almost as much in one order for all)": [
        ("photographs", "yes", "Are gates lower with patches"),
        ("photographs", "yes", "Patches in one order for all: do gates fall?"),
    ],
    "the more images are shuffled, the lower": [("digits", "yes", "Are gates lower with patches")],
    "above DeiT with every share of photographs, digits and clothes": [
        (scale, "yes", "(With .* is|Is) CvT-13 above DeiT-S")
        for scale in ("photographs", "digits", "fashion")
    ],
    "above the best baseline on pixels on photographs, and on clothes with 5 and 30%; on digits": [
        *((scale, "yes", "With .* above all baselines") for scale in ("photographs", "fashion")),
    ],
    "above all three on photographs, above DeiT on 10,000 clothes": [
        ("photographs", "no", "With .* (ConViT|DeiT|CvT) above the CNN"),
        ("fashion", "no", "With 100% of the images, is DeiT above the CNN?"),
    ],
    "at 1, 10 and 100 times the rate of the rest, against our prediction": [
        ("digits", "no", "With the rate of v_pos and λ"),
    ],
}


def recorded():
    with (ROOT / "results/answers.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_claim_is_the_answer_of_its_data_set():
    readme, findings = ((ROOT / page).read_text() for page in ("README.md", "docs/findings.md"))
    text = readme.partition("## Measured here")[2] + findings
    text = " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("**", "").split())
    for words, claimed in CLAIMS.items():
        assert words in text
        for scale, answer, start in claimed:
            known = [of for of in recorded() if of["scale"] == scale]
            known = [of["answer"] for of in known if re.match(start, of["question"])]
            assert set(known) == {answer}, (words, start)


def test_the_history_of_the_rule_is_what_the_former_family_answers():
    lost = []
    for papers in (True, False):
        known = [of for of in recorded() if of["scale"] == "digits" and bool(of["where"]) == papers]
        differ = holm([float(of["p"]) for of in known])
        answered = [of["answer"] in ("yes", "no") for of in known]
        lost.append(sum(a and not d for a, d in zip(answered, differ, strict=True)))
    text = " ".join((ROOT / "docs/findings.md").read_text().split())
    assert f"{lost[0]} of the papers' questions would be" in text
    assert f"So would {lost[1]} of our own" in text


@pytest.mark.slow
def test_all_answers_are_recomputed_without_the_library():
    script = [sys.executable, ROOT / "benchmarks/recompute_answers.py"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert re.search(r"left out:\n(\d+) of \1 effects", done.stdout)  # none


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("yes", 5.23, 3.11, 7.36), "yes, +5.2 (+3.1 to +7.4)"),
        (("no", -0.312, -0.4, -0.224, "tokens"), "no, −0.312 tokens (−0.400 to −0.224)"),
        (("less", 0.2, -1.1, 1.5), "less, +0.2 (−1.1 to +1.5)"),
        (("less", -0.5, -0.9, -0.1, {"threshold": -1.0}), "less, −0.50 (−0.90 to −0.10)"),
        (("less", -1.2, -2.2, -0.2), "less (opposite sign), −1.2 (−2.2 to −0.2)"),
        (("yes", 12.0, None, None, "times"), "yes, +12 times"),
        (
            ("yes", 5.23, 3.11, 7.36, {"images": "unpaired", "over_seeds": 0.8, "n": 6}),
            "yes, +5.2 (+3.1 to +7.4), 6 of 8 seeds, unpaired (over seeds ±0.8)",
        ),
        (
            ("yes", 0.84, 0.8, 0.88, "tokens", {"start": 0.868}),
            "yes, +0.840 tokens (+0.800 to +0.880), before training +0.868",
        ),
    ],
)
def test_a_cell_says_the_answer_and_its_interval(given, text):
    *values, last = given
    values, more = (values, last) if isinstance(last, dict) else (given, {})
    answer = dict.fromkeys(COLUMNS) | {"unit": "points", "n": 8, "planned": 8}
    answer |= dict(zip(("answer", "effect", "low", "high", "unit"), values, strict=False)) | more
    assert said(answer) == text
