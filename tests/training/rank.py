"""One process of `locality ARGUMENTS` that reports its leftovers at exit.

usage: rank.py REPORTS HOW ARGUMENTS. HOW is "end", or "SIGTERM", "SIGINT" or "SIGKILL" sent to the
last process at its fourth step; "machine" hits it and the launcher that started it. After Python's
exit handlers each process writes REPORTS/rank-N.json: exit code, threads, shared memory, and exit
codes of its children. SIGABRT prints a traceback.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

REPORTS, HOW, ARGUMENTS = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
STARTED: list[subprocess.Popen[bytes]] = []
# A library's thread, which ends with the process.
LIBRARIES = {"jemalloc_bg_thd"}


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        STARTED.append(self)


def tell(outcome: dict[str, Any]) -> None:
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    # Fabric's process monitor sleeps until the end.
    idle = sum(thread.name == "child-process-observer" for thread in threading.enumerate())
    outcome["threads"] = sorted(name for name in threads if name not in LIBRARIES)[1 + idle :]
    outcome["children"] = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    outcome["shared memory"] = [
        *(path.name for path in Path("/dev/shm").iterdir() if str(os.getpid()) in path.name),
        *(line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line),
    ]
    outcome["started"] = [process.poll() for process in STARTED if "rank.py" in str(process.args)]
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", os.environ.get("LOCAL_RANK", "0")))
    (REPORTS / f"rank-{rank}.json").write_text(json.dumps(outcome))


def main() -> None:
    faulthandler.enable()
    outcome: dict[str, Any] = {"code": None}
    # The first registered handler runs last.
    atexit.register(tell, outcome)
    subprocess.Popen = Popen  # type: ignore[misc]
    from locality.cli import main as locality
    from locality.training.loop import Loop

    step = Loop.train_step

    def struck(self: Loop, batches: Any) -> int:
        if self.state.step == 4 and self.fabric.global_rank == self.fabric.world_size - 1:
            if HOW == "machine":
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
            if HOW != "end" and self.fabric.world_size == 1:
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
