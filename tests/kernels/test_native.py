"""The native core in a process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pybind11
import pytest
import torch

from hf_zero.errors import ConfigError, KernelError
from hf_zero.ops import native
from hf_zero.ops.host import cast
from hf_zero.ops.native import Share, cpu_quota, share_of_this_rank, squared_norm
from tests.helpers.commands import completed

LARGE = 1_000_000


@pytest.fixture
def loaded_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets variables and forgets the core, which reads them where it is loaded."""

    def load(**variables: str) -> None:
        for name in ("HF_ZERO_ISA", "HF_ZERO_NATIVE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        native._loaded.cache_clear()

    yield load
    monkeypatch.undo()
    native._loaded.cache_clear()


def test_variables_choose_the_set(loaded_anew, monkeypatch):
    """Without a core the reference runs; what there is not is refused."""
    sets = native.instruction_sets()
    for name in (sets[0], sets[-1]):
        loaded_anew(HF_ZERO_ISA=name)
        assert (native.available(), native.instruction_set()) == (True, name)
    with pytest.raises(KernelError, match=r"set_threads\(0\)"):
        native.set_threads(0)
    with pytest.raises(KernelError, match="4097"):
        native.set_threads(4097)
    with pytest.raises(ConfigError, match="instruction set 'mmx'"):
        native.set_instruction_set("mmx")
    loaded_anew(HF_ZERO_ISA="avx1024")
    with pytest.raises(ConfigError, match=rf"'avx1024' \(HF_ZERO_ISA\).*{', '.join(sets)}"):
        native.available()
    loaded_anew(HF_ZERO_NATIVE="0")
    assert not native.available() and "HF_ZERO_NATIVE=0 switches it off" in native.why_not()
    loaded_anew()
    monkeypatch.setitem(sys.modules, "hf_zero._cpu", None)
    assert not native.available() and "install hf-zero again" in native.why_not()
    loaded_anew()
    monkeypatch.setitem(sys.modules, "hf_zero._cpu", ModuleType("hf_zero._cpu"))
    assert not native.available() and "built from other sources" in native.why_not()
    assert squared_norm(torch.tensor([3.0, 4.0])) == 25.0
    assert native.instruction_set() == "torch" and native.instruction_sets() == []
    assert native.threads() == torch.get_num_threads()
    with pytest.raises(KernelError, match=r"torch\.set_num_threads"):
        native.set_threads(2)


PROCESS = """
import os, threading, time, torch
from hf_zero.ops import native
from hf_zero.ops.native import squared_norm
print(native.threads())
def threads(): return len(os.listdir("/proc/self/task"))
x = torch.ones(1_000_000)
before = threads()
native.set_threads(6)
counts = set()
for _ in range(50): squared_norm(x); counts.add(threads() - before)
native.set_threads(2); squared_norm(x)
for _ in range(3000):
    if threads() - before == 1: break
    time.sleep(0.02)
print(counts, threads() - before)

native.set_threads(4)
stop = threading.Event()
def busy():
    while not stop.is_set(): squared_norm(x)
other = threading.Thread(target=busy); other.start()
codes = []
for _ in range(5):
    child = os.fork()
    if child == 0:
        ok = squared_norm(x) == 1e6 and native.threads() == 4
        os._exit(0 if ok and threads() == 4 else 1)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop.set(); other.join()
print(codes == [0] * 5)
"""


def test_threads_are_made_once_and_leave_and_a_child_of_fork_has_its_own() -> None:
    """In a process of its own: threads of other tests that load the core set the number, too."""
    variables = {**os.environ, "HF_ZERO_THREADS": "3", "OMP_NUM_THREADS": "1"}
    done = completed([sys.executable, "-c", PROCESS], timeout=300, env=variables)
    assert done.stdout.split() == ["3", "{5}", "1", "True"], done.stdout + done.stderr


ONE_CPU = """
import os, time, torch
from hf_zero.ops import native
from hf_zero.ops.native import squared_norm
native.set_threads(2)
x, before = torch.ones(1_000_000), set(os.listdir("/proc/self/task"))
squared_norm(x)
(helper,) = (int(task) for task in set(os.listdir("/proc/self/task")) - before)
cpu, other = sorted(os.sched_getaffinity(0))[:2]
both = {cpu, other}
for _ in range(100):
    os.sched_setaffinity(helper, {cpu})
    os.sched_setaffinity(0, {cpu})
    os.sched_setaffinity(0, both)  # without a move
    assert squared_norm(x) == 1e6
    if os.sched_getaffinity(helper) == {other}: break
print(os.sched_getaffinity(helper) == {other}, os.sched_getaffinity(0) == both)
end = time.monotonic() + 60
while time.monotonic() < end:  # not for good; beside other processes it may leave again and again
    squared_norm(x)
    if os.sched_getaffinity(helper) == both: break
print(os.sched_getaffinity(helper) == both)
"""


@pytest.mark.skipif(len(native._affinity(0)) < 2, reason="one CPU")
def test_a_helper_leaves_the_cpu_of_its_caller_where_there_is_another() -> None:
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = completed([sys.executable, "-c", ONE_CPU], timeout=300, env=variables)
    assert done.stdout.split() == ["True"] * 3, done.stdout + done.stderr


def test_several_callers_at_once_each_get_their_own_result() -> None:
    native.set_threads(4)
    expected = {value: float(value * value * LARGE) for value in range(6)}
    found: dict[int, set[float]] = {value: set() for value in expected}

    def call(value: int) -> None:
        x, out = torch.full((LARGE,), float(value)), torch.empty(LARGE, dtype=torch.bfloat16)
        for _ in range(10):
            found[value].add(squared_norm(x))
            cast(out, x)
            assert bool((out == value).all())

    callers = [threading.Thread(target=call, args=(value,)) for value in expected]
    for caller in callers:
        caller.start()
    for resize in (1, 3, 2, 5):
        native.set_threads(resize)
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    assert found == {value: {norm} for value, norm in expected.items()}


SHARES: list[tuple[int, int, float | None, dict[str, str], Share]] = [
    (16, 16, None, {}, Share(16, "16 cores")),
    (16, 16, None, {"OMP_NUM_THREADS": "1"}, Share(16, "16 cores")),
    (16, 16, None, {"LOCAL_WORLD_SIZE": "4"}, Share(4, "16 cores among 4 local ranks")),
    (4, 16, None, {"LOCAL_WORLD_SIZE": "4"}, Share(4, "4 cores this rank is bound to")),
    (2, 2, None, {"LOCAL_WORLD_SIZE": "8"}, Share(1, "2 cores among 8 local ranks")),
    (16, 16, 6.0, {}, Share(6, "a cgroup quota of 6 cores")),
    (16, 16, 0.5, {}, Share(1, "a cgroup quota of 0.5 cores")),
    (16, 16, 64.0, {}, Share(16, "16 cores")),
    (16, 16, 6.0, {"HF_ZERO_THREADS": "9"}, Share(9, "HF_ZERO_THREADS")),
]
AMONG = Share(2, "a cgroup quota of 6 cores among 4 local ranks")
SHARES.append((16, 16, 6.0, {"LOCAL_WORLD_SIZE": "4"}, AMONG))


def test_the_share_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for mine, parents, quota, environ, expected in SHARES:
        cores = {0: set(range(mine))}
        everyone = set(range(parents))
        monkeypatch.setattr(native, "_affinity", lambda pid, c=cores, e=everyone: c.get(pid, e))
        monkeypatch.setattr(native, "cpu_quota", lambda quota=quota: quota)
        assert share_of_this_rank(environ) == expected
    for name in ("HF_ZERO_THREADS", "LOCAL_WORLD_SIZE"):
        for value in ("0", "many", "-1", "1.5", "²"):
            with pytest.raises(ConfigError, match=f"{name} is '{value}'"):
                share_of_this_rank({name: value})
    assert share_of_this_rank({"LOCAL_WORLD_SIZE": "", "HF_ZERO_THREADS": " "}).threads == 6
    for value in ("4097", "99999999999"):
        with pytest.raises(ConfigError, match=f"HF_ZERO_THREADS is '{value}'"):
            share_of_this_rank({"HF_ZERO_THREADS": value})


def test_quotas_of_cgroups(tmp_path: Path) -> None:
    root, groups = tmp_path / "cgroup", tmp_path / "self"
    (root / "a" / "b").mkdir(parents=True)
    groups.write_text("0::/a/b\n")
    assert cpu_quota(root, groups) is None
    (root / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(root, groups) is None
    (root / "a" / "cpu.max").write_text("350000 100000\n")  # the parent limits its children
    assert cpu_quota(root, groups) == 3.5
    groups.write_text("4:cpu,cpuacct:/job\n3:memory:/job\n")
    (root / "cpu,cpuacct" / "job").mkdir(parents=True)
    (root / "cpu,cpuacct" / "job" / "cpu.cfs_quota_us").write_text("-1\n")
    (root / "cpu,cpuacct" / "job" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(root, groups) is None
    (root / "cpu,cpuacct" / "job" / "cpu.cfs_quota_us").write_text("200000\n")
    assert cpu_quota(root, groups) == 2.0
    assert cpu_quota(root, tmp_path / "missing") is None


@pytest.mark.parametrize("machine", [["-U__SSE2__", "-D__aarch64__"], ["-U__SSE2__"]])
def test_the_pool_of_other_machines_calls_only_what_it_defines(machine: list[str]) -> None:
    """libc's ``pause``, for one, would sleep until a signal."""
    compiler = shutil.which("g++") or pytest.skip("no g++")
    source = Path(__file__).parents[2] / "kernels" / "cpu" / "pool.cpp"
    headers = [pybind11.get_include(), sysconfig.get_paths()["include"]]
    command = [compiler, "-std=c++17", "-S", "-o", "-", *machine, *(f"-I{h}" for h in headers)]
    made = subprocess.run([*command, str(source)], capture_output=True, text=True, check=True)
    assert not re.search(r"call\s+(sched_yield|pause|usleep)\b", made.stdout)
