"""The core of the package, decided by its purpose, which no import leaves.

The core trains a model of torch modules at stages 0 to 3 over a mesh: element-wise optimizers,
fp32, bf16 and fp16, clipping, accumulation, its own checkpoints, resume, errors. Whatever else the
package does stands outside and attaches itself. ``hf_zero/docs/decisions.md`` has the reasons for
the cut.
"""

from __future__ import annotations

import ast
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from tests.helpers import core_alone, house

PACKAGE = Path(__file__).resolve().parents[2] / "hf_zero"

# The modules of the core, by folder; "*": all of the folder but those after the dash.
CORE = {
    "": "__init__ engine errors initialize logging",
    "config": "__init__ dialects elasticity explaining feature_rows features files hjson kernels "
    "keys keywords offload optimizers reading refusals resolving sections settings sourced "
    "spelling value_types variables zero_config",
    "device": "* - free_memory",
    "distributed": "* - attempts fake_world hang_proofs host_heartbeats host_transfers "
    "job_detection rank_status recovery stage_messages state_rows store_rate torchrun two_hops "
    "watchdog",
    "zero": "*",
    "zero.access": "* - local weight_stream",
    "zero.gather": "*",
    "zero.layout": "* - attributes meta_run",
    "zero.reduce": "*",
    "zero.step": "* - captured_step preemption",
    "optim": "__init__ adam adoption bound_optimizer build device_state elementwise existing_state "
    "group_member group_scalars group_settings initial_state members moment_formats "
    "offloaded_segments optimizer_state own_step probing segment_entries segment_table segments "
    "snapshots state_by_member state_dicts step_launch whole_tensor whole_tensor_state",
    "offload": "__init__ placement storage unit_updates",
    "ops": "__init__ coded_arrays dispatch flat_tiles host_memory native updates",
    "setup": "__init__ plan plan_inputs request steps training_loader",
    "checkpoint": "__init__ background_saves commit copy_ranges failures file_writer find "
    "generations load_sharded manifest manifest_reading match match_schedule model_entries "
    "object_store parameter_names progress random_generators reader resume retention run_state "
    "save_job save_plan save_sharded script_state staging storage tensorfile",
}  # fmt: skip

# Packages whose own files name, for type checkers, what users import, in the core or not; and the
# generated module that names, for type checkers, what users pass.
DOORS = ("hf_zero", "hf_zero.checkpoint", "hf_zero.optim", "hf_zero.config.keywords")

# At most: lines of code of the core, and of the package.
LINES, ALL_LINES = 30_000, 93_800


def is_core(module: str) -> bool:
    folder, _, name = module.removeprefix("hf_zero").removeprefix(".").rpartition(".")
    if f"{folder}.{name}".strip(".") in CORE:
        folder, name = f"{folder}.{name}".strip("."), "__init__"
    included, _, excluded = CORE.get(folder, "").partition(" - ")
    if included == "*":
        return name not in excluded.split()
    return (name or "__init__") in included.split()


def lines_of_code(text: str) -> int:
    """The lines of ``text`` that are neither empty, nor comments, nor docstrings."""
    prose = {
        line
        for node in ast.walk(house.parsed(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    return sum(
        bool(re.match(r"\s*[^\s#]", line)) and number not in prose
        for number, line in enumerate(text.split("\n"), 1)
    )


SOURCES = house.sources(PACKAGE)
# what a save writes into its folder
SCRIPTS = ("checkpoint/zero_to_fp32.py",)


def core_in(folder: Path) -> Path:
    """Return a copy in ``folder`` of the modules of the core alone, with tables without rows of
    what is outside of it.
    """
    copied = [PACKAGE / script for script in SCRIPTS]
    modules = {path: house.module_name(path, PACKAGE.parent) for path in PACKAGE.rglob("*.py")}
    copied += [path for path, module in modules.items() if is_core(module)]
    copied += [path for suffix in ("toml", "json") for path in PACKAGE.rglob(f"*.{suffix}")]
    for path in copied:
        target = folder / path.relative_to(PACKAGE.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    shutil.copy(PACKAGE.parent / "VERSION", folder)
    (folder / "hf_zero/config/features.toml").write_text("")
    optimizers = folder / "hf_zero/config/optimizers.toml"
    rows = re.split(r"(?m)^(?=\[)", optimizers.read_text())
    optimizers.write_text("".join(row for row in rows if not _is_outside(row)))
    return folder


def _is_outside(row: str) -> bool:
    """Return whether ``row`` of the optimizers is that of a class outside of the core."""
    module = re.match(r'\["(hf_zero\.[\w.]*):', row)
    return module is not None and not is_core(module[1])


def test_the_core_is_there() -> None:
    modules = {module for module in SOURCES if is_core(module)}
    named = {
        ".".join(filter(None, ("hf_zero", folder, name.removeprefix("__init__"))))
        for folder, names in CORE.items()
        for name in names.replace("*", "").replace(" - ", " ").split()
        if name != "-"
    }
    assert named <= set(SOURCES), sorted(named - set(SOURCES))
    assert "hf_zero.zero.gather.unit" in modules and "hf_zero.engine" in modules
    assert "hf_zero.techniques.layer_drop" not in modules and "hf_zero.cli.app" not in modules


def test_no_import_leaves_the_core() -> None:
    leaving = {
        (module, target)
        for module, targets in house.graph(SOURCES, everywhere=True).items()
        if is_core(module) and module not in DOORS
        for target in targets
        if not is_core(target)
    }
    assert not leaving, f"the core imports what is outside of it: {sorted(leaving)}"


def test_the_core_alone_trains_saves_and_resumes(tmp_path: Path) -> None:
    core = core_in(tmp_path / "core")
    shutil.copy(core_alone.__file__, core / "training.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "training.py", port, str(tmp_path)], cwd=core, capture_output=True,
        text=True, timeout=300,
        env={"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": str(core), "OMP_NUM_THREADS": "1",
             "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_lines_of_code() -> None:
    lines = {module: lines_of_code(text) for module, (text, _) in SOURCES.items()}
    core = sum(count for module, count in lines.items() if is_core(module))
    assert (core <= LINES, sum(lines.values()) <= ALL_LINES) == (True, True), (
        f"{core} lines of code in the core, {sum(lines.values())} in all"
    )


def test_what_a_line_of_code_is() -> None:
    assert (
        lines_of_code(
            '"""Doc."""\n\nimport a  # b\n# c\n\ndef f():\n    """D.\n\n    """\n    g()\n'
        )
        == 3
    )
