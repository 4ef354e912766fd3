"""Resource use of Triton kernels, found without a GPU: each kernel is compiled for sm_80, sm_90 and
sm_100, and its machine code is examined.

A family of kernels declares its `Case`s, one for each configuration it ships, in
``tests/kernels/gate/<family>.py`` as ``CASES``. Each must compile, fit into registers without
spilling more than it states and into shared memory, use the tensor cores where it multiplies
matrices and 16-byte loads where it streams, and reach the occupancy it states.

Triton compiles only where its interpreter is off, and that is decided when it is imported: tests
ask a process of their own (`measure`). Results are kept in the user's cache, by the hash of the
kernel's source (what it calls included), the case and Triton's version.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.helpers.commands import completed

ROOT = Path(__file__).resolve().parents[2]
GATE = ROOT / "tests" / "kernels" / "gate"
ARCHS = (80, 90, 100)
WORKERS = 2

SHARED_PER_BLOCK = {80: 166_912, 90: 232_448, 100: 232_448}
RESERVED_SHARED = 1024  # what the runtime takes of each block's
REGISTERS_PER_SM, WARPS_PER_SM, BLOCKS_PER_SM = 65_536, 64, 32
TENSOR_CORE = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}
INSTRUCTIONS = {
    "mma.sync": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "cp.async": r"\bcp\.async\.c[ag]\.shared\.global",
    "16-byte loads": r"\bld\.global\S*\.(?:v4\.(?:b32|u32|f32)|v2\.(?:b64|u64)|v8\.b32)"
    r"|\bcp\.async\.c[ag]\.shared\.global[^;]*, 0x10\b",
}


@dataclass(frozen=True)
class Case:
    """A kernel as it is launched: ``signature`` has the types of its arguments ("*bf16", "i32",
    "i64", "fp32"), ``aligned`` names those that are divisible by 16 (pointers: 16-byte aligned),
    ``min_occupancy`` is of the SM's 64 warps, ``max_spilled`` counts bytes that the ptxas of a
    supported release of Triton spills.

    ``streams`` asks for 16-byte loads; by default every kernel without ``dot`` does.
    """

    kernel: Any
    name: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    aligned: tuple[str, ...]
    num_warps: int
    num_stages: int
    dot: bool
    min_occupancy: float
    archs: tuple[int, ...] = ARCHS
    streams: bool | None = None
    max_spilled: int = 0

    @property
    def label(self) -> str:
        return f"{self.kernel.__name__} {self.name}".strip()

    def unnamed(self) -> str:
        """Return the error in the argument names of the case, or ""."""
        wanted, given = set(self.kernel.arg_names), {*self.signature, *self.constexprs}
        if wanted != given or set(self.signature) & set(self.constexprs):
            return (
                f"the kernel takes {sorted(wanted)}, the case has {sorted(self.signature)} and "
                f"as constants {sorted(self.constexprs)}"
            )
        strange = set(self.aligned) - set(self.signature)
        return f"aligned names {sorted(strange)}, which are no arguments" if strange else ""


@dataclass(frozen=True)
class Report:
    """The compilation result of one kernel. ``error`` holds the compiler's message if it failed."""

    label: str
    arch: int
    num_warps: int
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    serialized: bool = False
    traps: bool = False
    instructions: dict[str, int] = field(default_factory=dict)
    error: str = ""

    @property
    def blocks_per_sm(self) -> int:
        per_warp = -(-self.registers * 32 // 256) * 256
        whole = SHARED_PER_BLOCK[self.arch] + RESERVED_SHARED
        by_registers = REGISTERS_PER_SM // (max(per_warp, 1) * self.num_warps)
        return min(
            by_registers,
            whole // (self.shared + RESERVED_SHARED),
            WARPS_PER_SM // self.num_warps,
            BLOCKS_PER_SM,
        )

    @property
    def occupancy(self) -> float:
        return self.blocks_per_sm * self.num_warps / WARPS_PER_SM


def problems(case: Case, report: Report) -> list[str]:
    """Why ``case`` may not ship, in words; empty if it may."""
    if report.error:
        return [report.error]
    found, arch, most = [], report.arch, SHARED_PER_BLOCK[report.arch]
    if report.spilled > case.max_spilled:
        stated = f"where {case.max_spilled} are stated"
        found.append(f"{report.spilled} bytes of registers spill {stated}")
    if report.shared > most:
        has = f"a block of sm_{arch} has {most:,}"
        found.append(f"{report.shared:,} bytes of shared memory; {has}")
    elif report.traps:
        found.append("the compiler put a trap in its place")
    if report.serialized:
        found.append("wgmma instructions are serialized")
    if case.dot and not report.instructions[TENSOR_CORE[arch]]:
        found.append(f"no {TENSOR_CORE[arch]}: has {_used(report) or 'none'}")
    streams = not case.dot if case.streams is None else case.streams
    if streams and not report.instructions["16-byte loads"]:
        found.append("no 16-byte loads")
    if report.occupancy < case.min_occupancy:
        found.append(
            f"occupancy {report.occupancy:.2f} where {case.min_occupancy:.2f} is stated: "
            f"{report.registers} registers, {report.shared:,} bytes of shared memory, "
            f"{report.num_warps} warps, {report.blocks_per_sm} blocks on an SM"
        )
    return found


@functools.cache
def cases() -> dict[str, Case]:
    """Every case of every family, by its label."""
    found: dict[str, Case] = {}
    for path in sorted(GATE.glob("[!_]*.py")):
        for case in importlib.import_module(f"tests.kernels.gate.{path.stem}").CASES:
            if case.label in found:
                raise ValueError(
                    f"two cases are called {case.label!r}; the second is in {path.name}"
                )
            found[case.label] = case
    return found


def why_not() -> str:
    """Return the reason why nothing can be compiled here, or ""."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        for arch in ARCHS:
            get_ptxas(arch=arch)
    except (ImportError, RuntimeError) as error:
        return f"no ptxas: {type(error).__name__}: {error}"
    return ""


def measure(wanted: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Report]:
    """Compiles (label, architecture) pairs in a process without Triton's interpreter."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    own["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [own.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.helpers.aot_gate"]
    asked = json.dumps(sorted(wanted))
    done = completed(command, timeout=800, input=asked, env=own, cwd=ROOT)
    if done.returncode:
        said = done.stderr[-4000:]
        raise RuntimeError(f"the compiling process ended with {done.returncode}:\n{said}")
    reports = [Report(**each) for each in json.loads(done.stdout.splitlines()[-1])]
    return {(report.label, report.arch): report for report in reports}


def compile_all(wanted: Sequence[tuple[str, int]]) -> list[Report]:
    """Compile each (label, architecture), like `measure`, but in this process and its children."""
    cases()  # read before the children are forked
    with ProcessPoolExecutor(
        min(WORKERS, max(1, len(wanted))), mp_context=multiprocessing.get_context("fork")
    ) as pool:
        return list(pool.map(_compiled, *zip(*wanted))) if wanted else []


def _compiled(label: str, arch: int) -> Report:
    case = cases()[label]
    if wrong := case.unnamed():
        return Report(label, arch, case.num_warps, error=wrong)
    described = (
        *(case.kernel.cache_key, case.signature, case.constexprs, case.aligned),
        *(case.num_warps, case.num_stages, arch),
        *(version("triton"), Path(__file__).read_text()),
    )
    key = hashlib.sha256(repr(described).encode()).hexdigest()
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = root / "hf_zero" / "aot_gate" / f"{key}.json"
    if cache.is_file():
        return Report(**{**json.loads(cache.read_text()), "label": label})
    try:
        report = _inspect(case, arch)
    except Exception as error:  # whatever the compiler says is what the test reports
        said = f"does not compile: {type(error).__name__}: {str(error).strip()[-600:]}"
        return Report(label, arch, case.num_warps, error=said)
    cache.parent.mkdir(parents=True, exist_ok=True)
    fresh = cache.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps(asdict(report)))
    fresh.replace(cache)
    return report


def _inspect(case: Case, arch: int) -> Report:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    compiled = triton.compile(
        src=ASTSource(
            fn=case.kernel, signature=signature, constexprs=case.constexprs, attrs=attributes
        ),
        target=GPUTarget(backend="cuda", arch=arch, warp_size=32),
        options={
            "num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": True
        },
    )  # fmt: skip
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        target = f"--gpu-name=sm_{arch}a" if arch >= 90 else f"--gpu-name=sm_{arch}"
        command = [get_ptxas(arch=arch).path, "-v", target, str(source), "-o"]
        said = completed([*command, str(source.with_suffix(".cubin"))], check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    if registers is None or spills is None:
        raise RuntimeError(f"ptxas did not say what the kernel uses: {said}")
    return Report(
        case.label,
        arch,
        case.num_warps,
        registers=int(registers[1]),
        spilled=int(spills[1]) + int(spills[2]),
        shared=compiled.metadata.shared,
        serialized="serialized" in said,
        traps=re.search(r"\btrap;", ptx) is not None,
        instructions={name: len(re.findall(each, ptx)) for name, each in INSTRUCTIONS.items()},
    )


def _used(report: Report) -> str:
    return ", ".join(f"{count} {name}" for name, count in report.instructions.items() if count)


if __name__ == "__main__":
    # The module that the families import Case from is this one, not a second copy under the name
    # __main__.
    sys.modules["tests.helpers.aot_gate"] = sys.modules["__main__"]
    asked = [(label, arch) for label, arch in json.load(sys.stdin)]
    print(json.dumps([asdict(report) for report in compile_all(asked)]))
