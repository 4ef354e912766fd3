"""Every loop that waits for a store, a file, a thread or another process has an end."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.house import parsed

PACKAGE = Path(__file__).resolve().parents[2] / "hf_zero"
# calls that block, or that a loop repeats until another thread, process or rank has acted
WAITS = {"wait", "sleep", "check", "flock", "poll", "join", "acquire", "entered", "answers"}
WAITS |= {"on_current", "is_current"}
ENDLESS = "poll_pauses"  # a generator that never ends
CLOCK = "monotonic"
LIMITS = {"waited", "limit", "deadline"}  # names of values that come from a clock
# what ends the loops that look at none
ENDS = {
    "checkpoint/host_folders.py:lock_in": "in each round another process has removed the folder",
    "cli/runs.py:top": "Ctrl-C: it waits for nobody, and shows a file until its reader leaves",
    "distributed/shard_fetches.py:_serve_until_closed": "its engine is closed or gone",
    "distributed/rank_requests.py:end_step": "StoreWait: each request is answered, or an error",
    "distributed/recovery.py:answer_statements": "the statements that were counted before",
    "distributed/store.py:_answer": "its TimeoutStore, which puts None into the queue",
    "distributed/store.py:_listen": "Bell.end, which sets the key",
    "distributed/watchdog.py:_run": "its watchdog is closed or gone, or the interpreter ends",
    "launch/agent.py:_watch_input": "a daemon thread; the caller closes the input, or is gone",
    "launch/agent.py:main": "the child ends, or _watch_input or a signal tells it to",
    "launch/front.py:_next": "each host's process, or a signal",
    "launch/front.py:_wait_for_impatience": "a daemon thread of a process that ends",
    "launch/front.py:_pump": "the process at the other end of the pipe",
    "offload/nvme.py:wait": "the requests to the kernel",
    "offload/nvme_files.py:_nameless_file": "in each round another process has removed the file",
    "offload/update_gathers.py:_run": "UpdateGathers.close",
    "checkpoint/file_lock.py:on_current": "in each round another process has removed the file",
    "ops/files_reference.py:_serve": "the end of its queue",
    "ops/files_reference.py:wait": "the transfer, which the end of its queue cancels",
}


def waits_in(source: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the loops of ``source`` that wait, with their functions."""
    for function in ast.walk(parsed(source)):
        if isinstance(function, ast.FunctionDef):
            for loop in ast.walk(function):
                endless = isinstance(loop, ast.For) and ast.unparse(loop.iter).startswith(ENDLESS)
                if endless or (isinstance(loop, ast.While) and any(map(_waits, ast.walk(loop)))):
                    yield function.name, loop


def _waits(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or isinstance(
        getattr(node.func, "value", None), ast.Constant
    ):
        return False  # or the join of a string
    called = ast.unparse(node.func)
    takes = called.endswith(".get") and not node.args  # of a queue
    return called.rpartition(".")[2] in {*WAITS, "lock_in"} or takes or called == "os.read"


def looks_at_a_clock(loop: ast.AST) -> bool:
    names = {each.id for each in ast.walk(loop) if isinstance(each, ast.Name)}
    names |= {each.attr for each in ast.walk(loop) if isinstance(each, ast.Attribute)}
    return CLOCK in names or not names.isdisjoint(LIMITS)


def test_every_wait_has_an_end() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for function, loop in waits_in(path.read_text()):
            where = f"{path.relative_to(PACKAGE)}:{function}"
            if where not in ENDS and not looks_at_a_clock(loop):
                wrong.append(f"{where}: {ast.unparse(loop)[:60]!r} has no limit")
    assert not wrong, "\n".join(wrong)
