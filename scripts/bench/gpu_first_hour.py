"""What the first GPU that runs hf-zero is asked, in the order in which an answer makes the next
question useful: four parts, each a call of at most nine minutes on one card.

    scripts/gpu --first-hour 1          # right: stages beside plain torch, two ranks, tests/gpu
    scripts/gpu --first-hour 2          # memory accesses, and a graph captured beside training
    scripts/gpu --first-hour 3          # steps in traces; kernels beside torch.compile and Liger
    scripts/gpu --first-hour 4          # the goals (gpu_run.py --minutes 9)
    python scripts/bench/gpu_first_hour.py 1 --tiny     # on the CPU: does it run?

Rows go to OUT as they come, and at the end a page, ``first-hour-PART.md``. A part ends with code 3,
and does not go on, if a check fails that makes the rest useless; the page names the cause.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_cells import BERT, LLAMA, VERSIONS, Cell, Rows, about, train
from gpu_run import Run, parser_of_parts, part_run, refuse_part
from gpu_run import main as goals

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 9.0  # of a call
STOPPED = 3  # exit code
STEPS = 4
PASSED = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def _python(*arguments: str, within: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*within, sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing said"


def tests(work: str, seconds: int, *arguments: str, workers: int = 0) -> Cell:
    """Files of tests/gpu, by as many processes on the device; tiny, those of one room of the
    package.
    """

    def run(tiny: bool) -> Rows:
        chosen = ("tests/device/test_device_package.py",) if tiny else arguments
        processes = min(workers, (os.cpu_count() or 1) // 2) if not tiny else 0
        options = ("-p", "no:cacheprovider", "-rf", "-n", str(processes), "--dist", "worksteal")
        done = _python("-m", "pytest", "-q", *options, *chosen)
        counts = {what: int(count) for count, what in PASSED.findall(_last_line(done.stdout))}
        failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
        yield {"work": work, "of": "hf-zero", "failures": failed, **counts}
        if done.returncode:
            sys.exit(f"{work}: {_last_line(done.stdout)}: {', '.join(failed[:4]) or done.stderr}")

    return Cell(work, "", seconds, run)


def accesses(tool: str, stage: str, seconds: int) -> Cell:
    """One step under a tool of compute-sanitizer; tiny, without it."""
    work = f"{tool}, {stage}"

    def run(tiny: bool) -> Rows:
        # cuDNN's attention orders its accesses by means that racecheck does not know
        others = ("--kernel-name-exclude", "kernel_substring=cudnn") if tool == "racecheck" else ()
        checker = ("compute-sanitizer", "--tool", tool, *others, "--error-exitcode", "9")
        within = () if tiny else checker
        where = ("--device", "cpu") if tiny else ()
        script = "scripts/bench/gpu_steps.py"
        done = _python(script, "--steps", "1", "--only", stage, *where, within=within)
        summaries = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
        yield {"work": work, "of": "hf-zero", "summary": " ".join(summaries)}
        if done.returncode:
            said = done.stdout if summaries else done.stderr
            sys.exit(f"{work}: {_last_line(said)}")

    return Cell(work, "", seconds, run, needs="compute-sanitizer")


def _engine(stage: int, device: str, **more: Any) -> tuple[Any, Callable[[], float]]:
    """Return an engine of a small Llama, and a step of it that returns the loss."""
    import torch
    from gpu_steps import SHAPE
    from transformers import LlamaConfig, LlamaForCausalLM

    import hf_zero

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        **more,
    }
    engine = hf_zero.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )[0]
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(5, SHAPE["vocab_size"], (2, 64), generator=draw).to(device)

    def step() -> float:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return engine, step


class Captures(threading.Thread):
    """Captures and replays CUDA graphs until :meth:`end`; without a GPU, the same without a
    graph.
    """

    def __init__(self, device: str) -> None:
        super().__init__(daemon=True)
        self.device, self.ended, self.count = device, threading.Event(), 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.ended.is_set():
                self._one()
                self.count += 1
        except BaseException as error:  # of a capture, for the main thread
            self.error = error

    def _one(self) -> None:
        import torch

        values = torch.ones(64, 64, device=self.device)
        if self.device == "cpu":
            values @ values
            return
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # cuBLAS makes what it needs for this thread and stream
            values @ values
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            values @ values
        graph.replay()
        torch.cuda.current_stream().synchronize()

    def end(self) -> None:
        self.ended.set()
        self.join()


def capture(tiny: bool) -> Rows:
    """Graphs that another thread captures while the engine trains, its watch thread on: the losses
    are those without, and no capture fails.
    """
    device = "cpu" if tiny else "cuda"
    for stage in (1, 3):
        engine, step = _engine(stage, device)
        want = [step() for _ in range(STEPS)]
        engine.destroy()
        engine, step = _engine(stage, device)
        captures = Captures(device)
        captures.start()
        got = [step() for _ in range(STEPS)]
        captures.end()
        engine.destroy()
        off = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
        row = {"work": "capture beside training", "of": f"stage {stage}", "off": off}
        yield {**row, "captures": captures.count}
        if captures.error is not None or off > 1e-5:
            why = captures.error or f"the losses are off by {off:.2g}"
            sys.exit(f"stage {stage}: {why}")


def trace(tiny: bool) -> Rows:
    """The last of some traced steps at stages 1 and 3: milliseconds of compute, of communication,
    of what was exposed, and of the host for a step that does not wait.
    """
    import torch

    from hf_zero.report.timeline import read_timeline

    for stage in (1, 3):
        engine, step = _engine(stage, "cpu" if tiny else "cuda", kernels="off" if tiny else "auto")
        for _ in range(STEPS):
            step()
        with tempfile.TemporaryDirectory() as folder:
            engine.trace(2, folder)
            for _ in range(3):
                step()
            (file,) = Path(folder).glob("*.gz")
            (row, *_) = read_timeline(file).rows()
        begun = time.perf_counter()
        step()
        if not tiny:
            torch.cuda.synchronize()
        yield {
            "work": "a step in a trace, ms",
            "of": f"stage {stage}",
            "step without a trace": 1e3 * (time.perf_counter() - begun),
            **{name: value for name, value in row.items() if name != "rank"},
        }
        engine.destroy()


def broken_down(work: str, seconds: int) -> Cell:
    """Where each millisecond of a step goes that is neither a product, attention nor the optimizer:
    a row for each kind of kernel, then for each of the longest other kernels.
    """
    title = f"where a step of {work} goes"

    def run(tiny: bool) -> Rows:
        os.environ["PROFILE"] = "1"
        for row in train(work, "hfz1+all", seconds).run(tiny):
            for part in row.pop("breakdown"):
                yield {"work": title, **part}
            yield {**row, "work": title}

    return Cell(title, "", seconds, run)


def kernels(tiny: bool) -> Rows:
    """Each fused operation beside eager torch, torch.compile and Liger (kernels.py)."""
    with tempfile.TemporaryDirectory() as folder:
        few = ("--device", "cpu", "--small", "--repeats", "2", "--only", "norms")
        arguments = few if tiny else ("--repeats", "10")
        done = _python("scripts/bench/kernels.py", "--out", folder, *arguments)
        file = Path(folder) / "kernels.jsonl"
        for line in file.read_text().splitlines() if file.exists() else ():
            row = json.loads(line)
            figures = {"ms": row["s"] * 1e3, "of_the_floor": row["of_the_floor"], "off": row["off"]}
            yield {"work": row["operation"], "of": row["who"], **figures}
    if done.returncode:
        sys.exit(f"kernels: {_last_line(done.stderr)}")


ENGINE, TWO = "tests/gpu/test_engine_on_gpu.py", "tests/gpu/test_two_ranks_on_one_gpu.py"
RANDOM = "tests/gpu/test_random_programs_on_gpu.py"
REST = ("tests/gpu", *(f"--ignore={file}" for file in (ENGINE, TWO, RANDOM)))
STAGES = ("stage 1", "stage 3", "stage 2, optimizer on the CPU")
PARTS: dict[int, tuple[Cell, ...]] = {
    1: (
        tests("stages over NCCL, one rank", 60, ENGINE, workers=4),
        tests("two ranks of one card over gloo", 110, TWO),
        tests("random lives and programs", 90, RANDOM, workers=8),
        tests("the rest of tests/gpu", 190, *REST, workers=8),
    ),
    2: (
        *(accesses("memcheck", stage, 60) for stage in STAGES),
        *(accesses("racecheck", stage, 90) for stage in STAGES[:2]),
        Cell("capture beside training", "", 40, capture),
    ),
    3: (
        Cell("a step in a trace", "", 60, trace),
        *(broken_down(work, 55) for work in (LLAMA, BERT)),
        Cell("kernels", "", 300, kernels),
    ),
}
# checks without which no later answer counts, in any part
DECISIVE = {
    "stages over NCCL, one rank": "a stage is not equal to plain torch on this device",
    "two ranks of one card over gloo": "ranks do not agree on this device",
}


def page(title: str, rows: Sequence[dict[str, Any]], stopped: str) -> str:
    """Return the rows as one page of Markdown."""
    lines = [f"# {title}", ""]
    lines += [f"**Ended early: {stopped}.**", ""] if stopped else []
    lines += ["| check | of | result |", "| --- | --- | --- |"]
    hidden = {"work", "of", "at", "device", "python", *VERSIONS}
    for row in (row for row in rows if "work" in row):
        figures = [
            f"{name} {value:.4g}" if isinstance(value, (int, float)) else f"{name} {value}"
            for name, value in row.items()
            if name not in hidden and value not in ("", [], {})
        ]
        text = ", ".join(figures).replace("|", "/")
        lines.append(f"| {row['work']} | {row.get('of', '')} | {text} |")
    device = next((row["device"] for row in rows if "device" in row), "")
    return "\n".join([*lines, "", f"{device}, {datetime.date.today().isoformat()}", ""])


def ask(part: int, run: Run, cells: Sequence[Cell]) -> str:
    """Run ``cells`` until a decisive one fails; return the cause, or ""."""
    for cell in cells:
        run.cells([cell])
        of_cell = [row for row in run.rows if row.get("work") == cell.work]
        failed = [row["failed"] for row in of_cell if "failed" in row]
        if failed and cell.work in DECISIVE:
            return f"{DECISIVE[cell.work]} ({failed[0]})"
    return ""


def main() -> None:
    parser = parser_of_parts(__doc__, "1 to 4")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, tiny: does it run?")
    chosen = parser.parse_args()
    cells = {cell.name: cell for part in PARTS.values() for cell in part}
    sys.path.insert(0, str(ROOT))
    if chosen.part in cells:  # a process of in_a_process
        facts = about(chosen.tiny)
        for row in cells[chosen.part].run(chosen.tiny):
            print("ROW " + json.dumps({**row, **facts}), flush=True)
        return
    if chosen.part not in tuple("1234"):
        refuse_part(chosen.part, "1 to 4", cells)
    part = int(chosen.part)
    if part not in PARTS:
        tiny = ["--tiny", "--only", "pinning"] if chosen.tiny else []
        sys.argv[1:] = [*tiny, "--minutes", str(MINUTES), "--spent", str(chosen.spent)]
        sys.argv += ["--out", str(chosen.out)]
        return goals()
    name = f"first-hour-{part}{'-tiny' if chosen.tiny else ''}"
    seconds = 60 * MINUTES - chosen.spent
    run = part_run(Path(__file__), name, chosen.out, chosen.tiny, seconds)
    run.installed = lambda tool: chosen.tiny or bool(shutil.which(tool))
    stopped = ask(part, run, PARTS[part])
    if stopped:
        run.write({"stopped": stopped})
    text = page(f"The first hour on a GPU, part {part}", run.rows, stopped)
    (chosen.out / f"{name}.md").write_text(text)
    print(f"{text}\nrows in {run.path}", flush=True)
    raise SystemExit(STOPPED if stopped else 0)


if __name__ == "__main__":
    main()
