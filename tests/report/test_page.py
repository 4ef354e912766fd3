"""The page of a run: what it is made of, from runs of two ranks, and a browser that draws it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from html import escape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_zero.cli.app import app
from hf_zero.distributed import watchdog
from hf_zero.errors import ConfigError
from hf_zero.logging import logger
from hf_zero.measures.metrics_file import read_metrics, read_rows
from hf_zero.measures.run_record import BUFFERS
from hf_zero.report import charts, write_report
from hf_zero.report.page import in_numbers, summary_lines
from hf_zero.report.run import SPEEDS, RecordedRun, read_run
from hf_zero.report.timeline import read_timeline
from tests.helpers.cells import fast
from tests.helpers.engines import config_of, start
from tests.helpers.models import ARCHITECTURES, tokens
from tests.helpers.processes import run_processes
from tests.helpers.training import adamw
from tests.report.browser import Drawing, draw, needs_chromium

STEPS, AGAIN = 4, 2
RUNS = {"three": 3, "one": 1}
OFF = {"trace": {"enabled": False}}


def steps(engine: Any, rank: int, numbers: range) -> None:
    for step in numbers:
        ids = tokens(step, 0, rank)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def trained(rank: int, folder: str) -> None:
    """A run at each stage of RUNS, traced, ended early and resumed."""
    for name, stage in RUNS.items():
        on: dict[str, Any] = {
            "metrics": {"enabled": True, "path": f"{folder}/{name}", "peak_tflops": 0.01},
            "trace": {"enabled": True, "first": 2, "steps": 2, "path": f"{folder}/{name}"},
            "wall_clock_breakdown": True,
            "fp16": {"enabled": True, "initial_scale_power": 4},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}},
        }
        for again in (False, True):
            model = ARCHITECTURES["llama"].build()
            engine = start(model, adamw(model), config_of(stage, **(on if not again else on | OFF)))
            if again:
                engine.load_checkpoint(f"{folder}/saved-{name}")
                if not rank:
                    logger.warning("<script>alert('a & b')</script>")
            steps(engine, rank, range(engine.global_steps, STEPS if again else AGAIN + 1))
            if not again:
                engine.save_checkpoint(f"{folder}/saved-{name}", tag="a")
                steps(engine, rank, range(AGAIN + 1, STEPS))
            else:
                steps(engine, rank, range(STEPS, STEPS + AGAIN))
            engine.destroy()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_processes(2, trained, str(folder))
    return folder


def specs_of(page: str) -> dict[str, Any]:
    found = re.search(r'id="specs">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def values(spec: Any) -> list[dict[str, Any]]:
    return list(spec["data"]["values"])


def test_a_run_is_read_whole(folders: Path) -> None:
    run = read_run(folders / "three")
    assert [row["step"] for row in run.steps] == [*range(1, STEPS + AGAIN + 1)]
    assert [(start.after, start.repeated) for start in run.starts] == [(0, 0), (3, 1)]
    assert [each.text for each in run.messages] == ["<script>alert('a & b')</script>"]
    assert run.trace is not None and run.trace.name == "trace-steps-2-3.json.gz"
    totals = [row["totals"] for row in read_rows(folders / "three") if "totals" in row]
    assert run.totals == totals[-1] != totals[0], "those of the end"
    found = run.summary()
    assert (found["run"], found["steps"], found["restarts"]) == ("three", STEPS + AGAIN, 1)
    assert found["loss"] == list(read_metrics(folders / "three"))[-1]["loss"]


def test_a_loss_that_is_not_finite_is_that_of_the_last_step(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 2.25 if step < 3 else None} for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path, (found,) = write_report(tmp_path)
    assert found["loss"] is None and ("loss", "not finite") in summary_lines(found)
    assert "<dt>loss</dt><dd>not finite</dd><small>of the last step</small>" in path.read_text()


def test_a_page_has_the_figures_and_loads_nothing(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_zero.report.page.javascript", lambda: "LIBRARY")
    path, found = write_report(folders / "three")
    assert path == folders / "three" / "report.html" and found[0]["steps"] == STEPS + AGAIN
    page = path.read_text()
    specs = specs_of(page)
    rows = list(read_metrics(folders / "three"))
    for name in ("loss", "grad_norm", "learning_rate", "loss_scale", "tokens_per_second", "mfu"):
        drawn = [(row["step"], row["value"]) for row in values(specs[name])]
        slowed = (2, 3) if name in SPEEDS else ()  # by the trace
        known = [None if row["step"] in slowed else row[name] for row in rows]
        assert drawn == [(row["step"], value) for row, value in zip(rows, known)]
    rule, band = map(values, specs["loss"]["layer"][-2:])
    assert rule[0]["step"] == 3 and (band[0]["first"], band[0]["last"]) == (1.5, 3.5)
    for name in specs:
        assert f'id="{name}"' in page
    for name in ("step_time", "waits"):  # no outlier of the steps that were traced
        drawn = {row["step"] for row in values(specs[name]) if row["value"] is not None}
        assert drawn == {1, 4, 5, 6} and len({row["step"] for row in values(specs[name])}) == 6
    sent = sum(row["bytes"] for row in values(specs["wire0"]))
    assert sent == pytest.approx(sum(row["wire_bytes"] for row in rows), abs=3 * len(rows))
    assert "&lt;script&gt;alert(" in page and "<script>alert(" not in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert escape('{"warmup_num_steps": 2}') in page
    assert "zero_optimization.stage" in page and "<!--" not in page.replace("<!doctype", "")


def waited_for(rank: int, folder: str) -> None:
    """A run whose second step rank 1 begins late."""
    watchdog.NOTED_SECONDS = 0.0
    model = ARCHITECTURES["llama"].build()
    on = {"metrics": {"enabled": True, "path": folder}}
    engine = start(model, adamw(model), config_of(3, **on))
    steps(engine, rank, range(1))
    if rank == 1:  # rank 0 goes on, and waits
        noted(folder, "waits")
    steps(engine, rank, range(1, 2))
    noted(folder, "runs")
    steps(engine, rank, range(2, 3))
    engine.destroy()


def noted(folder: str, state: str) -> None:
    """Return once the last states of ranks that rank 0 has noted begin with ``state``."""
    end = time.monotonic() + 120
    while not (rows := states(folder)) or rows[-1]["ranks"][0]["state"] != state:
        assert time.monotonic() < end
        time.sleep(0.05)


def states(folder: str | Path) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder) if "ranks" in row]


def test_a_rank_that_comes_late_is_in_the_record(tmp_path: Path) -> None:
    run_processes(2, waited_for, str(tmp_path))
    rows = states(tmp_path)
    # the look that finds both at work again may come before the second step has ended
    assert rows[0]["after_step"] == 1 and rows[-1]["after_step"] in (1, 2)
    first, last = rows[0]["ranks"], rows[-1]["ranks"]
    assert [row["state"] for row in first] == ["waits", "runs"]
    assert [row["ranks"] for row in first] == [[0], [1]] and "(number " in first[0]["what"]
    assert last == [{"ranks": [0, 1], "state": "runs", "what": ""}]
    assert read_run(tmp_path).ranks is None, "steps have followed"


def test_the_timeline_has_the_blocks_of_both_ranks(folders: Path) -> None:
    run = read_run(folders / "three")
    assert run.trace is not None
    found = read_timeline(run.trace)
    assert (found.step, found.ranks, found.shown) == (3, 2, 2)
    for rank in range(2):
        own = [bar for bar in found.bars if bar.rank == rank]
        assert {bar.kind for bar in own} >= {"forward", "backward", "gathers", "reductions"}
        assert {bar.name for bar in own if bar.kind == "backward"} >= {"model.layers.0"}
        assert all(0 <= bar.begin <= bar.end <= found.length for bar in own)
    for row in found.rows():
        assert 0 < row["compute"] < row["step"] and row["gathers exposed"] <= row["gathers"]


def test_two_runs_beside_each_other(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_zero.report.page.javascript", lambda: "LIBRARY")
    path, found = write_report(folders / "three", folders / "one", folders / "both.html")
    assert [each["run"] for each in found] == ["three", "one"]
    specs = specs_of(path.read_text())
    assert {row["run"] for row in values(specs["loss"])} == {"three", "one"}
    assert {"memory0", "memory1", "wire0", "wire1", "timeline0", "timeline1"} <= specs.keys()
    differing = re.findall(r'<tr class=differs><td class="key">([^<]+)', path.read_text())
    assert "zero_optimization.stage" in differing


def test_two_runs_are_told_apart_by_the_folders_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_zero.report.page.javascript", lambda: "LIBRARY")
    for one, other in (("a/run", "b/run"), ("a/logs/run", "b/logs/run"), ("run", "logs/run")):
        for name in (one, other):
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        path, found = write_report(tmp_path / one, tmp_path / other, tmp_path / "both.html")
        named = [each["run"] for each in found]
        assert {row["run"] for row in values(specs_of(path.read_text())["loss"])} == {*named}
        assert len({*named}) == 2 and all(
            str(tmp_path / at).endswith(f"/{name}") for at, name in zip((one, other), named)
        )
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for same in ("run", "link"):
        with pytest.raises(ConfigError, match=f"--against .*{same} is the folder of the run itse"):
            write_report(tmp_path / "run", tmp_path / same, tmp_path / "both.html")


def test_the_command_writes_the_page(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_zero.report.page.javascript", lambda: "LIBRARY")
    page = tmp_path / "both.html"
    asked = ["report", str(folders / "three"), "--against", str(folders / "one"), "-o", str(page)]
    for more in ([], ["--json"]):
        page.unlink(missing_ok=True)
        ran = CliRunner().invoke(app, [*asked, *more], catch_exceptions=False)
        assert ran.exit_code == 0 and page.is_file()
        if more:
            told = json.loads(ran.stdout)
            assert told["page"] == str(page) and told["bytes"] == page.stat().st_size
            assert [each["run"] for each in told["runs"]] == ["three", "one"]
        else:
            assert f"the page: {page}" in ran.stdout and "tokens per second" in ran.stdout


EVALUATIONS = [
    {"after_step": 0, "evaluation": {"eval_loss": 4.0, "eval_f1": 0.25}},
    {"after_step": 60, "evaluation": {"eval_loss": 2.0}},
    {"after_step": 60, "evaluation": {"eval_f1": None}},
]


def evaluated_run(folder: Path) -> Path:
    """A run with evaluations, a restart, and predicted and measured bytes."""
    run: dict[str, Any] = {
        "started": "2026-11-23T18:02:11+00:00", "program": "a", "versions": {}, "hosts": [],
        "ranks": 1, "stage": 1, "precision": "fp32", "mesh": {}, "model": "a", "parameters": 1,
    }  # fmt: skip
    kinds = {"parameters": "parameters", "gradients": "gradients", "gathered units": BUFFERS}
    run["predicted"] = [
        {"tier": "device", "kind": kind, "what": what, "bytes": 100} for what, kind in kinds.items()
    ]
    state = [{"tier": "device", "kind": kind, "bytes": 99} for kind in ("parameters", "gradients")]
    totals = {"totals": {"state": state}, "after_step": 60}
    steps = [{"step": step, "loss": 1.0 + step % 2} for step in range(1, 61)]
    starts = [{"run": run, "repeated_steps": 0, "after_step": after} for after in (0, 30)]
    rows = [starts[0], *steps[:30], starts[1], *steps[30:], totals]
    rows += [row | {"time": 1.7e9} for row in EVALUATIONS]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_evaluations_and_smooth_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_zero.report.page.javascript", lambda: "LIBRARY")
    path, (found,) = write_report(evaluated_run(tmp_path / "a"))
    assert (found["eval_loss"], found["eval_f1"]) == (2.0, None)
    page = path.read_text()
    assert "<dt>eval_loss</dt><dd>2</dd><small>after step 60</small>" in page
    specs = specs_of(page)
    points = specs["loss"]["layer"][-1]
    assert [(row["step"], row["value"]) for row in values(points)] == [(0, 4.0), (60, 2.0)]
    assert [row["value"] for row in values(specs["evaluation0"])] == [0.25, None]
    assert "evaluation1" not in specs, "losses are beside those of training"
    assert specs["loss"]["usermeta"] == {"smooth": ["run"]} and 'id="smoothing"' in page
    assert "usermeta" not in specs["evaluation0"]
    write_report(evaluated_run(tmp_path / "a"), evaluated_run(tmp_path / "b"))
    both = values(specs_of(path.read_text())["loss"]["layer"][-1])
    assert [row["run"] for row in both] == ["a", "a", "b", "b"]


def test_predicted_and_measured_bytes_are_of_the_same_kinds(tmp_path: Path) -> None:
    (chart,) = charts.memory([read_run(evaluated_run(tmp_path / "a"))])
    lines: dict[str, dict[str, int]] = {}
    for row in values(chart.spec):
        lines.setdefault(row["line"], {})[row["kind"]] = row["bytes"]
    assert lines == {
        "device, state predicted": {"parameters": 100, "gradients": 100},
        "device, state measured": {"parameters": 99, "gradients": 99},
        "device, buffers predicted": {BUFFERS: 100},
    }


def test_long_runs_are_drawn_as_means() -> None:
    count = 3 * charts.POINTS
    steps = [{"step": step, "loss": float(step)} for step in range(1, count + 1)]
    run = RecordedRun("long", Path(), steps)
    (chart,) = charts.curves([run])
    rows = values(chart.spec)
    assert len(rows) == charts.POINTS
    assert rows[0] == {"step": 3, "value": 2.0, "run": "long"} and rows[-1]["step"] == count
    texts = {0: "0", 1.5: "1.5", 1234: "1.23 k", 7.5e9: "7.5 B"}
    assert {number: in_numbers(number) for number in texts} == texts


@needs_chromium
@pytest.mark.parametrize("scheme", fast(["light", "dark"], lambda scheme: scheme == "light"))
def test_a_browser_draws_every_chart(folders: Path, tmp_path: Path, scheme: str) -> None:
    """It says nothing on its console; each curve has a symbol for each step, each bar a mark."""
    pytest.importorskip("vl_convert", reason="pip install 'hf-zero[report]'")
    page, _ = write_report(folders / "three", folders / "one", tmp_path / "page.html")
    assert "window.vegaEmbed=" in page.read_text() and page.stat().st_size < 2 << 20
    dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    document, said = draw(page, tmp_path / "home", *dark)
    assert not said
    found, specs = Drawing(document), specs_of(page.read_text())
    assert found.attributes.get("data-drawn") == str(len(specs))
    assert found.marks.keys() == specs.keys()
    for name, spec in specs.items():
        marks, rows = found.marks[name], values(spec)
        if name.startswith(("wire", "timeline", "memory")):
            per = "operation" if name.startswith("wire") else None
            count = len({row["operation"] for row in rows}) if per else len(rows)
            assert marks["mark-area"] + marks["mark-rect"] == count, (name, marks)
        else:
            drawn = [row for row in rows if row["value"] is not None]
            assert marks["mark-symbol"] == len(drawn) and marks["mark-line"] >= 1, (name, marks)
            assert marks["mark-rect"] == len(RUNS), "a band over the steps of each trace"


# Moves the slider and counts the heights of each curve of the losses; then measures the widths of
# the page and of its tables.
MOVED = """<script>
const report = async () => {
  while (!document.body.dataset.drawn) await new Promise((go) => setTimeout(go, 50));
  const found = [];
  for (const weight of [0, 0.9]) {
    const slider = document.getElementById("smoothing");
    slider.value = weight;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    await new Promise((go) => setTimeout(go, 500));
    const curves = document.querySelectorAll("#loss .mark-line path");
    const heights = (path) => path.getAttribute("d").match(/,[-\\d.]+/g);
    found.push([...curves].map((path) => new Set(heights(path)).size));
  }
  document.body.dataset.found = JSON.stringify(found);
  document.body.dataset.widths = JSON.stringify([
    document.documentElement.scrollWidth,
    Math.max(...[...document.querySelectorAll(".stacked table")].map((table) => table.offsetWidth)),
  ]);
};
report();
</script>"""


@needs_chromium
def test_the_slider_smooths_curves_and_a_phone_shows_restarts(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="pip install 'hf-zero[report]'")
    page, _ = write_report(evaluated_run(tmp_path / "a"))
    text, _, end = page.read_text().rpartition("</body>")
    page.write_text(f"{text}{MOVED}</body>{end}")
    document, said = draw(page, tmp_path / "home", "--window-size=420,2000")
    assert not said
    attributes = Drawing(document).attributes
    plain, smooth = json.loads(attributes["data-found"] or "")
    # of the losses 1 and 2 in turn: the faint values, the smooth curve, and the evaluations
    assert sorted(plain) == [2, 2, 2] and sorted(smooth)[:2] == [2, 2] and max(smooth) > 20
    whole, table = json.loads(attributes["data-widths"] or "")
    assert table < whole <= 500, "nothing is wider than the screen"


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no folder .*nowhere; name the folder of a run"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl.*\"metrics\": {\"enabled\": true}"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    with pytest.raises(ConfigError, match=r"no trace .*no\.json\.gz; engine\.trace\(\) writes one"):
        read_run(tmp_path, str(tmp_path / "no.json.gz"))
    too_long = "no" * 3000 + ".json.gz"
    with pytest.raises(ConfigError, match=r"no trace nono.*engine\.trace\(\) writes one"):
        read_run(tmp_path, too_long)
    noted = json.dumps({"trace": too_long, "after_step": 1, "time": 1.7e9})
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n' + noted)
    assert read_run(tmp_path).trace is None
    run = {"started": "a", "program": "a", "versions": {}, "hosts": [], "ranks": 1, "stage": 1}
    run |= {"precision": "fp32", "mesh": {}, "model": "a", "parameters": 1}
    schedule = {"key": "scheduler.params", "value": {"total_num_steps": True}, "source": "file"}
    run |= {"config": [schedule]}
    header = json.dumps({"run": run, "repeated_steps": 0, "after_step": 0})
    (tmp_path / "metrics.jsonl").write_text(header + '\n{"step": 1, "loss": 1.0}\n')
    assert read_run(tmp_path).planned_steps is None
    page = write_report(tmp_path, output=tmp_path / "page.html")[0]
    assert "an unknown device" in page.read_text()
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(ConfigError, match=r"needs vl_convert.*pip install 'hf-zero\[report\]'"):
        write_report(tmp_path)
    monkeypatch.setattr("hf_zero.report.page.javascript", lambda: "")
    with pytest.raises(ConfigError, match=r"cannot be written .*; pass --output"):
        write_report(tmp_path, output=tmp_path / "no" / "page.html")
    rows = [
        ('{"step": 2, "loss": "low"}', r"of step 2 is damaged: loss is 'low', expected a finite"),
        (
            '{"step": -2, "loss": 1.0}',
            r"of step -2 is damaged: step is -2, expected a number from 0",
        ),
        ('{"run": {}, "after_step": 2}', r"after step 2 is damaged: run\.started is absent"),
        (
            '{"warning": "a", "after_step": 2, "time": 1e99}',
            r"time is 1e\+99, expected a number from",
        ),
        (
            '{"totals": {"state": [{"tier": "a"}]}, "after_step": 1}',
            r"state\[0\]\.tier is 'a', expected",
        ),
        ('{"totals": {"state": 3}, "after_step": 1}', r"totals\.state is 3, expected a list"),
    ]
    for row, said in rows:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n' + row)
        with pytest.raises(ConfigError, match=said):
            read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n' + "[" * 5000)
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "report.html").symlink_to(tmp_path / "victim")
    path, _ = write_report(tmp_path)  # figures of an older version, without a header
    assert not path.is_symlink() and (tmp_path / "victim").read_text() == "kept"
    assert "no header" in path.read_text()
    path.unlink(), os.mkfifo(path)  # it is not waited for
    with pytest.raises(ConfigError, match=r"the page .* cannot be written .no regular file"):
        write_report(tmp_path)
