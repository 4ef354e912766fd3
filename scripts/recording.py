"""Record the two commands of the README and draw the terminal session, light and dark.

    python scripts/recording.py               # runs scripts/quickstart and scripts/test
    python scripts/recording.py quickstart    # runs one of them
    python scripts/recording.py --from LOG    # runs nothing, draws LOG

A run writes the lines of its output with their times to ``bench/results/quickstart-DATE.jsonl``,
after a row about versions and the machine; the pictures are
``hf_zero/docs/drawings/quickstart-*.svg``. A picture shows lines of the log only. It lacks parts
of runs of similar lines, which a line «…» replaces, and the ends of lines of more than 100 columns.
Lines are pale at first and get their colors one by one, in the order of the run; they have them
from the start where a viewer does not animate SVG or the reader has asked for less motion. The
script needs no installed package.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS, DRAWINGS = ROOT / "scripts" / "bench" / "results", ROOT / "hf_zero" / "docs" / "drawings"
COMMANDS = {name: f"bash scripts/{name}" for name in ("quickstart", "test")}
NAMES = {"python": "Python", "torch": "torch", "transformers": "Transformers", "triton": "Triton"}

COLUMNS = 100
ROWS, MORE = 28, 8  # lines of a picture of one command, and for a second one
ELLIPSIS = "…"
# Kinds of lines that come in runs: of an installation, of a log, of pytest's progress and summary,
# and of a table.
REPEATED = re.compile(
    r"(?P<install>environment: )|(?P<log>\d\d:\d\d:\d\d )|(?P<progress>[.sxXFE]+ *\[ *\d+%\]$)|"
    r"(?P<summary>SKIPPED |XFAIL )|(?P<table>[┌├│└])"
)
ENDS = ((3, 2), (2, 2), (2, 1), (1, 1), (0, 1))  # first and last lines of a run, by preference

SIZE, ADVANCE, PITCH = 12, 7.22, 16  # of type in px: height, width of a letter, from line to line
SMALL = 11  # of the title bar
PADDING, BAR, CLOCK = 16, 30, 44  # margin, height of the title bar, width for times, in px
DOTS = 56  # width of the dots of the title bar, and of the space beside them
SECONDS = 5.0  # of the animation: one that is longer needs a button to stop it
LONGEST = 0.08  # of the animation: a pause between two lines

COLORS = {
    "light": {
        "paper": "#ffffff", "bar": "#f6f8fa", "frame": "#d1d9e0", "ink": "#1f2328",
        "faint": "#59636e", "prompt": "#1a7f37", "heading": "#0969da",
    },
    "dark": {
        "paper": "#0d1117", "bar": "#151b23", "frame": "#3d444d", "ink": "#e6edf3",
        "faint": "#9198a1", "prompt": "#3fb950", "heading": "#58a6ff",
    },
}  # fmt: skip

Row = dict[str, Any]


class Line(NamedTuple):
    """A line of the picture, and the seconds from the start of its command to its output."""

    text: str
    seconds: float

    @property
    def kind(self) -> str:
        """Return the color of the line."""
        if self.text.startswith("$ "):
            return "prompt"
        if self.text.startswith("== "):
            return "heading"
        elided = self.text == ELLIPSIS or _repeated(self.text) not in (None, "install", "table")
        return "faint" if elided else "ink"


def record(names: Sequence[str]) -> list[Row]:
    """Run the commands ``names`` and return the rows of a log.

    Raises:
        SystemExit: a command failed.
    """
    rows: list[Row] = []
    for name in names:
        command = COMMANDS[name]
        print(f"$ {command}", flush=True)
        rows.append({"command": command, "seconds": 0.0, "line": f"$ {command}"})
        start = time.perf_counter()
        width = {"COLUMNS": str(COLUMNS)} if name == "quickstart" else {}  # tests expect 80
        with subprocess.Popen(
            command.split(), cwd=ROOT, env=os.environ | width, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for raw in process.stdout:
                print(line := _overwritten(raw.decode(errors="replace")), flush=True)
                seconds = round(time.perf_counter() - start, 3)
                rows.append({"command": command, "seconds": seconds, "line": line})
        if process.returncode:
            raise SystemExit(f"{command} failed with exit code {process.returncode}; no picture")
    return [environment(), *rows]


def _overwritten(text: str) -> str:
    """Return what a terminal shows of a line that carriage returns overwrite."""
    *_, last = ["", *filter(None, text.rstrip("\r\n").split("\r"))]
    return last.rstrip()


def environment() -> Row:
    """Return the row about the machine and the environment of the commands."""
    python = Path(os.environ.get("HF_ZERO_VENV", ROOT / ".venv")) / "bin" / "python"
    source = (
        "import importlib.metadata as m, json, platform; "
        "found = {d.name.lower(): d.version for d in m.distributions()}; "
        "print(json.dumps({'python': platform.python_version()} | found))"
    )
    versions = subprocess.run([python, "-c", source], text=True, capture_output=True, check=True)
    installed = json.loads(versions.stdout)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True, capture_output=True
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "versions": {name: installed[name] for name in NAMES if name in installed},
        "cpu": processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }


def processor() -> str:
    """Return the model of the CPU, or its architecture where the system does not say."""
    about = Path("/proc/cpuinfo")
    text = about.read_text() if about.exists() else ""
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return model[1] if model else platform.machine()


def rows_of(log: Path) -> list[Row]:
    """Return the rows of a log: the first one is about the machine."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def latest() -> Path:
    """Return the newest log of the results."""
    return max(RESULTS.glob("quickstart-*.jsonl"))


def lines(rows: Sequence[Row]) -> list[Line]:
    """Return the lines of the picture, each of at most :data:`COLUMNS`.

    Raises:
        ValueError: the output is longer than a picture, even without lines that may be elided.
    """
    output = [Line(_truncated(row["line"]), row["seconds"]) for row in rows if "line" in row]
    most = ROWS if sum(line.kind == "prompt" for line in output) < 2 else ROWS + MORE
    for first, last in ENDS:
        shown = list(_elided(output, first, last))
        if (count := sum(bool(line.text) for line in shown)) <= most:
            return shown
    raise ValueError(
        f"{count} lines do not fit the {most} of a picture: print less, or match more of them in "
        "REPEATED"
    )


def _truncated(text: str) -> str:
    return text if len(text) <= COLUMNS else text[: COLUMNS - 1].rstrip() + ELLIPSIS


def _elided(output: Sequence[Line], first: int, last: int) -> Iterator[Line]:
    """Yield ``output``: of each run of lines the first and last ones, of tables the last."""
    tables = [place for place, line in enumerate(output) if _repeated(line.text) == "table"]
    for kind, group in groupby(enumerate(output), lambda item: _repeated(item[1].text)):
        places, run = zip(*group)
        if kind == "table" and places[-1] != tables[-1]:
            yield Line(ELLIPSIS, run[0].seconds)
        elif kind in (None, "table") or len(run) <= first + last + 1:
            yield from run
        else:
            yield from run[:first]
            yield Line(ELLIPSIS, run[first].seconds)
            yield from run[-last:]


def _repeated(text: str) -> str | None:
    match = REPEATED.match(text)
    return match.lastgroup if match else None


def drawing(rows: Sequence[Row], scheme: str) -> str:
    """Return the picture of a log as an SVG, in the colors of ``scheme``."""
    colors, shown = COLORS[scheme], lines(rows)
    width = round(2 * PADDING + COLUMNS * ADVANCE + CLOCK)
    y, clock, body = BAR + PADDING + SIZE - 2.0, "", []
    for line, delay in zip(shown, delays(shown)):
        if not line.text:
            y += PITCH / 2
            continue
        weight = ' font-weight="600"' if line.kind in ("prompt", "heading") else ""
        before, clock = clock, _clock(line.seconds)
        # The given length keeps tables aligned in fonts of another width.
        body.append(
            f'<g style="animation-delay:{delay:.2f}s">'
            f'<text x="{PADDING}" y="{y:g}" fill="{colors[line.kind]}"{weight} '
            f'textLength="{len(line.text) * ADVANCE:.1f}" lengthAdjust="spacingAndGlyphs">'
            f"{escape(line.text, quote=False)}</text>"
            + f'<text x="{width - PADDING}" y="{y:g}" fill="{colors["faint"]}" font-size="10" '
            f'text-anchor="end">{clock}</text>' * (clock != before) + "</g>"
        )
        y += PITCH
    height = round(y - PITCH + PADDING)
    letters = int((width - 2 * PADDING - DOTS) / (ADVANCE * SMALL / SIZE))
    title = "A terminal: " + " and ".join(line.text[2:] for line in shown if line.kind == "prompt")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" xml:space="preserve" '
            "font-family=\"ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', "
            f'monospace" font-size="{SIZE}">',
            f"<title>{title}</title>",
            "<style>text{white-space:pre}@media (prefers-reduced-motion:no-preference){"
            "g{animation:appear .01s both}@keyframes appear{from{opacity:.25}}}</style>",
            f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" '
            f'fill="{colors["paper"]}" stroke="{colors["frame"]}"/>',
            f'<path d="M1 {BAR}V8.5A7.5 7.5 0 0 1 8.5 1H{width - 8.5}A7.5 7.5 0 0 1 {width - 1} 8.5'
            f'V{BAR}Z" fill="{colors["bar"]}"/>',
            f'<path d="M1 {BAR}.5H{width - 1}" stroke="{colors["frame"]}"/>',
            *(
                f'<circle cx="{PADDING + 4 + 16 * place}" cy="{BAR / 2:g}" r="5" '
                f'fill="{colors["frame"]}"/>'
                for place in range(3)
            ),
            f'<text x="{width - PADDING}" y="{BAR / 2 + 4:g}" fill="{colors["faint"]}" '
            f'font-size="{SMALL}" text-anchor="end">{escape(caption(rows[0], letters))}</text>',
            *body,
            "</svg>\n",
        ]
    )


def caption(about: Row, letters: int) -> str:
    """Return the words of the title bar, ``letters`` at most: the machine, as many versions as fit,
    and the date of a log.
    """
    cpu, known = re.sub(r"\((R|TM)\)", "", about["cpu"]), about["versions"]
    versions = [f"{words} {known[name]}" for name, words in NAMES.items() if name in known]
    for count in range(len(versions), 0, -1):
        shown = ", ".join(versions[:count])
        text = f"{cpu}, {about['cores']} cores · {shown} · {about['date']}"
        if len(text) <= letters:
            break
    return text[:letters]


def delays(shown: Sequence[Line]) -> list[float]:
    """Return the second of the animation at which each line appears.

    Pauses are in proportion to those of the run, but for the longest, which are cut.
    """
    pauses = [max(0.0, b.seconds - a.seconds) for a, b in pairwise(shown)]
    total = sum(pauses) or 1.0
    cut = [min(pause / total, LONGEST) + 0.01 for pause in pauses]
    scale = SECONDS / (sum(cut) or 1.0)
    return [scale * sum(cut[:place]) for place in range(len(shown))]


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def generated(log: Path | None = None) -> dict[Path, str]:
    """Return the pictures of ``log``, by default the newest, and their paths."""
    rows = rows_of(log or latest())
    return {DRAWINGS / f"quickstart-{scheme}.svg": drawing(rows, scheme) for scheme in COLORS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commands", nargs="*", help=f"of {', '.join(COMMANDS)}; all by default")
    parser.add_argument("--from", dest="log", type=Path, help="draw this log and run nothing")
    args = parser.parse_args()
    if unknown := set(args.commands) - set(COMMANDS):
        parser.error(f"no command {', '.join(sorted(unknown))}: name some of {', '.join(COMMANDS)}")
    log = args.log
    if log is None:
        rows = record(args.commands or list(COMMANDS))
        log = RESULTS / f"quickstart-{rows[0]['date']}.jsonl"
        log.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    for path, text in generated(log).items():
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
