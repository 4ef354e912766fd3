"""Fixtures for every test: one thread per rank, no network, a fixed seed."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_ZERO_LOG_LEVEL", "WARNING")
# torch's store looks up the name of every connection's address; an answer that is lost costs 5 s
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.pop("COLUMNS", None)  # of the terminal: tables in tests are as wide as in a pipe

import hypothesis
import pytest
import torch

from tests.helpers import cells, stress
from tests.helpers.cells import off_turn, parted, runs_long
from tests.helpers.leases import guard_storages
from tests.helpers.plain_process import plain_process as plain_process

# A forked worker of a DataLoader would collect its parent's garbage. There the destructor of a
# TCPStore, for one, joins a thread that the child does not have: it crashes or waits for ever.
os.register_at_fork(after_in_child=gc.freeze)

# how long an example takes, and to draw it, depends on what else runs on the machine
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
# what fails must not have been drawn by chance from what a change has nothing to do with
hypothesis.settings.register_profile(
    "fast", parent=hypothesis.settings.get_profile("any machine"), derandomize=True
)
torch.set_num_threads(1)
# without devices torch notes the stack of each call: a twentieth of the time of tests of ranks
for backend in (torch.cuda, torch.xpu):
    if not backend.is_available():
        backend.manual_seed_all = lambda seed: None
# an engine is thousands of objects: by default collections take an eighth of the suite's time
gc.set_threshold(20_000)
# before triton is imported: kernels run in its interpreter, which helpers/checked_triton.py watches
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
stress.install()


@pytest.fixture(autouse=True)
def storages_need_leases(request: pytest.FixtureRequest) -> Iterator[None]:
    """A storage of an optimizer's state raises where an update or a save under way uses it."""
    with pytest.MonkeyPatch.context() as patch:
        if "counts_calls" not in request.keywords:
            guard_storages(patch)
        yield


@pytest.fixture(autouse=True)
def small_blocks_are_units() -> Iterator[None]:
    """The blocks of the tests' models are small, and are to be units all the same, unless a test or
    its configuration asks.
    """
    # not a test's own, which is undone before the fixtures of its folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_zero.zero.layout.wrap.GRANULARITY", 0)
        yield


@pytest.fixture(autouse=True, scope="session")
def small_parameters_are_sharded() -> Iterator[None]:
    """At stage 3, unless a configuration asks; also in what fixtures of modules make."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_zero.zero.layout.wrap.PERSISTENCE", 0)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the long matrices")
    parser.addoption("--rows", metavar="WORDS", help="of tables of capabilities, the rows so named")
    parser.addoption("--part", metavar="K/N", help="run the K-th of N parts of the files")


def pytest_configure(config: pytest.Config) -> None:
    cells.configure(config)
    hypothesis.settings.load_profile("any machine" if config.getoption("--long") else "fast")


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: Any) -> list[pytest.Item] | None:
    """In the fast suite make no items of a test that the long suite alone runs."""
    marks = getattr(obj, "pytestmark", [])
    if isinstance(marks, list) and "long" in [mark.name for mark in marks]:
        return None if runs_long(collector.config) else []
    return None


TESTS = Path(__file__).parent
# Folders whose tests start several processes, and what others import to start some.
LAUNCHING = ("late", "gloo", "matrix", "loading")
STARTERS = ("tests.helpers.launched", "tests.helpers.processes", "import launched")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part:
        items[:] = parted(items, *map(int, part.split("/")), _launches)
    for item in off_turn(items):
        item.add_marker(pytest.mark.long)
    # begun last they would run alone
    items.sort(key=lambda item: not _launches(item.path))
    if runs_long(config):
        return
    chosen, put_off = [], []
    for item in items:
        (put_off if item.get_closest_marker("long") else chosen).append(item)
    config.hook.pytest_deselected(items=put_off)
    items[:] = chosen


@cache
def _launches(path: Path) -> bool:
    if path.relative_to(TESTS).parts[0] in LAUNCHING:
        return True
    return any(name in path.read_text() for name in STARTERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile``, in the fast suite with all files that start processes in one worker:
    beside each other they would be slower than in turn, and each worker that meets one imports
    torch and transformers anew, for the processes that it forks.
    """
    from xdist.scheduler import LoadFileScheduling

    long = config.getoption("--long")  # as many again, which would take one worker hours

    class LaunchingInOne(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "launching" if not long and _launches(config.rootpath / file) else file

    return LaunchingInOne(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing of what is collected goes: collections of garbage would take a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def collections_look_at_what_tests_make() -> None:
    """Freeze the half million objects imported by now, so that each ``gc.collect()`` of a test or a
    library skips them.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Freeze all again: pytest collects five times more, for finalizers of what tests have left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def kernels_only_where_they_are_watched() -> Iterator[None]:
    """Outside ``checked_triton`` CPU tensors go to the references: the plain interpreter is
    wrong in bf16 and slow.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("HF_ZERO_TRITON", "0")
        yield


@pytest.fixture(autouse=True)
def environment_is_left_as_it_was() -> Iterator[None]:
    """Restore the environment after each test: the variables of a launcher, a Trainer or an engine
    of one rank would otherwise define a rank in the next test.
    """
    before = dict(os.environ)
    yield
    for name, _ in os.environ.items() ^ before.items():
        if name == "PYTEST_CURRENT_TEST":  # tells of the phase
            continue
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    """An engine in the test's own process makes a group of one rank; the next test starts
    without.
    """
    yield
    process_group = sys.modules.get("hf_zero.distributed.process_group")
    if process_group is not None:
        process_group.choose_device(None)  # what a Trainer of this test may have chosen
        if torch.distributed.is_initialized():
            process_group.destroy_process_group()


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """Collect the messages of hf-zero's logger."""
    from hf_zero.logging import logger

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@pytest.fixture
def heard_in_full(heard: list[str]) -> Iterator[list[str]]:
    """Collect the messages of hf-zero's logger from level INFO on."""
    from hf_zero.logging import logger

    level = logger.level
    logger.setLevel(logging.INFO)
    yield heard
    logger.setLevel(level)


@pytest.fixture
def checked_triton() -> Iterator[Callable[..., AbstractContextManager[Any]]]:
    """Triton kernels of the test run in the checked interpreter; ``with
    checked_triton(order="reverse")`` asks for other settings.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip(
            "kernels of this process are compiled, for its GPU: TRITON_INTERPRET=1 "
            "asks for the interpreter"
        )
    checked = pytest.importorskip(
        "tests.helpers.checked_triton",
        reason="needs triton and ml_dtypes",
        exc_type=ModuleNotFoundError,
    )
    with checked.checked_triton():
        yield checked.checked_triton
