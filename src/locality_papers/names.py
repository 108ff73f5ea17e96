"""Names and titles of the experiments, known without importing them."""

import re
from pathlib import Path


def titles() -> dict[str, str]:
    """Titles of all experiments by name, in the papers' order; read from the source, as importing
    it imports torch.
    """
    source = "\n".join(file.read_text("utf-8") for file in Path(__file__).parent.glob("*.py"))
    found = re.findall(r'^@experiment\(\s*"(.+?)",\s*"(.+?)"', source, re.M)
    return dict(sorted(found, key=lambda pair: papers_order(pair[0])))


def papers_order(name: str) -> tuple[bool, bool, bool, int, str]:
    """Sort key of experiments: ConViT, CvT, beyond; tables before figures; by number."""
    paper, _, place = name.partition("/")
    what, _, number = place.partition("-")
    digits = "".join(filter(str.isdigit, number))
    return paper != "convit", paper != "cvt", what != "table", int(digits or 0), number
