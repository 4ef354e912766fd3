"""``hf-zero doctor``: what it finds on this machine, and why a part does not run."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hf_zero
from hf_zero.cli import examination
from hf_zero.cli.app import app
from hf_zero.integrations import probes, seams
from hf_zero.ops import dispatch, native
from tests.helpers.accelerators import play_accelerator
from tests.helpers.commands import completed


def named(part: Callable[[], Iterator[examination.Finding]]) -> dict[str, examination.Finding]:
    """The findings of one part, by name."""
    return {each.name: each for each in examination._findings_of(part)}


def kernels() -> dict[str, examination.Finding]:
    return named(examination._kernels)


def test_the_command_knows_the_slot_the_devices_and_the_native_core() -> None:
    shown = CliRunner().invoke(app, ["doctor", "--probe", "--json"])
    found = {(row["part"], row["name"]): row for row in json.loads(shown.stdout)}
    assert found["versions", "torch"]["detail"] == torch.__version__
    for library in ("torch", "transformers", "accelerate"):
        assert found["libraries", library]["detail"].endswith(": tested, and all probes hold")
    for name in (("slot", "deepspeed"), ("slot", "entry point"), ("devices", "gloo")):
        assert found[name]["status"] == "ok"
    if torch.cuda.is_available():
        assert found["devices", "cuda:0"]["status"] == "ok"
    else:
        assert found["devices", "accelerator"]["status"] == "off"
    core = found["kernels", "native core"]
    if native.available():
        assert core["status"] == "ok"
        detail = found["kernels", "instruction set"]["detail"]
        assert detail.startswith(f"{native.instruction_set()}; this machine has ")
        threads = f"{native.threads()}: {native.default_share().source}"
        assert found["kernels", "threads"]["detail"] == threads
    else:
        assert core["status"] == "off" and native.why_not() in core["detail"]


def test_the_command_for_people_goes_on_where_a_part_cannot_be_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> Any:
        raise RuntimeError("the driver is gone\nand more")

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(dispatch, "declared", fails)
    found = CliRunner().invoke(app, ["doctor"])
    assert found.exit_code == 1
    assert "hf-zero doctor" in found.stdout and "When you open an issue, attach" in found.stdout
    assert "ended early: RuntimeError: the driver is gone" in found.stdout
    assert "hf-zero parity" not in found.stdout  # first it has to work
    # before it, and of other parts
    assert "entry point" in found.stdout and "C++ compiler" in found.stdout


def test_a_library_is_tested_or_newer_or_a_part_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> None:
        raise AttributeError("the cache is gone")

    def release(name: str) -> str:
        if name == "peft":
            raise importlib.metadata.PackageNotFoundError(name)
        return {"torch": "2.13.0+cpu", "trl": "0.9"}.get(name, "7.1.dev0")

    monkeypatch.setattr(importlib.metadata, "version", release)
    tested = dict.fromkeys(("torch", "transformers", "accelerate", "trl", "peft"), ">=2.11,<2.14")
    monkeypatch.setattr(seams, "RELEASES", tested)
    rows = (
        ("torch", "not tried", breaks),
        ("transformers", "slow masks", lambda: None),
        ("accelerate", "the slot", breaks),
    )
    monkeypatch.setattr(probes, "PROBES", tuple(probes.Probe(*row) for row in rows))
    found = named(examination._libraries)
    outside = "than tested (<2.14,>=2.11)"
    assert {name: (each.status, each.detail) for name, each in found.items()} == {
        "torch": ("ok", "2.13.0+cpu: tested"),
        "transformers": ("ok", f"7.1.dev0: newer {outside}, but all probes hold"),
        "accelerate": (
            "off",
            f"7.1.dev0 (newer {outside}): the slot is off: AttributeError: the cache is gone",
        ),
        "trl": ("ok", f"0.9: older {outside}, but all probes hold"),
    }
    off = f"{release('torch')} (tested): not tried is off: AttributeError: the cache is gone"
    assert next(examination._libraries(probe=True)).detail == off


def test_both_folders_are_named_where_another_package_is_installed(tmp_path: Path) -> None:
    found = examination._own_version(tmp_path / "hf_zero")
    assert found.status == "off"
    assert re.search(
        rf", imported from {tmp_path}/hf_zero, but installed is \S+ at /", found.detail
    )
    installed = Path(re.findall(r" at (\S+): ", found.detail)[0])
    assert examination._own_version(installed).status == "ok"


def test_a_checkout_has_its_commit_beside_the_version(tmp_path: Path) -> None:
    assert examination._commit(tmp_path) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a"]
    completed([*git, "init", "--quiet"], check=True)
    assert examination._commit(tmp_path) == "", "no commit yet"
    (tmp_path / "file").write_text("a")
    completed([*git, "add", "file"], check=True)
    completed([*git, "commit", "--quiet", "--message", "first"], check=True)
    completed([*git, "tag", "v1"], check=True)
    assert re.fullmatch(r" \(commit [0-9a-f]{7,}\)", examination._commit(tmp_path))
    (tmp_path / "file").write_text("b")
    assert examination._commit(tmp_path).endswith("-dirty)")
    found = examination._own_version(tmp_path / "hf_zero")
    version = f"{hf_zero.__version__}{examination._commit(tmp_path)}"
    assert found.detail.startswith(f"{version}, imported")


def test_what_turns_the_slot_off(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "HF_ZERO_AUTOLOAD")
    for name, value in zip(variables, ("0", "off")):
        monkeypatch.setenv(name, value)
    found = named(examination._slot)
    assert {found[name].status for name in variables} == {"off"}
    monkeypatch.setattr("hf_zero._autoload.failure", ImportError("half an installation"))
    found = named(examination._slot)
    assert [*found.values()][-1].detail == "ImportError: half an installation"
    assert "examination" not in found


def test_what_moves_files_and_why_the_native_core_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, status in (("python", "off"), ("pigeons", "broken")):
        monkeypatch.setenv("HF_ZERO_IO", name)
        found = kernels()["file transfers"]
        assert found.status == status and name in found.detail

    def core() -> examination.Finding:
        native._loaded.cache_clear()
        return kernels()["native core"]

    try:
        monkeypatch.setenv("HF_ZERO_NATIVE", "0")
        assert core().status == "off"
        said = "HF_ZERO_NATIVE=0 switches it off; the torch reference runs in its place"
        assert core().detail == said
        monkeypatch.setenv("HF_ZERO_NATIVE", "1")
        monkeypatch.setitem(sys.modules, "hf_zero._cpu", None)
        assert "install hf-zero again where a C++17 compiler is on PATH" in core().detail
        needless = lambda: pytest.fail("not needed without a core")  # noqa: E731
        monkeypatch.setattr(native, "share_of_this_rank", needless)
        plain = SimpleNamespace(instruction_sets=lambda: ["plain"])
        monkeypatch.setitem(sys.modules, "hf_zero._cpu", plain)
        monkeypatch.setenv("HF_ZERO_ISA", "mmx")
        assert core().status == "broken" and "this machine has plain" in core().detail
    finally:
        monkeypatch.undo()
        native._loaded.cache_clear()


def test_why_gpu_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    play_accelerator(monkeypatch, count=0)
    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    count = len(dispatch.declared())
    assert count
    assert kernels()["GPU kernels"].detail == f"{count} kernels run their references: no GPU"
    monkeypatch.setenv("HF_ZERO_TRITON", "0")
    found = kernels()["GPU kernels"]
    assert found.detail.endswith("HF_ZERO_TRITON=0; unset it") and found.status == "off"
    monkeypatch.delenv("HF_ZERO_TRITON")
    stand_in = ModuleType("triton")
    stand_in.__version__ = "3.99"
    monkeypatch.setitem(sys.modules, "triton", stand_in)
    monkeypatch.setattr(dispatch, "installed", lambda: True)
    monkeypatch.setattr(dispatch, "interpreted", lambda: True)
    triton = kernels()["triton"]
    assert triton.status == "off" and "unset it" in triton.detail
    monkeypatch.setattr(dispatch, "interpreted", lambda: False)
    assert kernels()["triton"].status == "ok"
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert examination._triton().detail == "3.99"
    monkeypatch.setitem(sys.modules, "triton", None)
    triton = kernels()["triton"]
    assert triton.status == "broken"
    assert "cannot be imported: ModuleNotFoundError" in triton.detail
    monkeypatch.setattr(dispatch, "installed", lambda: False)
    triton = kernels()["triton"]
    assert triton.status == "off" and "pip install triton" in triton.detail


def test_each_kernel_is_tried_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_out(kernel: str, device: torch.device) -> str:
        return "PTXASError: no" if (kernel, device.type) == ("b", "cuda") else ""

    play_accelerator(monkeypatch)
    monkeypatch.delenv("HF_ZERO_TRITON", raising=False)
    played = {"installed": True, "interpreted": False, "missing_driver": ""}
    for name, value in played.items():
        monkeypatch.setattr(dispatch, name, lambda value=value: value)
    monkeypatch.setattr(dispatch, "declared", lambda: {"b": "b", "a": "a"})
    monkeypatch.setattr(dispatch, "try_out", try_out)
    found = list(examination._gpu_kernels())
    assert [(each.name, each.status) for each in found] == [("a", "ok"), ("b", "broken")]
    assert found[1].detail.startswith("PTXASError: no; its reference runs in its place")
    said = "AssertionError: libcuda.so cannot found!"
    monkeypatch.setattr(dispatch, "missing_driver", lambda: said)
    (only,) = examination._gpu_kernels()
    assert only.status == "off"
    assert f"Triton finds no driver ({said}); it needs" in only.detail


def test_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ["no-such-package>=1", "torch>=99", "peft>=99; extra == 'test'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: missing)
    found = named(examination._versions)
    assert found["no-such-package"].detail == "not installed; pip install 'no-such-package>=1'"
    assert found["torch"].status == "broken" and ">=99" in found["torch"].detail
    assert "peft" not in found

    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.requires", requires)
    found = named(examination._versions)
    requirements = found["requirements"]
    assert requirements.status == "off" and "examination" not in found
    assert "imported from a folder and not installed" in requirements.detail
