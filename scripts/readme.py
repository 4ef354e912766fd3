"""Writes what is generated for readers and editors: the drawings of the stages, of a terminal
session and of measurements beside peers, the table of stages by model size and number of GPUs, the
tables of measurements in the documentation, those of the points of a step, the pages of
configuration keys and of combinations of features, the table of the keys of training files, the
JSON schema, and the types of ZeroConfig's keywords.

    python scripts/readme.py            # writes the files below
    python scripts/readme.py --check    # says what would change; exit code 1 if anything
"""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cards
import published_configurations
import recording
from bench import comparison, picture
from marks import filled

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts" / "bench" / "results"
RANKS = 4
ROWS = ("parameters", "gradients", "optimizer state")
SHARDED = {0: (), 1: (2,), 2: (1, 2), 3: (0, 1, 2)}  # which of ROWS a stage shards

COLORS = {
    "light": {
        "ink": "#1f2328",
        "faint": "#59636e",
        "empty": "none",
        "line": "#8c959f",
        "fill": ("#218bff", "#2da44e", "#d4a72c"),
    },
    "dark": {
        "ink": "#e6edf3",
        "faint": "#9198a1",
        "empty": "none",
        "line": "#59636e",
        "fill": ("#388bfd", "#3fb950", "#d29922"),
    },
}

GPU_BYTES, RAM_BYTES = 80 * 10**9, 10**15
GPUS = (1, 4, 8, 32)
# hidden, intermediate, layers, heads, key-value heads, vocabulary, tied head
MODELS = {
    "1B": (2048, 8192, 16, 32, 8, 128256, True),
    "3B": (3072, 8192, 28, 24, 8, 128256, True),
    "8B": (4096, 14336, 32, 32, 8, 128256, False),
    "70B": (8192, 28672, 80, 64, 8, 128256, False),
}


def drawing(scheme: str) -> str:
    """An SVG: for each stage and rank, which part of the three kinds of state the rank holds.

    A bar is a whole kind of state, as wide as all ranks' shards together; the filled part is held.
    """
    colors: dict[str, Any] = COLORS[scheme]
    left, top, bar, height, gap = 96, 56, 120, 12, 5
    block = len(ROWS) * (height + gap) + 16
    column = bar + 36
    width, bottom = left + column * len(SHARDED), top + RANKS * block + 30
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom}" '
        f'width="{width}" height="{bottom}" role="img" '
        'font-family="ui-sans-serif, system-ui, sans-serif" font-size="13">',
        "<title>What each of four ranks holds at ZeRO stages 0 to 3</title>",
    ]

    def text(x: int, y: int, words: str, color: str, more: str = "") -> None:
        out.append(f'<text x="{x}" y="{y}" fill="{colors[color]}"{more}>{words}</text>')

    for stage, sharded in SHARDED.items():
        x = left + stage * column
        text(x, 22, f"stage {stage}", "ink", ' font-weight="600"')
        names = {
            0: "everything whole",
            1: "optimizer state sharded",
            2: "gradients sharded, too",
            3: "parameters sharded, too",
        }
        text(x, 40, names[stage], "faint", ' font-size="11"')
        for rank in range(RANKS):
            for row in range(len(ROWS)):
                y = top + rank * block + row * (height + gap)
                part = bar // RANKS if row in sharded else bar
                start = x + (rank * part if row in sharded else 0)
                frame = f'fill="{colors["empty"]}" stroke="{colors["line"]}"'
                out.append(f'<rect x="{x}" y="{y}" width="{bar}" height="{height}" {frame}/>')
                out.append(
                    f'<rect x="{start}" y="{y}" width="{part}" height="{height}" '
                    f'fill="{colors["fill"][row]}"/>'
                )
    for rank in range(RANKS):
        text(12, top + rank * block + 30, f"rank {rank}", "ink")
    for row, name in enumerate(ROWS):
        x, y = left + row * 150, bottom - 14
        fill = colors["fill"][row]
        out.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{fill}"/>')
        text(x + 18, y, name, "faint", ' font-size="12"')
    return "\n".join([*out, "</svg>"]) + "\n"


def stages() -> str:
    """A Markdown table: for each model and number of GPUs, the fastest configuration that fits."""
    lines = [
        "| model | " + " | ".join(f"{gpus} GPU{'s' * (gpus > 1)}" for gpus in GPUS) + " |",
        "| --- |" + " --- |" * len(GPUS),
    ]
    for name, shape in MODELS.items():
        model = _on_meta(*shape)
        lines.append(f"| {name} | " + " | ".join(_cell(model, gpus) for gpus in GPUS) + " |")
    return "\n".join(lines)


def _on_meta(
    hidden: int, between: int, layers: int, heads: int, shared: int, vocabulary: int, tied: bool
) -> Any:
    """A module with the parameters of a Llama, without memory for them."""
    from torch import nn

    def linear(inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False, device="meta")

    def block() -> nn.Module:
        few = hidden // heads * shared
        projections = [(hidden, hidden), (hidden, few), (hidden, few), (hidden, hidden)]
        gated = [(hidden, between), (hidden, between), (between, hidden)]
        norms = [nn.RMSNorm(hidden, device="meta") for _ in range(2)]
        return nn.Sequential(*(linear(*shape) for shape in projections + gated), *norms)

    model = nn.Module()
    model.embedding = nn.Embedding(vocabulary, hidden, device="meta")
    model.layers = nn.ModuleList(block() for _ in range(layers))
    model.norm = nn.RMSNorm(hidden, device="meta")
    model.head = linear(hidden, vocabulary)
    if tied:
        model.head.weight = model.embedding.weight
    return model


def _cell(model: Any, gpus: int) -> str:
    """What ``hf-zero estimate --fit`` proposes for GPUs of 80 GB, where RAM is no limit."""
    from hf_zero.device.free_memory import FreeBytes
    from hf_zero.planning.estimate import propose

    found = propose(model, gpus, FreeBytes(device=GPU_BYTES, ram=RAM_BYTES)).fit.chosen
    if found is None:
        return "more GPUs"
    settings, needs = found.plan.settings, found.needs
    away = (
        ", all on the CPU"
        if settings.offload_param.on
        else ", optimizer on the CPU"
        if settings.offload_optimizer.on
        else ""
    )
    host = f", host {_gb(needs.ram_bytes)}" if away else ""
    return f"stage {settings.stage}{away}: {_gb(needs.device_bytes)}{host}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.0f} GB" if size >= 1e10 else f"{size / 1e9:.1f} GB"


KEYS_HEAD = """# Configuration keys

**Stability:** stable ([what stays](compatibility.md#what-stays)).

This page lists every key of a configuration by section, with its type, effect and default.
`hf-zero docs zero_optimization.stage` shows one key, and `hf-zero docs zero_optimization` shows a
section. `hf-zero schema` prints the same as a JSON schema for editors. `scripts/readme.py`
generates this page.

hf-zero accepts keys marked "No effect", and ignores them for the given reason. Keys marked "Not
built" raise an error if they ask for the missing feature. Accelerate and the Trainer replace the
placeholder `"auto"` with a value.

"""


COMBINATIONS_HEAD = """\
# Which features go together

**Stability:** stable ([what stays](compatibility.md#what-stays)).

This page lists the features of hf-zero that a configuration switches on, and what each of them does
not go with. `hf_zero.initialize` compares a configuration with this table before it changes
anything. A pair that does not go together is a ConfigError on all ranks, which names both features,
the reason and what to change. `hf-zero explain` shows it without a model. All other pairs go
together: the long suite trains each of them beside plain torch that does what both features do.

Other refusals depend on the model, the optimizer or the values of a key. The page of each feature
describes them. `scripts/readme.py` generates this page from `hf_zero/config/features.toml`, which
also contains the order in which features are applied.


"""


def keys() -> dict[Path, str]:
    """The generated files about configuration keys."""
    from hf_zero.config import features, schema, training_file

    train = ROOT / "hf_zero/docs/train.md"
    return {
        train: filled(train.read_text(), "keys of training files", training_file.table()),
        ROOT / "hf_zero/docs/combinations.md": f"{COMBINATIONS_HEAD}{features.combinations()}\n",
        ROOT / "hf_zero/docs/keys.md": f"{KEYS_HEAD}{schema.reference()}\n\n{classes()}\n",
        ROOT / "hf_zero" / "config" / "schema.json": schema.schema_text(),
        ROOT / "hf_zero" / "config" / "keywords.py": formatted(schema.keywords()),
    }


def classes() -> str:
    """Markdown: parameters of the optimizers and schedules that a configuration names."""
    from hf_zero.config.optimizers import OPTIMIZERS
    from hf_zero.config.sections import SCHEDULERS
    from hf_zero.optim import build, schedules

    names = [row.names[0] for row in OPTIMIZERS if row.names]
    optimizers = {name: build._resolve(name, {}) for name in names}
    by_number = {name: (schedules.schedule_class(name), {}) for name in SCHEDULERS}
    parts = []
    for title, found in (
        ("Parameters of optimizers", optimizers),
        ("Parameters of schedules", by_number),
    ):
        rows = [f"- **`{name}`**: {_parameters(*of)}" for name, of in sorted(found.items())]
        parts.append(f"## {title}\n\n" + "\n".join(_wrapped(row) for row in rows))
    return "\n\n".join(parts)


def _parameters(cls: type, defaults: Mapping[str, object]) -> str:
    """Parameters of ``cls`` with their defaults, in place of which a configuration has
    ``defaults``.
    """
    found = [
        each.replace(default=defaults.get(each.name, each.default))
        for each in list(inspect.signature(cls).parameters.values())[1:]
    ]
    return ", ".join(
        f"`{each.name}`"
        + ("" if each.default is each.empty or each.default is None else f" = `{each.default}`")
        for each in found
    )


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 118, subsequent_indent="  ", break_on_hyphens=False))


def formatted(source: str) -> str:
    """``source`` as ruff writes it."""
    ruff = [sys.executable, "-m", "ruff"]
    name = ["--stdin-filename", "hf_zero/config/keywords.py", "-"]
    for command in (["format", "-q", *name], ["check", "-q", "--fix", *name]):
        done = subprocess.run(
            [*ruff, *command], input=source, text=True, capture_output=True, check=True, cwd=ROOT
        )
        source = done.stdout
    return source


def generated() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    from hf_zero.integrations import step_points

    docs = ROOT / "hf_zero/docs"
    step = (docs / "step.md").read_text()
    for name, table in {
        "points of routes": step_points.point_table(),
        "reads": step_points.access_table(writes=False),
        "writes": step_points.access_table(writes=True),
        "refusals": step_points.remedy_table(),
        "differences": step_points.difference_table(),
    }.items():
        step = filled(step, name, table)
    published = published_configurations.table(published_configurations.read(RESULTS))
    migrated = (docs / "from-deepspeed.md", docs / "from-fsdp.md")
    measured = docs / "benchmarks.md"
    return {
        **keys(),
        **cards.generated(),
        measured: filled(measured.read_text(), "comparison", comparison.table()),
        docs / "stages.md": filled((docs / "stages.md").read_text(), "stages", stages()),
        docs / "step.md": step,
        **{path: filled(path.read_text(), "published", published) for path in migrated},
        **{docs / "drawings" / f"stages-{scheme}.svg": drawing(scheme) for scheme in COLORS},
        **{
            docs / "drawings" / f"measured-{scheme}.svg": picture.drawing(colors)
            for scheme, colors in COLORS.items()
        },
        **recording.generated(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="name the files that differ, only")
    check = parser.parse_args().check
    wrong = [
        path for path, text in generated().items() if not path.exists() or path.read_text() != text
    ]
    for path in wrong:
        print(f"{path.relative_to(ROOT)} {'differs' if check else 'written'}")
        if not check:
            path.write_text(generated()[path])
    return 1 if wrong and check else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
