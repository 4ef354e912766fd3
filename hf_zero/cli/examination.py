"""The findings of ``hf-zero doctor``: installed versions, active features, and the reasons for
inactive ones.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlparse
from urllib.request import url2pathname

from hf_zero.config.variables import faults, is_off

Status = Literal["ok", "off", "broken"]
COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Finding:
    """One line of the report. Status "off" is a choice or a missing option, "broken" prevents
    hf-zero from working.
    """

    part: str
    name: str
    status: Status
    detail: str


def examine(probe: bool = False) -> list[Finding]:
    """Return all findings; ``probe``: of probes of releases that tests have run with, too."""
    findings = [*_findings_of(_versions), *_findings_of(_libraries, probe)]
    for part in (_environment, _devices, _slot, _kernels):
        findings += _findings_of(part)
    return findings


def _ok(name: str, detail: str) -> Finding:
    return Finding("", name, "ok", detail)


def _off(name: str, detail: str) -> Finding:
    return Finding("", name, "off", detail)


def _broken(name: str, detail: str) -> Finding:
    return Finding("", name, "broken", detail)


def _findings_of(part: Callable[..., Iterator[Finding]], *arguments: object) -> Iterator[Finding]:
    """Yield the findings of ``part`` under its name. An error in it becomes a finding too, so that
    the other parts are still reported.
    """
    name = part.__name__.lstrip("_")
    try:
        for finding in part(*arguments):
            yield replace(finding, part=name)
    except Exception as error:
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        why = f"ended early: {type(error).__name__}: {reason}"
        yield Finding(name, "examination", "broken", why)


def _own_version(imported: Path) -> Finding:
    """Return the finding for the package in the folder ``imported``: its version is known where it
    is the installed one.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    import hf_zero

    version = f"{hf_zero.__version__}{_commit(imported.parent)}"
    try:
        dist = distribution("hf-zero")
    except PackageNotFoundError:
        return _ok("hf-zero", f"{version}, a tree of sources at {imported}")
    origin = json.loads(dist.read_text("direct_url.json") or "{}")
    editable = origin.get("dir_info", {}).get("editable", False)
    root = url2pathname(urlparse(origin["url"]).path) if editable else dist.locate_file("")
    installed = Path(str(root), "hf_zero").resolve()
    if installed == imported:
        return _ok("hf-zero", f"{version} at {imported}")
    return _off(
        "hf-zero",
        f"{version}, imported from {imported}, but installed is {dist.version} at {installed}: "
        "PYTHONPATH or the working folder comes first; leave it, or pip install that folder",
    )


def _commit(folder: Path) -> str:
    """Return the commit of a checkout in ``folder``, in brackets; empty if it is none."""
    if not (folder / ".git").exists() or (git := shutil.which("git")) is None:
        return ""
    command = [git, "-C", str(folder), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return ""
    return f" (commit {done.stdout.strip()})" if done.returncode == 0 else ""


def _versions() -> Iterator[Finding]:
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement

    import hf_zero

    yield _ok("python", f"{sys.version.split()[0]} at {sys.executable}")
    yield _own_version(Path(hf_zero.__file__).resolve().parent)
    try:
        needed = [Requirement(line) for line in requires("hf-zero") or ()]
    except PackageNotFoundError:
        yield _off(
            "requirements",
            "hf-zero is imported from a folder and not installed, so they are not "
            "known; pip install it",
        )
        return
    for r in (r for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})):
        try:
            installed = version(r.name)
        except PackageNotFoundError:
            yield _broken(r.name, f"not installed; pip install '{r}'")
            continue
        if r.specifier.contains(installed, prereleases=True):
            if r.name == "torch":
                import torch

                installed = torch.__version__  # names the build, too
            yield _ok(r.name, installed)
        else:
            yield _broken(
                r.name, f"{installed}, but hf-zero needs {r.specifier}; pip install '{r}'"
            )


def _libraries(probe: bool = False) -> Iterator[Finding]:
    from importlib.metadata import PackageNotFoundError, version

    from hf_zero.integrations import seams

    for library in seams.RELEASES:
        try:
            release = version(library)
        except PackageNotFoundError:
            continue
        standing = seams.standing(library, release)
        if standing == "tested" and not probe and not seams.lacking(library, release):
            yield _ok(library, f"{release}: tested")
            continue
        yield from _probed(library, release, standing)


def _probed(library: str, release: str, standing: str) -> Iterator[Finding]:
    from hf_zero.integrations.probes import failed_probes

    parts: dict[str, list[str]] = {}
    for probe, reason in failed_probes(library):
        remedy = f"; {library}>={probe.since} has it" if probe.since else ""
        parts.setdefault(f"{reason}{remedy}", []).append(probe.part)
    for reason, off in parts.items():  # one missing name may switch off twenty parts
        more = f" and {len(off) - 1} more are" if len(off) > 1 else " is"
        yield _off(library, f"{release} ({standing}): {off[0]}{more} off: {reason}")
    if not parts:
        joined = "and" if standing == "tested" else "but"
        yield _ok(library, f"{release}: {standing}, {joined} all probes hold")


def _environment() -> Iterator[Finding]:
    for name, fault in faults(os.environ):
        yield _off(name, fault)


def _devices() -> Iterator[Finding]:
    import psutil
    import torch

    from hf_zero.device import kinds

    cores, memory = len(psutil.Process().cpu_affinity()), psutil.virtual_memory()
    yield _ok(
        "cpu", f"{cores} cores, {memory.total / 1e9:.0f} GB, {memory.available / 1e9:.0f} GB free"
    )
    kind = kinds.accelerator()
    if kind is not None:
        for index in range(kinds.device_count()):
            properties = kinds.properties(torch.device(kind, index))
            yield _ok(
                f"{kind}:{index}", f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
            )
    else:
        why = "no driver or no visible GPU"
        if torch.accelerator.current_accelerator() is None:
            why = "this build of torch supports only CPUs"
        yield _off("accelerator", f"{why}; training runs on CPU ranks")
    for name, available, use in (
        ("gloo", torch.distributed.is_gloo_available(), "CPU ranks"),
        ("nccl", torch.distributed.is_nccl_available(), "GPU ranks"),
    ):
        yield (_ok if available else _off)(
            name, f"for {use}" if available else f"this torch is built without it: no {use}"
        )


def _slot() -> Iterator[Finding]:
    from importlib.metadata import entry_points

    from hf_zero import _autoload

    registered = any(
        point.value == "hf_zero._autoload:register"
        for point in entry_points(group="torch.backends")
    )
    yield (
        _ok("entry point", "torch.backends: runs at every `import torch`")
        if registered
        else _broken(
            "entry point",
            "not in torch.backends: the installation is incomplete; pip install hf-zero again",
        )
    )
    pth = next(
        (path for path in sys.path if os.path.isfile(os.path.join(path, "hf_zero.pth"))), None
    )
    yield (
        _ok(".pth", f"in {pth}: `import deepspeed` works before torch is imported")
        if pth
        else _off(
            ".pth", "an editable install has none: `import deepspeed` works once torch is imported"
        )
    )
    for variable, off in (
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "torch runs no entry points"),
        ("HF_ZERO_AUTOLOAD", "hf-zero does not register"),
    ):
        value, disabled = os.environ.get(variable), is_off(variable)
        yield (_off if disabled else _ok)(
            variable, f"{value}: {off}; unset it" if disabled else value or "unset: on"
        )
    if _autoload.failure is not None:
        yield _broken("autoload", f"{type(_autoload.failure).__name__}: {_autoload.failure}")
        return
    yield _owner_of_deepspeed()


def _owner_of_deepspeed() -> Finding:
    from importlib.util import find_spec

    import torch  # noqa: F401  (its import registers the facade in a real process)

    from hf_zero.deepspeed import facade
    from hf_zero.integrations import finder

    spec = find_spec(facade.NAME)
    if spec is None:
        return _off(
            "deepspeed",
            "nothing answers `import deepspeed`: Accelerate and the Trainer cannot "
            "shard; see the lines above",
        )
    if finder.chosen():
        return _ok("deepspeed", f"hf-zero's facade, as {facade.VERSION}")
    return _off(
        "deepspeed",
        f"an installed DeepSpeed answers ({spec.origin}); HF_ZERO_BACKEND=hf_zero chooses ours",
    )


def _kernels() -> Iterator[Finding]:
    compiler = next((path for path in map(shutil.which, COMPILERS) if path), None)
    yield (_ok if compiler else _off)(
        "C++ compiler",
        compiler or f"none of {', '.join(COMPILERS)} on PATH; hf-zero does not need one",
    )
    yield from _native_core()
    yield from _transfers()
    yield _triton()
    yield from _gpu_kernels()


def _triton() -> Finding:
    from importlib.metadata import PackageNotFoundError, version

    from hf_zero.ops import dispatch

    if not dispatch.installed():
        return _off(
            "triton",
            "not installed: kernels run their references in plain torch; pip install triton",
        )
    try:
        import triton
    except Exception as error:
        return _broken("triton", f"cannot be imported: {type(error).__name__}: {error}")
    try:
        installed = version("triton")
    except PackageNotFoundError:  # installed under another name
        installed = triton.__version__
    if dispatch.interpreted():
        return _off(
            "triton",
            f"{installed}, in its interpreter (TRITON_INTERPRET=1): for tests, slow; unset it",
        )
    return _ok("triton", installed)


def _why_no_triton(kind: str | None) -> str:
    """Return why Triton runs no kernel on an accelerator of ``kind``, or ""."""
    from hf_zero.device import kinds
    from hf_zero.ops import dispatch

    if is_off("HF_ZERO_TRITON"):
        return f"HF_ZERO_TRITON={os.environ['HF_ZERO_TRITON']}; unset it"
    if kind is None or not kinds.runs_triton(kind):
        return "no GPU"
    if not dispatch.installed():
        return "no triton"
    if dispatch.interpreted():
        return "TRITON_INTERPRET=1; unset it"
    if missing := dispatch.missing_driver():
        return f"Triton finds no driver ({missing}); it needs the driver's libcuda and a C compiler"
    return ""


def _gpu_kernels() -> Iterator[Finding]:
    import torch

    from hf_zero.device import kinds
    from hf_zero.ops import dispatch

    kernels, kind = dispatch.declared(), kinds.accelerator()
    why_not = _why_no_triton(kind)
    if why_not or kind is None:
        yield _off("GPU kernels", f"{len(kernels)} kernels run their references: {why_not}")
        return
    device = torch.device(kind, kinds.current_index(kind))
    for name, kernel in sorted(kernels.items()):
        wrong = dispatch.try_out(kernel, device)
        yield (
            _broken(
                name, f"{wrong}; its reference runs in its place, or HF_ZERO_TRITON=0 makes all do"
            )
            if wrong
            else _ok(name, "runs, and agrees with its reference")
        )


def _transfers() -> Iterator[Finding]:
    from hf_zero.errors import ConfigError
    from hf_zero.ops.files import FileQueue

    try:
        queue = FileQueue()
    except ConfigError as error:
        yield _broken("file transfers", str(error))
        return
    refused = (
        f"; the kernel refuses io_uring ({queue.backend.refusal})" if queue.backend.refusal else ""
    )
    yield (_off if refused or queue.kind == "python" else _ok)(
        "file transfers", f"by {queue.kind}{refused}"
    )
    queue.close()


def _native_core() -> Iterator[Finding]:
    from hf_zero.errors import ConfigError
    from hf_zero.ops import native

    try:
        available = native.available()
    except ConfigError as error:
        yield _broken("native core", str(error))
        return
    if not available:
        yield _off("native core", f"{native.why_not()}; the torch reference runs in its place")
        return
    yield _ok("native core", "built: optimizers, norms and casts on the CPU")
    yield _ok(
        "instruction set",
        f"{native.instruction_set()}; this machine has {', '.join(native.instruction_sets())}",
    )
    yield _ok("threads", f"{native.threads()}: {native.default_share().source}")
