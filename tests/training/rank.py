"""One process of `locality ARGUMENTS` that reports its leftovers at exit.

usage: rank.py REPORTS HOW ARGUMENTS. HOW is "end", or what happens to the last process at its
fourth step: "SIGTERM", "SIGINT" or "SIGKILL"; "machine" hits it and the launcher that started it;
"nan" makes its loss not a number. After Python's exit handlers each process writes
REPORTS/rank-N.json: exit code, threads, children and shared memory. SIGABRT prints a traceback.
"""

import atexit
import faulthandler
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

REPORTS, HOW, ARGUMENTS = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
# A library's thread, which ends with the process.
LIBRARIES = {"jemalloc_bg_thd"}


def tell(outcome: dict[str, Any]) -> None:
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    outcome["threads"] = sorted(name for name in threads if name not in LIBRARIES)[1:]
    outcome["children"] = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    outcome["shared memory"] = [
        *(path.name for path in Path("/dev/shm").iterdir() if str(os.getpid()) in path.name),
        *(line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line),
    ]
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    (REPORTS / f"rank-{rank}.json").write_text(json.dumps(outcome))


def main() -> None:
    faulthandler.enable()
    outcome: dict[str, Any] = {"code": None}
    # The first registered handler runs last.
    atexit.register(tell, outcome)
    from locality.cli import main as locality
    from locality.training.loop import Loop
    from locality.training.objective import Objective

    step, loss = Loop.train_step, Objective.loss

    def struck(self: Loop, batches: Any) -> int:
        if self.state.step == 4 and self.fabric.global_rank == self.fabric.world_size - 1:
            if HOW == "machine":
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            if HOW == "nan":
                Objective.loss = lambda *given: loss(*given) * float("nan")  # type: ignore[method-assign]
            elif HOW != "end" and self.fabric.world_size == 1:
                os.killpg(0, getattr(signal, HOW))  # its loading processes too, as a terminal does
            elif HOW != "end":
                os.kill(os.getpid(), getattr(signal, HOW))
        return step(self, batches)

    Loop.train_step = struck  # type: ignore[method-assign]
    outcome["code"] = 1
    outcome["code"] = locality(ARGUMENTS)
    sys.exit(outcome["code"])


if __name__ == "__main__":
    main()
