"""Engine of a pipeline: a step is ``train_batch``, over all micro-batches of a window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from hf_zero.config import ZeroConfig
from hf_zero.config.value_types import argument, integer
from hf_zero.device.pinned import upload
from hf_zero.distributed.mesh import Mesh
from hf_zero.distributed.parallel_dims import ParallelDims
from hf_zero.distributed.parallel_groups import get_parallel
from hf_zero.distributed.stage_messages import StageMessages
from hf_zero.errors import ConfigError, PipelineError, RankMismatchError
from hf_zero.parallel.alike import Calls, differing, hash_of
from hf_zero.parallel.pipeline.rank_stages import PipelineRun, Stage
from hf_zero.parallel.pipeline.staged import StagedModule
from hf_zero.parallel.pipeline.tied_parameters import TiedParameters, mark_tied
from hf_zero.parallel.pipeline.topology import PipelineParallelGrid
from hf_zero.zero.layout.engine_plan import UNCUT, Cuts, EnginePlan, ExtensionsOf
from hf_zero.zero.layout.tree import map_tensors
from hf_zero.zero.step.window import WindowEnd
from hf_zero.zero.training_engine import TrainingEngine

E = TypeVar("E", bound=TrainingEngine)


class PipelineTraining(TrainingEngine):
    """Engine whose model is a :class:`StagedModule`; see :func:`pipelined`."""

    module: StagedModule
    pipeline_parallelism = True

    @classmethod
    def plan(
        cls,
        model: nn.Module,
        settings: ZeroConfig,
        optimizer: torch.optim.Optimizer | None,
        extensions_of: ExtensionsOf,
        shard_only: bool = False,
        dims: ParallelDims | None = None,
        cuts: Cuts = UNCUT,
    ) -> EnginePlan:
        """Return the plan, once tied parameters are marked with the stages that hold them
        (collective over all ranks).
        """
        groups = get_parallel()
        assert groups is not None and isinstance(model, StagedModule)
        mark_tied(model, groups)
        return super().plan(model, settings, optimizer, extensions_of, shard_only, dims, cuts)

    def _build(self, plan: EnginePlan, mesh: Mesh, installed: ExitStack) -> None:
        groups = get_parallel()
        assert groups is not None
        if self.config.pipeline.activation_checkpoint_interval:
            module: Any = self.module
            module.set_checkpoint_interval(self.config.pipeline.activation_checkpoint_interval)
        name = mesh.name.partition(" of stage ")[0]  # the same on all stages
        self.tied = TiedParameters(self.module, groups, name, mesh.timeout)
        mesh.hold(self.tied.logs)
        super()._build(plan, mesh, installed)
        self.tied.check(self.flats)
        installed.callback(self.tied.close)
        messages = StageMessages.over(groups, name, mesh.timeout)
        mesh.hold(messages.logs)
        installed.callback(messages.close)
        count = self.module.num_stages * self.module.stages_per_rank
        stages = [
            Stage(stage, count, messages, self._run_forward, self._run_backward)
            for stage in self.module.stages_here
        ]
        self.pipeline_run = PipelineRun(
            self.config.pipeline.schedule_for(len(stages)), stages, messages
        )
        self._batches: Iterator[object] | None = None
        self._batch_function: Callable[[object], object] | None = None
        self._window: list[tuple[object, object]] = []  # inputs and labels of the micro-batches
        self._done = 0  # micro-batches before the window
        self._calls = Calls()

    def train_batch(self, data_iter: Iterator[object] | None = None) -> torch.Tensor:
        """Train one step on the next ``gradient_accumulation_steps`` micro-batches of ``data_iter``
        (collective over all ranks); return the mean loss, on every rank.

        The ranks of the first and the last stage read data, each that of its data-parallel
        coordinate. None: the iterator given to :meth:`set_dataiterator`, or the loader of
        ``initialize``. Raises PipelineError inside ``torch.no_grad()``, and ConfigError for data
        that is not an iterator: each step would begin it anew.
        """
        if not torch.is_grad_enabled():
            raise PipelineError(
                "train_batch() inside torch.no_grad() has no gradients; call eval_batch() to "
                "evaluate, or leave the block"
            )
        if data_iter is not None:
            if not hasattr(data_iter, "__next__"):
                raise ConfigError(
                    f"train_batch() got a {type(data_iter).__name__}, of which each step would "
                    "read the first batches; pass the same iter(loader) to each step, or call "
                    "engine.set_dataloader(loader) once and train_batch() without data"
                )
            self.set_dataiterator(data_iter)
        self.module.train()
        steps, window = self.gradient_accumulation_steps(), self.accumulation
        before = window.end
        try:
            window.set_end(WindowEnd.LATER_BACKWARD)
            try:
                losses = self._run(steps, training=True)
            except BaseException:
                self.restart_window()  # the next train_batch runs all micro-batches again
                raise
            window.set_end(WindowEnd.NEXT_BACKWARD)
            self.reduce_gradients()
            self.tied.add_up(self.flats)
            window.await_step(steps)
            super().step()
        finally:
            window.set_end(before)
        mean, requests = self._means(losses, float(self.stop_requests.asked))
        self.stop_requests.end_run(requests)
        return mean

    def eval_batch(
        self,
        data_iter: Iterable[object],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> object:
        """Run micro-batches of ``data_iter`` forward, without gradients (collective over all
        ranks); ``num_micro_batches`` of them, or as many as a step has. Return their mean loss, on
        every rank.

        ``return_logits``: return (loss, outputs of the last stage, concatenated along the first
        dimension, or a list if shapes differ; None on other stages). ``reduce_output`` None: return
        the losses one by one. Without ``compute_loss``: return the outputs. Both only on the ranks
        of the last stage, None elsewhere. The model is in evaluation mode afterwards. Raises
        ConfigError for another ``reduce_output``, without data, and for no micro-batches.
        """
        if reduce_output not in ("avg", None):
            raise ConfigError(f'reduce_output is {reduce_output!r}; it is "avg" or None')
        if num_micro_batches is None:
            num_micro_batches = self.gradient_accumulation_steps()
        count: int = argument("eval_batch", "num_micro_batches", integer(1), num_micro_batches)
        training, self._batches = self._batches, _iterator(data_iter, "eval_batch")
        outputs: list[Any] = []
        self.module.eval()
        try:
            with torch.no_grad():
                losses = self._run(
                    count,
                    training=False,
                    outputs=outputs if return_logits or not compute_loss else None,
                    compute_loss=compute_loss,
                )
        finally:
            self._batches = training
        is_last = self.is_last_stage()
        answer: object
        if not compute_loss:
            answer = outputs if is_last else None
        elif reduce_output is None:
            answer = losses if is_last else None
        else:
            answer, _ = self._means(losses)
        if not return_logits:
            return answer
        shapes = {
            output.shape[1:] if isinstance(output, torch.Tensor) and output.dim() else None
            for output in outputs
        }
        alike = len(shapes) == 1 and None not in shapes
        return answer, torch.cat(outputs) if alike else (outputs or None)

    def _run(
        self,
        micro_batches: int,
        training: bool,
        outputs: list[object] | None = None,
        compute_loss: bool = True,
    ) -> list[torch.Tensor]:
        def loss(output: object, number: int) -> torch.Tensor:
            if outputs is not None:
                outputs.append(output)
            if not compute_loss:
                return torch.zeros((), device=self.device)
            return self.module.loss(output, self._window[number][1])

        self._window, self._done = list(self._load(micro_batches)), self.micro_steps
        if self._calls.due(training):
            self._compare_batches()
        try:
            return self.pipeline_run.run(micro_batches, loss, training)
        finally:
            self._window = []

    def _load(self, micro_batches: int) -> Iterator[tuple[object, object]]:
        """Yield the inputs and labels of the next micro-batches, on the ranks that use them."""
        if not (self.is_first_stage() or self.is_last_stage()):
            return
        if self._batches is None:
            if self.training_dataloader is None:
                raise PipelineError(
                    "train_batch() has no data: pass data_iter, call set_dataiterator(), or pass "
                    "training_data to initialize"
                )
            self.set_dataloader(self.training_dataloader)
        assert self._batches is not None
        for number in range(micro_batches):
            try:
                batch = next(self._batches)
            except StopIteration:
                raise PipelineError(
                    f"the data ended after {number} of the {micro_batches} micro-batches of a "
                    "step; repeat it (RepeatingLoader), or end the loop at whole steps"
                ) from None
            if self._batch_function is not None:
                batch = self._batch_function(batch)
            inputs, labels = map_tensors(
                self.module.split_batch(batch), lambda tensor: upload(tensor, self.device)
            )
            yield inputs, labels

    def _compare_batches(self) -> None:
        """Raise RankMismatchError on all ranks of a pipeline if its reading ranks have read
        different batches (collective).

        Inputs and labels are compared separately: a rank may have only those that it uses.
        """
        codes: list[int | None] = []
        for index in (0, 1):
            leaves = tree_flatten([batch[index] for batch in self._window])[0]
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            codes.append(hash_of(tensors) if tensors else None)
        groups = get_parallel()
        assert groups is not None
        dims = [groups.along("pipeline"), groups.along("tensor")]
        different = differing(dims, codes, self.device, "hashes of batches")
        names = [name for name, differs in zip(("inputs", "labels"), different) if differs]
        if names:
            ranks = self.grid.data_parallel_size
            raise RankMismatchError(
                "the ranks of the first and the last stage were given different "
                f"{' and '.join(names)} of the same micro-batches; let all ranks of a pipeline "
                "read those of its data-parallel coordinate, in one order (one seed, and "
                f"DistributedSampler(data, {ranks}, engine.grid.get_data_parallel_rank()))"
            )

    def _run_forward(self, stage: int, number: int, inputs: object) -> object:
        # the same on every number of stages and in a resumed run: it seeds layers
        self.module.micro_offset = self._done + number
        return super().forward(self._window[number][0] if inputs is None else inputs, stage=stage)

    def batch_of(self, args: object, kwargs: Any) -> object:
        """Return the inputs of the first stage; None on other stages, which read activations."""
        return args if self.is_first_stage() and kwargs["stage"] == 0 else None

    def _run_backward(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        if gradients:
            self.pass_runner.run_backward_from(outputs, gradients)
        elif outputs:
            super().backward(outputs[0])

    def _means(self, losses: Sequence[torch.Tensor], number: float = 0.0) -> torch.Tensor:
        """Return the mean of the losses of all ranks of the last stage, and the sum of ``number``
        over all ranks divided by those of a stage: [2] fp32, the same on every rank.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        sums[1] += number
        if losses:
            sums[0] += torch.stack([loss.detach().double() for loss in losses]).mean()
        mesh = self.mesh
        for dim in (mesh.sums.stages, mesh.shard, mesh.replicate):
            dim.all_reduce(sums, "loss of the pipeline").wait()
        return (sums / mesh.pp_stage_ranks).float()

    def set_dataloader(self, loader: Iterable[object]) -> None:
        """Read micro-batches from ``loader`` from now on; restart it when it ends."""
        self.set_dataiterator(_repeated(loader))

    def set_dataiterator(self, iterator: Iterator[object]) -> None:
        """Read micro-batches from ``iterator`` from now on."""
        self._batches = _iterator(iterator, "set_dataiterator")

    def set_batch_fn(self, fn: Callable[[object], object]) -> None:
        """Set ``fn`` to convert each item of the data to (inputs, labels)."""
        self._batch_function = fn

    def reset_activation_shape(self) -> None:
        """Do nothing: shapes may differ from one micro-batch to the next."""

    @property
    def elsewhere(self) -> frozenset[str]:  # type: ignore[override]
        """Names of the parameters and buffers that only other stages hold."""
        return self.module.elsewhere

    def is_first_stage(self) -> bool:
        """Return whether this rank holds the first stage."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Return whether this rank holds the last stage."""
        return self.stage_id == self.num_stages - 1

    @property
    def num_stages(self) -> int:
        """The number of ranks that a sample passes."""
        return self.module.num_stages

    @property
    def stage_id(self) -> int:
        """Position of this rank among the ``num_stages`` ranks of its pipeline."""
        return self.module.stage_id

    @property
    def prev_stage(self) -> int:
        return self.stage_id - 1

    @property
    def next_stage(self) -> int:
        return self.stage_id + 1

    @property
    def grid(self) -> PipelineParallelGrid:
        """Position of this rank in the topology, with the method names of a Megatron ``mpu``."""
        return PipelineParallelGrid(self.module.topology)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a step."""
        return self.gradient_accumulation_steps()

    def consolidated(self, dtype: torch.dtype | None = None) -> NoReturn:  # type: ignore[override]
        _refuse_whole("consolidated")

    def iter_weights(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse_whole("iter_weights")

    def save_16bit_model(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse_whole("save_16bit_model")

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("forward")

    def backward(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("backward")

    def step(self, *args: object, **kwargs: object) -> NoReturn:
        _refuse("step")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        _refuse("no_sync")
        yield


def _refuse(name: str) -> NoReturn:
    raise PipelineError(
        f"{name}() of the engine of a pipeline: a rank has a part of the model, and micro-batches "
        "pass all of them; only train_batch() and eval_batch() run it"
    )


def _refuse_whole(name: str) -> NoReturn:
    raise PipelineError(
        f"{name}() of the engine of a pipeline: no rank has the whole model; save_checkpoint() "
        "writes it, and hf-zero convert-checkpoint makes model files of that"
    )


def _iterator(data: Iterable[object], method: str) -> Iterator[object]:
    """Return an iterator over ``data``. Raises ConfigError for what is not iterable."""
    try:
        return iter(data)
    except TypeError as error:
        raise ConfigError(
            f"{method}() got {data!r:.40}; pass an iterable of micro-batches, such as "
            "iter(loader), on all ranks"
        ) from error


def _repeated(loader: Iterable[object]) -> Iterator[object]:
    """Yield the batches of ``loader``, epoch after epoch."""
    sampler: object = getattr(loader, "data_sampler", None) or getattr(loader, "sampler", None)
    epoch = getattr(loader, "epoch", 0)  # of a resumed run
    while True:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise PipelineError(
                f"the loader of the pipeline ({type(loader).__name__}) gives no batch; give it "
                "more samples than a micro-batch has on all ranks, or drop_last=False"
            )
        epoch += 1


_made: dict[type, type] = {}


def pipelined(engine_class: type[E]) -> type[E]:
    """Return the subclass of ``engine_class`` for a model in pipeline stages, one per class."""
    if engine_class not in _made:
        attributes = {"__doc__": PipelineTraining.__doc__, "__module__": engine_class.__module__}
        _made[engine_class] = type("PipelineEngine", (PipelineTraining, engine_class), attributes)
    return _made[engine_class]
