"""``flops_profiler``: the floating-point operations of a model's forward, counted by
torch.utils.flop_counter: those of matrix products, convolutions and attention, also in this
package's operators; the profile of the step that the section names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from hf_zero.config.measures import FlopsProfilerSection
from hf_zero.distributed.process_group import default_device
from hf_zero.errors import ConfigError
from hf_zero.measures.flop_formulas import formulas
from hf_zero.measures.stopwatch import Stopwatch

if TYPE_CHECKING:
    from hf_zero.zero.training_engine import TrainingEngine

DEFAULT_PRECISION = 2
UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(
    num: float, units: str | None = None, precision: int = DEFAULT_PRECISION
) -> str:
    """Return ``num`` in ``units`` (None: those that fit), such as "1.5 G"."""
    if units is None:
        units = next((unit for unit, size in UNITS.items() if abs(num) >= size), "u") if num else ""
    return f"{round(num / UNITS.get(units, 1.0), precision):g} {units}"


def flops_to_string(
    flops: float, units: str | None = None, precision: int = DEFAULT_PRECISION
) -> str:
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(
    macs: float, units: str | None = None, precision: int = DEFAULT_PRECISION
) -> str:
    return f"{number_to_string(macs, units, precision)}MACs"


def params_to_string(
    params_num: float, units: str | None = None, precision: int = DEFAULT_PRECISION
) -> str:
    """Return :func:`number_to_string`'s text, with "B" for 10^9."""
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def duration_to_string(
    duration: float, units: str | None = None, precision: int = DEFAULT_PRECISION
) -> str:
    return f"{number_to_string(duration, units, precision)}s"


def depth_of(module: str) -> int:
    """Return the number of modules that contain the one with this name."""
    return module.count(".") + 1 if module else 0


class FlopsProfiler:
    """Count the operations of ``model`` between :meth:`start_profile` and :meth:`stop_profile`, and
    measure the seconds of its forwards; the host waits for the device when they are read.
    """

    def __init__(
        self,
        model: nn.Module,
        ds_engine: TrainingEngine | None = None,
        recompute_fwd_factor: float = 0.0,
    ) -> None:
        self.model, self.ds_engine = model, ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self.flops = self.macs = self.params = 0
        self._counter: FlopCounterMode | None = None
        self._by_module: Mapping[str, Mapping[object, int]] = {}
        self._hooks: list[RemovableHandle] = []
        self._begun: list[Stopwatch] = []  # a forward that raises ends none
        self._forwards: list[Stopwatch] = []
        self._ignored: tuple[type, ...] = ()

    def start_profile(self, ignore_list: Iterable[type] | None = None) -> None:
        """Start counting; ``ignore_list``: classes of modules to leave out."""
        self.end_profile()
        self.reset_profile()
        self._ignored = tuple(ignore_list or ())
        self._counter = FlopCounterMode(display=False, custom_mapping={**formulas()})
        self._counter.__enter__()
        self._hooks = [
            self.model.register_forward_pre_hook(self._begin),
            self.model.register_forward_hook(self._end),
        ]
        self.started = True

    def _begin(self, module: nn.Module, args: object) -> None:
        self._begun.append(Stopwatch(default_device()).__enter__())

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        self._forwards.append(self._begun.pop())
        self._forwards[-1].__exit__()

    def stop_profile(self) -> None:
        """Stop counting; the counts stay available."""
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
            self._by_module = counter.get_flop_counts()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def end_profile(self) -> None:
        """Stop counting and end the profile; nothing is printed afterwards."""
        self.stop_profile()
        self.started = False

    def reset_profile(self) -> None:
        """Reset the counts to zero."""
        self._by_module, self._begun, self._forwards = {}, [], []

    def _counts(self) -> dict[str, int]:
        """Return operations by the name of a module, "" for the model itself."""
        counted = self._by_module if self._counter is None else self._counter.get_flop_counts()
        root = type(self.model).__name__
        by_module = {name: sum(ops.values()) for name, ops in counted.items()}
        counts = {"": by_module.get("Global", 0)}
        ignored: list[str] = []  # the outermost ones, whose counts include those of their modules
        for name, module in self.model.named_modules():
            count = by_module.get(f"{root}.{name}", 0)
            if not name or not count or any(name.startswith(f"{other}.") for other in ignored):
                continue
            counts[name] = count
            if isinstance(module, self._ignored):
                ignored.append(name)
                parents = name.split(".")[:-1]
                for depth in range(len(parents) + 1):
                    parent = ".".join(parents[:depth])
                    if parent in counts:  # a ModuleList has no forward that was counted
                        counts[parent] -= count
                counts[name] = 0
        return counts

    def get_total_flops(self, as_string: bool = False) -> Any:
        """Return the floating-point operations; a multiplication and an addition count as two."""
        flops = self._counts()[""]
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Return the multiply-accumulate operations."""
        macs = self._counts()[""] // 2
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Return the seconds of the forwards that have returned."""
        seconds = 1e-3 * sum(watch.read() for watch in self._forwards)
        return duration_to_string(seconds) if as_string else seconds

    def get_total_params(self, as_string: bool = False) -> Any:
        """Return the number of elements of the model's parameters."""
        params = sum(parameter.numel() for parameter in self.model.parameters())
        return params_to_string(params) if as_string else params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print a summary, or write it to ``output_file``. ``detailed`` adds the ``top_modules``
        classes with the most operations at each depth, and the operations of each module, down to
        ``module_depth`` (-1: all). Prints nothing before :meth:`start_profile`.
        """
        if not self.started:
            return
        counts = self._counts()
        self.flops, self.macs = self.get_total_flops(), self.get_total_macs()
        self.params = self.get_total_params()
        seconds = self.get_total_duration()
        rows = [*self._of_engine(), ("params per GPU", params_to_string(self.params))]
        rows += [
            ("fwd MACs per GPU", macs_to_string(self.macs)),
            ("fwd flops per GPU", number_to_string(self.flops)),
            ("fwd latency", duration_to_string(seconds)),
        ]
        if seconds:
            speed = flops_to_string(self.flops / seconds)
            rows.append(("fwd FLOPS per GPU = fwd flops per GPU / fwd latency", speed))
        text = f"Profile Summary at step {profile_step}:\n"
        text += "".join(f"{name + ': ':<70}  {value}\n" for name, value in rows)
        if not detailed:
            counts = {}
        elif module_depth >= 0:
            counts = {name: n for name, n in counts.items() if depth_of(name) <= module_depth}
        for depth, classes in self._by_class(counts).items():
            largest = ", ".join(
                f"{name} {number_to_string(flops)}flops"
                for name, flops in classes.most_common(top_modules)
            )
            text += f"depth {depth}: {largest}\n" if largest else ""
        for name, flops in counts.items():
            label = name.rpartition(".")[2] or type(self.model).__name__
            share = 100 * flops / self.flops if self.flops else 0
            indent = "  " * depth_of(name)
            text += f"{indent}{label}: {number_to_string(flops)}flops, {share:.1f}%\n"
        if output_file:
            Path(output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(output_file).write_text(text)
        else:
            print(text)

    def _by_class(self, counts: Mapping[str, int]) -> dict[int, Counter[str]]:
        """Return operations by depth and class of module."""
        modules = dict(self.model.named_modules())
        by_depth: dict[int, Counter[str]] = {}
        for name, flops in counts.items():
            kind = type(modules[name]).__name__
            by_depth.setdefault(depth_of(name), Counter())[kind] += flops
        return by_depth

    def _of_engine(self) -> list[tuple[str, object]]:
        engine = self.ds_engine
        if engine is None:
            return []
        ranks = getattr(engine, "dp_world_size", None)
        if ranks is None:
            ranks = getattr(engine, "seq_dp_world_size", None) or engine.data_ranks
        return [
            ("world size", engine.world_size),
            ("data parallel size", ranks),
            ("model parallel size", getattr(engine, "mp_world_size", 1)),
            ("batch size per GPU", engine.train_micro_batch_size_per_gpu()),
        ]


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[object] | torch.Tensor = (),
    kwargs: Mapping[str, object] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type] | None = None,
    mode: str = "forward",
) -> tuple[object, object, object]:
    """Return operations, multiply-accumulates and parameters of one call of ``model``, as strings
    or as numbers: of its forward, or of ``generate`` by ``mode``. It is called with a tensor of
    ``input_shape``, or with ``args`` and ``kwargs``, and stays in eval mode.

    Raises ConfigError for another mode, for a model without ``generate`` in that mode, and without
    inputs to call it with.
    """
    if mode not in ("forward", "generate"):
        raise ConfigError(f"mode {mode!r} is neither 'forward' nor 'generate'; write one of them")
    call = model if mode == "forward" else getattr(model, "generate", None)
    if call is None:
        raise ConfigError(f"{type(model).__name__} has no generate(); write mode='forward'")
    if isinstance(args, torch.Tensor):
        args = [args]
    if input_shape is not None:
        like = next(model.parameters(), torch.empty(()))
        args = [torch.ones(input_shape, dtype=like.dtype, device=like.device)]
    if not args and not kwargs:
        raise ConfigError("get_model_profile needs input_shape, args or kwargs to call the model")
    model.eval()
    profiler = FlopsProfiler(model)
    for _ in range(warm_up):
        call(*args, **(kwargs or {}))  # type: ignore[operator]
    profiler.start_profile(ignore_modules)
    try:
        call(*args, **(kwargs or {}))  # type: ignore[operator]
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
        return (
            profiler.get_total_flops(as_string),
            profiler.get_total_macs(as_string),
            profiler.get_total_params(as_string),
        )
    finally:
        profiler.end_profile()


class StepProfile:
    """Count the operations of rank 0's forwards in the step that ``section`` names, of its last
    micro-batch, and print them once that step has ended.
    """

    def __init__(self, engine: TrainingEngine, section: FlopsProfilerSection) -> None:
        self.section, self.counters = section, engine.counters
        self.profiler = FlopsProfiler(engine.module, engine, section.recompute_fwd_factor or 0.0)
        self._wanted = engine.global_rank == 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Wrap every forward."""
        if not self._wanted or self.counters.global_steps != self.section.profile_step:
            yield
            return
        self.profiler.start_profile()
        try:
            yield
        finally:
            self.profiler.stop_profile()

    def step_has_ended(self) -> None:
        """Print the counts, once."""
        section = self.section
        if self.profiler.started and self.counters.global_steps > section.profile_step:
            self.profiler.print_model_profile(
                section.profile_step,
                section.module_depth,
                section.top_modules,
                section.detailed,
                section.output_file,
            )
            self.profiler.end_profile()
            self._wanted = False
