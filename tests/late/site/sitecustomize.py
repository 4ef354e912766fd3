"""With this folder on PYTHONPATH and LATE_AS=cuda, a process finds the simulated device as its
CUDA.

Only processes with RANK in their environment, or all with LATE_ALL=1: launchers stay without. What
was found goes to stderr at the end, and to the file that LATE_REPORTS names ({rank} and {process}
are filled in). A process with LATE_FORKS=1 has the device for its forks, each of which calls
``begin``. As in tests/helpers/site, small parameters are sharded unless a configuration asks.
"""

import atexit
import json
import os
import runpy
import sys
from pathlib import Path

runpy.run_path(os.path.join(os.path.dirname(__file__), "../../helpers/site/sitecustomize.py"))


def begin() -> None:
    """The device is as the environment says, and is asked for its reports at the end."""
    from tests.late import device

    # Lightning sets the first one later
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    device.set_devices()
    device.configure(
        os.environ.get("LATE_MODE", "random"), seed=int(os.environ.get("LATE_SEED", rank)), nap=0.1
    )

    def report() -> None:
        device.synchronize_all()
        found = device.reports()
        if "LATE_REPORTS" in os.environ:
            path = Path(os.environ["LATE_REPORTS"].format(rank=rank, process=os.getpid()))
            path.write_text(json.dumps({"reports": found, "stats": device.stats()}))
        counts = device.stats()
        print(
            f"late: rank {rank}: {len(found)} reports, {counts['ops']} operations", file=sys.stderr
        )
        for kind, text in found[:6]:
            print(f"late: {kind}: {text[:600]}", file=sys.stderr)

    atexit.register(report)


if os.environ.get("LATE_AS") == "cuda" and ("RANK" in os.environ or os.environ.get("LATE_ALL")):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from tests.late import device  # noqa: F401

    if "LATE_FORKS" not in os.environ:
        begin()
