"""The way of a step, a save and a load through the source: files, functions, changes of file and
frames on the main thread of a rank. Counts, which do not depend on the machine.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch

import hf_zero
from hf_zero.checkpoint import save_log
from tests.helpers.engines import config_of, start
from tests.helpers.models import Stack, features, seeded
from tests.helpers.processes import run_processes
from tests.helpers.training import adamw

# At most: files; folders; functions; calls into another file than the call before; frames from a
# module's hook to the process group. 0: not bounded. 11 files of a save and 8 of a load are those
# of checkpoint/, of which one notes a save for other jobs; one reads what the model declares, and
# runs none of its properties; the others read the state of the engine, by the file that does so
# for every way out. A load also drops the gradients of an open accumulation window, which 8 files
# of zero/ hold, parses JSON in one, and writes state by the file that does so for every source. 2
# files of a step compare what scripts have set on the ranks. A lease that a load takes before it
# writes a state is a call into the file of leases. A save and a load read entries of segments in
# one file, and arrays on the device in another. A step compares codes of ranks in one file, and
# keeps what all ranks leave out of a backward in another, which a load clears. Per-element state,
# scalars and the state of whole tensors have a file each, which a save and a load pass. Of a save
# and of a load, one file has the words for errors with the actions that all ranks share, one the
# progress bar, and one the names in the whole model; the gradients of a flat buffer are in a file
# beside its optimizer state. The norm of the gradient is measured and clipped in another file than
# the one that makes the update. A save and a load have random generators in one file, and names
# without wrappers in another; client state, which a save divides, and the manifest, which a load
# reads, have one each. The log of saves for other jobs, its folder and the lock on it are three
# files of a save, the model as the manifest describes it one. Of a load, ranges of elements and the
# state of the script have a file each. The log of collectives, the handles of those in flight and
# the passes of an engine have a file each.
FIELDS = ("files", "folders", "functions", "changes", "frames")
MOST = {"step": (37, 6, 231, 532, 6), "save": (51, 0, 0, 415, 0), "load": (56, 0, 0, 651, 0)}
ROOT = Path(hf_zero.__file__).parent


def below_hook(frame):
    """The number of frames of the package between a hook of a module and ``frame``."""
    inside = 0
    while frame is not None and not frame.f_code.co_filename.endswith("nn/modules/module.py"):
        inside += frame.f_code.co_filename.startswith(str(ROOT))
        # autograd calls the hooks of a backward: the frame below is that of the engine
        if frame.f_code.co_name in ("pre_backward", "post_backward", "_end_task"):
            return inside if frame.f_code.co_name != "_end_task" else 0
        frame = frame.f_back
    return inside if frame is not None else 0


def way_of(act):
    """Return the way of ``act()`` through the package, on this thread."""
    calls, last, changes, frames = Counter(), "", 0, 0

    def watch(frame, event, _):
        nonlocal last, changes, frames
        if event != "call":
            return
        name = frame.f_code.co_filename
        if frame.f_code.co_name in ("isend", "irecv"):  # of torch.distributed
            frames = max(frames, below_hook(frame))
        if name.startswith(str(ROOT)):
            calls[name, frame.f_code.co_qualname, frame.f_code.co_firstlineno] += 1
            changes += name != last
            last = name

    sys.setprofile(watch)
    try:
        act()
    finally:
        sys.setprofile(None)
    files = {name for name, _, _ in calls}
    folders = {Path(name).relative_to(ROOT).parts[0] for name in files}
    return len(files), len(folders), len(calls), changes, frames


def ways(rank, folder):
    model = seeded(lambda: Stack(4))
    engine = start(model, adamw(model), config_of(3))

    def step():
        engine.backward(engine(features(0, 0, rank)).square().mean())
        engine.step()

    torch.set_num_threads(1)
    # Saves of other tests, which run meanwhile, would be read, too.
    save_log._folder = lambda: Path(folder) / "saves-of-this-host"
    for _ in range(3):
        step()
    acts = {
        "step": step,
        "save": lambda: engine.save_checkpoint(folder),
        "load": lambda: engine.load_checkpoint(folder),
    }
    return {name: way_of(act) for name, act in acts.items()}


def test_a_step_a_save_and_a_load_go_through_few_files(tmp_path):
    found = run_processes(2, ways, str(tmp_path))[0]
    print("\n" + f"{'':12}" + "".join(f"{field:>11}" for field in FIELDS))
    for what, way in found.items():
        print(f"{what:12}" + "".join(f"{count:11,}" for count in way))
    above = [
        f"{what}: {field} {count} > {limit}"
        for what, most in MOST.items()
        for field, count, limit in zip(FIELDS, found[what], most)
        if limit and count > limit
    ]
    assert not above
    assert found["step"][-1] >= 5, "messages were sent below hooks"
    assert min(way[3] for way in found.values()) > 100
