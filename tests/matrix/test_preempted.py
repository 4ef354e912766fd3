"""Jobs that get SIGTERM in the middle of training: all ranks save one checkpoint at one step and
end; resumed, they go on as if nothing had been.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import launched

SCRIPTS = Path(__file__).parent / "scripts"
LOOP, ACCELERATE, TRAINER = (
    SCRIPTS / "preempted_loop.py",
    SCRIPTS / "preempted_accelerate.py",
    SCRIPTS / "preempted_trainer.py",
)
PATIENCE = 300.0


def begun(out, rank):
    """Steps that ``rank`` has begun."""
    file = out / f"begun-{rank}"
    return len(file.read_text().splitlines()) if file.exists() else 0


def tell(process, out, whom):
    """SIGTERM in the third step or after: to one rank, to both some steps apart, to the
    launcher.
    """
    until = time.monotonic() + PATIENCE
    while begun(out, 0) < 3 or begun(out, 1) < 3:
        assert process.poll() is None, (out / "log.txt").read_text()[-8000:]
        assert time.monotonic() < until, "training does not begin"
        time.sleep(0.05)
    if whom == "launcher":
        os.kill(process.pid, signal.SIGTERM)
        return
    pids = [int((out / f"pid-{rank}").read_text()) for rank in range(2)]
    os.kill(pids[1], signal.SIGTERM)
    if whom == "both":
        time.sleep(0.3)
        os.kill(pids[0], signal.SIGTERM)


def interrupted(command, out, whom, *arguments):
    """Reports of the ranks of a job that is told to end. torchrun itself ends with an error if
    it got the signal, its ranks never.
    """
    with launched.started(command, out, arguments) as process:
        tell(process, out, whom)
        code = launched.ended(process, PATIENCE)
    log = (out / "log.txt").read_text()[-8000:]
    assert code is not None, f"did not end\n{log}"
    assert (code == 0) == (whom != "launcher"), log
    seen = launched.reports(out, 2)
    assert all(each["stopped"] for each in seen)
    assert len({len(each["losses"]) for each in seen}) == 1, "ranks stopped after different steps"
    for rank in range(2):
        (out / f"report-{rank}.json").unlink()
    return seen


def goes_on(before, after, want):
    """The losses of both parts are those of an uninterrupted run: [step][rank]."""
    steps = len(before[0]["losses"])
    assert 0 < steps < len(want), "it was interrupted in the middle"
    for rank, (one, other) in enumerate(zip(before, after)):
        assert other["first"] == steps and not other["stopped"]
        assert one["losses"] + other["losses"] == pytest.approx(
            [step[rank] for step in want], rel=1e-5
        )


# the losses [step][rank] of an uninterrupted run, which is made while the ranks are at work
Plain = Callable[[], list[list[float]]]


@pytest.fixture(scope="module")
def plain_loop(tmp_path_factory):
    with launched.beside(LOOP, tmp_path_factory.mktemp("plain"), "--plain") as report:
        yield lambda: report()["losses"]


@pytest.fixture(scope="module")
def plain_accelerate(tmp_path_factory):
    with launched.beside(ACCELERATE, tmp_path_factory.mktemp("plain")) as report:
        yield lambda: [[loss] * 2 for loss in report()["losses"]]


@pytest.fixture(scope="module")
def plain_trainer(tmp_path_factory):
    with launched.beside(TRAINER, tmp_path_factory.mktemp("plain")) as report:
        yield lambda: [[loss] * 2 for loss in report()["losses"]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "whom"), [(2, "one rank"), (3, "both"), (3, "launcher"), (0, "launcher")]
)
def test_a_loop_of_its_own(tmp_path, plain_loop, stage, whom):
    before = interrupted(
        launched.torchrun_command(LOOP), tmp_path / "run", whom, "--stage", str(stage)
    )
    goes_on(before, launched.torchrun(LOOP, tmp_path / "run", "--stage", str(stage)), plain_loop())


@pytest.mark.long
@pytest.mark.parametrize(("stage", "whom"), [(2, "both"), (3, "launcher")])
def test_a_loop_for_accelerate(tmp_path, plain_accelerate, stage, whom):
    out = tmp_path / "run"
    keys = {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    before = interrupted(launched.accelerate_command(ACCELERATE, out, stage, **keys), out, whom)
    goes_on(
        before, launched.accelerate_launch(ACCELERATE, out, stage=stage, **keys), plain_accelerate()
    )


@pytest.mark.long
@pytest.mark.parametrize(("stage", "whom"), [(2, "launcher"), (3, "both")])
def test_a_trainer(tmp_path, plain_trainer, stage, whom):
    """With stock arguments and ``enable_jit_checkpoint=True``."""
    out = tmp_path / "run"
    before = interrupted(launched.torchrun_command(TRAINER), out, whom, "--stage", str(stage))
    assert all(
        each["saved"] == [f"checkpoint-{len(each['losses'])}"] and not each["incomplete"]
        for each in before
    )
    goes_on(before, launched.torchrun(TRAINER, out, "--stage", str(stage)), plain_trainer())
