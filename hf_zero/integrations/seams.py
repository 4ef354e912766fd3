"""Every symbol of Accelerate, Transformers, PEFT and Lightning that hf-zero wraps, in one list:
what, why, and the signature relied on.

A seam names its target as ``module:attribute`` and its wrapper the same way. The wrapper is called
once with the original and returns the replacement; the module that holds it is imported while the
target's package is still being imported, so it may import nothing of Hugging Face at its top.
``hooks.py`` calls ``apply`` when a target module has run. A test compares signatures and versions
with what is installed: a new release of theirs fails there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

ACCELERATE = ">=1.12,<1.16"
PEFT = ">=0.21,<0.22"
TRANSFORMERS = ">=5.17,<5.24"
LIGHTNING = ">=2.6,<2.7"
LIGHTNING_PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # one library under two names
MARK = "__hf_zero_seam__"


@dataclass(frozen=True)
class Seam:
    """One wrapped symbol."""

    target: str
    """``module:attribute``, the attribute possibly dotted:
    ``accelerate.state:PartialState._prepare_backend``.
    """
    signature: str
    """Parameters as ``describe`` writes them: names, kinds and defaults, no annotations."""
    wrapper: str
    """``module:function`` that takes the original and returns the replacement."""
    versions: str
    """Releases of the target's package that the seam was read against, as a requirement
    specifier.
    """
    why: str

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def locate(self, module: ModuleType) -> tuple[Any, str, Any]:
        """``(holder, name, original)`` in the executed module; AttributeError if it is not
        there.
        """
        *path, name = self.target.partition(":")[2].split(".")
        holder: Any = module
        for part in path:
            holder = getattr(holder, part)
        return holder, name, inspect.getattr_static(holder, name)


SEAMS: tuple[Seam, ...] = (
    Seam(
        target="accelerate.commands.utils:CustomArgumentParser.add_argument",
        signature="(self, *args, **kwargs)",
        wrapper="hf_zero.integrations.accelerate.launch:alias_config",
        versions=ACCELERATE,
        why="`accelerate launch --config FILE` means --config_file; the parser "
        "takes no abbreviations",
    ),
    Seam(
        target="accelerate.commands.launch:_validate_launch_command",
        signature="(args)",
        wrapper="hf_zero.integrations.accelerate.launch:check_zero_launch",
        versions=ACCELERATE,
        why="`--cpu` beside a DEEPSPEED file starts one plain process without a word",
    ),
    Seam(
        target="accelerate.utils.launch:prepare_deepspeed_cmd_env",
        signature="(args)",
        wrapper="hf_zero.integrations.accelerate.launch:prepare_ranks",
        versions=ACCELERATE,
        why=(
            "several machines default to `pdsh`, which runs a program named deepspeed; neither "
            "`use_cpu`, nor the `nvme_path`s, nor keys of "
            "deepspeed_config that Accelerate does not know reach the ranks"
        ),
    ),
    Seam(
        target="accelerate.utils.launch:prepare_simple_launcher_cmd_env",
        signature="(args)",
        wrapper="hf_zero.integrations.accelerate.launch:refuse_plain_launch",
        versions=ACCELERATE,
        why="the last place before a plain, unsharded process where a ZeRO "
        "configuration was asked for",
    ),
    Seam(
        target="accelerate.utils.operations:_gpu_gather",
        signature="(tensor)",
        wrapper="hf_zero.integrations.accelerate.state:gather_without_deprecation",
        versions=ACCELERATE,
        why="under torch 2.13 every rank of a device run warns that all_gather_into_tensor is "
        "deprecated, which no user can change",
    ),
    Seam(
        target="accelerate.state:PartialState._prepare_backend",
        signature="(self, cpu=False, sagemaker_dp=False, backend=None)",
        wrapper="hf_zero.integrations.accelerate.state:answer_gloo",
        versions=ACCELERATE,
        why="ranks without an accelerator get no backend under DEEPSPEED and "
        "each believe to be alone",
    ),
    Seam(
        target="accelerate.state:AcceleratorState.__init__",
        signature=(
            "(self, mixed_precision=None, cpu=False, dynamo_plugin=None, "
            "deepspeed_plugin=None, fsdp_plugin=None, "
            "torch_tp_plugin=None, megatron_lm_plugin=None, parallelism_config=None, "
            "_from_accelerator=False, **kwargs)"
        ),
        wrapper="hf_zero.integrations.accelerate.state:shard_on_cpu",
        versions=ACCELERATE,
        why="cpu=True and ACCELERATE_USE_CPU drop DEEPSPEED in silence; plain `python` has no "
        "group and wait_for_everyone raises",
    ),
    Seam(
        target="accelerate.utils.deepspeed:HfDeepSpeedConfig.__init__",
        signature="(self, config_file_or_dict)",
        wrapper="hf_zero.integrations.accelerate.state:read_strictly",
        versions=ACCELERATE,
        why="a path that does not exist ends in an error about base64; presets are not known, and "
        "a key given twice is not seen",
    ),
    Seam(
        target="accelerate.utils.dataclasses:DeepSpeedPlugin.__post_init__",
        signature="(self)",
        wrapper="hf_zero.integrations.accelerate.state:add_written_keys",
        versions=ACCELERATE,
        why="a plugin made from a file without deepspeed_config_file knows eight keys; kernels and "
        "the like come to it here",
    ),
    Seam(
        target="accelerate.utils.dataclasses:DeepSpeedPlugin.fill_match",
        signature="(self, ds_key_long, mismatches=None, must_match=True, **kwargs)",
        wrapper="hf_zero.integrations.accelerate.state:leave_own_autos",
        versions=ACCELERATE,
        why="takes every auto for a hole and raises where nothing fills it; "
        "offload_optimizer.ratio and kernels mean it",
    ),
    Seam(
        target="accelerate.accelerator:map_pytorch_optim_to_deepspeed",
        signature="(optimizer)",
        wrapper="hf_zero.integrations.accelerate.state:keep_the_optimizer",
        versions=ACCELERATE,
        why="under offload every optimizer that is not Adagrad or Lion becomes Adam, "
        "SGD too, without a word",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator._prepare_deepspeed",
        signature="(self, *args)",
        wrapper="hf_zero.integrations.accelerate.state:prepare_engines",
        versions=ACCELERATE,
        why="TRL handles names of engines at stage 3; of several models that train, one "
        "Accelerator steps the first whatever the loss is",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator.clip_grad_norm_",
        signature="(self, parameters, max_norm, norm_type=2)",
        wrapper="hf_zero.integrations.accelerate.multiple_models:clip_by_the_engine",
        versions=ACCELERATE,
        why="drops max_norm in silence, knows the norm of one engine alone, and reads "
        "it back in each step",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator.prepare_optimizer",
        signature="(self, optimizer, device_placement=None)",
        wrapper="hf_zero.integrations.accelerate.state:refuse_optimizer_apart",
        versions=ACCELERATE,
        why="under DEEPSPEED it and prepare_model leave each rank with a model of its own, which "
        "trains apart without a word",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator.no_sync",
        signature="(self, model)",
        wrapper="hf_zero.integrations.accelerate.multiple_models:add_up_in_no_sync",
        versions=ACCELERATE,
        why="does nothing for engines of stages 2 and 3, whose backward inside would be a step",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator.get_state_dict",
        signature="(self, model, unwrap=True)",
        wrapper="hf_zero.integrations.accelerate.state:empty_elsewhere",
        versions=ACCELERATE,
        why="rank 0 alone gets the weights; None on the others makes save_pretrained gather "
        "again, without rank 0",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator.save_state",
        signature="(self, output_dir=None, safe_serialization=True, **save_model_func_kwargs)",
        wrapper="hf_zero.integrations.accelerate.checkpoints:keep_until_saved",
        versions=ACCELERATE,
        why="total_limit removes the oldest states before the new one is written: with 1 there is "
        "none meanwhile; a torn state ends the job",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator.load_state",
        signature="(self, input_dir=None, load_kwargs=None, **load_model_func_kwargs)",
        wrapper="hf_zero.integrations.accelerate.checkpoints:resume_from_whole",
        versions=ACCELERATE,
        why="loads the state with the highest number, torn or not",
    ),
    Seam(
        target="accelerate.data_loader:send_to_device",
        signature="(tensor, device, non_blocking=False, skip_keys=None)",
        wrapper="hf_zero.integrations.transformers.attention_masks:note_padding",
        versions=ACCELERATE,
        why="the last place where an attention mask can be read without waiting for the device",
    ),
    *(
        Seam(
            f"transformers.masking_utils:{name}",
            signature,
            f"hf_zero.integrations.transformers.attention_masks:{wrapper}",
            TRANSFORMERS,
            why,
        )
        for name, signature, wrapper, why in (
            (
                "_preprocess_mask_arguments",
                "(config, inputs_embeds, attention_mask, past_key_values, position_ids, layer_idx, "
                "encoder_hidden_states=None)",
                "drop_whole_masks",
                "reads back in each forward whether a mask masks anything, which "
                "the data loader knew",
            ),
            (
                "_ignore_causal_mask_sdpa",
                "(padding_mask, q_length, kv_length, q_offset, kv_offset, "
                "local_attention_size=None)",
                "keep_causal_mask",
                "the same for a causal mask with padding",
            ),
            (
                "_ignore_bidirectional_mask_sdpa",
                "(padding_mask, kv_length, local_attention_size=None)",
                "keep_bidirectional_mask",
                "the same for a bidirectional mask with padding",
            ),
        )
    ),
    Seam(
        target="transformers.modeling_utils:is_deepspeed_zero3_enabled",
        signature="()",
        wrapper="hf_zero.integrations.transformers.loading:take_the_ordinary_path",
        versions=TRANSFORMERS,
        why="while a model is made: the zero3 path reads on rank 0 alone, and knows neither "
        "conversions nor mismatched keys",
    ),
    Seam(
        target="transformers.models.auto.configuration_auto:AutoConfig.from_pretrained",
        signature="(cls, pretrained_model_name_or_path, **kwargs)",
        wrapper="hf_zero.integrations.transformers.loading:name_sharded",
        versions=TRANSFORMERS,
        why="of a folder with a sharded checkpoint it says that config.json lacks a model_type",
    ),
    Seam(
        target="transformers.modeling_utils:PreTrainedModel.resize_token_embeddings",
        signature="(self, new_num_tokens=None, pad_to_multiple_of=None, mean_resizing=True)",
        wrapper="hf_zero.integrations.transformers.loading:refuse_resize",
        versions=TRANSFORMERS,
        why="the embeddings of a model under an engine lie in its shards, whose layout is fixed",
    ),
    Seam(
        target="transformers.modeling_utils:PreTrainedModel.from_pretrained",
        signature=(
            "(cls, pretrained_model_name_or_path, *model_args, config=None, cache_dir=None, "
            "ignore_mismatched_sizes=False, "
            "force_download=False, local_files_only=False, token=None, revision='main', "
            "use_safetensors=None, weights_only=True, fusion_config=None, "
            "disable_mmap=None, **kwargs)"
        ),
        wrapper="hf_zero.integrations.transformers.loading:load_in_shards",
        versions=TRANSFORMERS,
        why="the model that comes back is sharded, and no rank has held it",
    ),
    Seam(
        target="transformers.modeling_utils:PreTrainedModel._load_pretrained_model",
        signature="(model, state_dict, checkpoint_files, load_config, expected_keys=None)",
        wrapper="hf_zero.integrations.transformers.loading:open_lazily",
        versions=TRANSFORMERS,
        why="the loader gets tensors that nobody has read",
    ),
    Seam(
        target="transformers.modeling_utils:PreTrainedModel._finalize_model_loading",
        signature="(model, load_config, loading_info)",
        wrapper="hf_zero.integrations.transformers.loading:finish_lazily",
        versions=TRANSFORMERS,
        why="buffers are read before weights are initialised; weights that nothing "
        "initialises are an error",
    ),
    Seam(
        target="transformers.modeling_utils:PreTrainedModel._move_missing_keys_from_meta_to_device",
        signature="(self, missing_keys, device_map, device_mesh, hf_quantizer)",
        wrapper="hf_zero.integrations.transformers.loading:mark_missing",
        versions=TRANSFORMERS,
        why="missing weights start as whatever is in memory, which nobody could tell from values",
    ),
    Seam(
        target="transformers.modeling_utils:PreTrainedModel._from_config",
        signature="(cls, config, **kwargs)",
        wrapper="hf_zero.integrations.transformers.building:build_in_shards",
        versions=TRANSFORMERS,
        why="a model from a configuration comes back sharded, and no rank has held it",
    ),
    Seam(
        target="transformers.generation.utils:GenerationMixin.generate",
        signature=(
            "(self, inputs=None, generation_config=None, logits_processor=None, "
            "stopping_criteria=None, prefix_allowed_tokens_fn=None, "
            "synced_gpus=None, assistant_model=None, streamer=None, negative_prompt_ids=None, "
            "negative_prompt_attention_mask=None, "
            "custom_generate=None, **kwargs)"
        ),
        wrapper="hf_zero.integrations.transformers.generation:gather_for_generate",
        versions=TRANSFORMERS,
        why="a sharded model is gathered once for all tokens where it fits; else ranks must keep "
        "together until the last one is done",
    ),
    Seam(
        target="transformers.training_args:TrainingArguments.__post_init__",
        signature="(self)",
        wrapper="hf_zero.integrations.accelerate.launch:see_ranks",
        versions=TRANSFORMERS,
        why="arguments with use_cpu look for ranks without asking for ZeRO, and each process of "
        "srun would believe to be alone",
    ),
    Seam(
        target="transformers.integrations.deepspeed:HfTrainerDeepSpeedConfig.trainer_config_process",
        signature="(self, args, auto_find_batch_size=False)",
        wrapper="hf_zero.integrations.transformers.trainer_config:fill_from_arguments",
        versions=TRANSFORMERS,
        why="what the ZeRO config leaves out comes from the arguments; a config without "
        "gradient_clipping silences max_grad_norm",
    ),
    Seam(
        target="transformers.trainer:Trainer.__init__",
        signature=(
            "(self, model=None, args=None, data_collator=None, train_dataset=None, "
            "eval_dataset=None, processing_class=None, "
            "model_init=None, compute_loss_func=None, compute_metrics=None, callbacks=None, "
            "optimizers=(None, None), "
            "optimizer_cls_and_kwargs=None, preprocess_logits_for_metrics=None)"
        ),
        wrapper="hf_zero.integrations.transformers.trainer:find_zero_callback",
        versions=TRANSFORMERS,
        why="a callback never receives its Trainer, and its first event comes after the "
        "Accelerator was made",
    ),
    Seam(
        target="transformers.trainer:Trainer.create_accelerator_and_postprocess",
        signature="(self)",
        wrapper="hf_zero.integrations.transformers.trainer:route_accelerator",
        versions=TRANSFORMERS,
        why="routes a Trainer that has a ZeroCallback, proves that ZeRO is on, and keeps it from "
        "leaking into the next Trainer",
    ),
    Seam(
        target="transformers.trainer:Trainer.train",
        signature="(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None)",
        wrapper="hf_zero.integrations.transformers.trainer:train_anew",
        versions=TRANSFORMERS,
        why="a second train() destroys the first one's engine, and leaves a sharded model without "
        "values; resuming takes the highest number, torn or not",
    ),
    Seam(
        target="transformers.trainer:Trainer._finalize_training",
        signature="(self, trial, num_train_samples, start_time)",
        wrapper="hf_zero.integrations.transformers.trainer_checkpoints:end_with_whole_ones",
        versions=TRANSFORMERS,
        why=(
            "a best checkpoint that is damaged, or still being written, ends the job with an error "
            "before the model is saved; with "
            "save_total_limit=1 all others are deleted"
        ),
    ),
    Seam(
        target="transformers.trainer:Trainer._push_from_checkpoint",
        signature="(self, checkpoint_folder)",
        wrapper="hf_zero.integrations.transformers.trainer_checkpoints:push_whole_ones",
        versions=TRANSFORMERS,
        why="uploads a checkpoint that is still being written, by a thread or by other ranks",
    ),
    Seam(
        target="transformers.trainer:rotate_checkpoints",
        signature="(output_dir, save_total_limit=None, best_model_checkpoint=None, "
        "use_mtime=False, checkpoint_prefix='checkpoint')",
        wrapper="hf_zero.integrations.transformers.trainer_checkpoints:keep_whole_ones",
        versions=TRANSFORMERS,
        why="counts torn folders as checkpoints, and a removal that is cut off leaves one more",
    ),
    Seam(
        target="transformers.trainer:Trainer._prepare_for_training",
        signature="(self, max_steps, train_dataloader, resume_from_checkpoint)",
        wrapper="hf_zero.integrations.transformers.trainer:prepare_engine",
        versions=TRANSFORMERS,
        why="a model that is wrapped in something else than the engine would train "
        "unsharded in silence",
    ),
    Seam(
        target="transformers.trainer:Trainer._get_grad_norm",
        signature="(self, model, grad_norm=None)",
        wrapper="hf_zero.integrations.transformers.trainer:leave_norm_on_device",
        versions=TRANSFORMERS,
        why="reads the norm back in each step, also where it is not logged",
    ),
    Seam(
        target="transformers.trainer:deepspeed_init",
        signature="(trainer, num_training_steps, inference=False)",
        wrapper="hf_zero.integrations.transformers.trainer:keep_what_was_given",
        versions=TRANSFORMERS,
        why="drops the optimizer and the scheduler of Trainer(optimizers=...) in silence, and sets "
        "the level of our logger",
    ),
    Seam(
        target="transformers.trainer:Trainer.evaluation_loop",
        signature="(self, dataloader, description, prediction_loss_only=None, ignore_keys=None, "
        "metric_key_prefix='eval')",
        wrapper="hf_zero.integrations.transformers.trainer:evaluate_raw",
        versions=TRANSFORMERS,
        why="evaluation before training raises at stages 0 to 2 and spoils the "
        "training after it at stage 3",
    ),
    Seam(
        target="transformers.trainer:Trainer.save_model",
        signature="(self, output_dir=None, _internal_call=False)",
        wrapper="hf_zero.integrations.transformers.trainer:save_untrained",
        versions=TRANSFORMERS,
        why="asks an engine that does not exist yet when nothing was trained",
    ),
    *(
        Seam(
            f"{package}.{target}",
            signature,
            f"hf_zero.integrations.lightning.wrappers:{wrapper}",
            LIGHTNING,
            why,
        )
        for package in LIGHTNING_PACKAGES
        for target, signature, wrapper, why in (
            (
                "strategies.deepspeed:DeepSpeedStrategy.register_strategies",
                "(cls, strategy_registry)",
                "register_stages",
                "Trainer(strategy='zero_stage_3') is found without an import; the registry asks "
                "each class of Lightning for its names",
            ),
            (
                "strategies.deepspeed:DeepSpeedStrategy.init_deepspeed",
                "(self)",
                "go_on_with_an_engine",
                "the model of an engine is given to initialize again (test after fit, fit after "
                "validate), its hooks removed; windows cross epochs",
            ),
            (
                "strategies.ddp:DDPStrategy.teardown",
                "(self)",
                "keep_engines_in_place",
                "moves the module and the optimizer's state to the CPU, out of an engine that a "
                "later save still needs",
            ),
            (
                "strategies.strategy:Strategy.lightning_module_state_dict",
                "(self)",
                "leave_weights_in_shards",
                "makes the model whole on every rank for each checkpoint, and "
                "DeepSpeedStrategy then drops it",
            ),
            (
                "strategies.strategy:Strategy.remove_checkpoint",
                "(self, filepath)",
                "remove_once_replaced",
                "removes the last whole checkpoint while the new one is still being written; a "
                "removal that is cut off leaves half a folder",
            ),
            (
                "strategies.strategy:Strategy.on_train_end",
                "(self)",
                "end_with_whole_ones",
                "a fit returns, and its best_model_path is read, while the last checkpoint "
                "is still being written",
            ),
            (
                "callbacks.model_checkpoint:ModelCheckpoint._find_last_checkpoints",
                "(self, trainer)",
                "find_whole_ones",
                "ckpt_path='last' takes the newest folder called last, torn or not",
            ),
            (
                "trainer.connectors.checkpoint_connector:_CheckpointConnector._parse_ckpt_path",
                "(self, state_fn, ckpt_path, model_provided, model_connected)",
                "refuse_torn_ones",
                "a torn folder is met when the model has been made, by an error that knows no "
                "other checkpoint of the run",
            ),
            (
                "trainer.connectors.accelerator_connector:_AcceleratorConnector._check_and_init_precision",
                "(self)",
                "choose_precision",
                "knows the precision of its own strategies only, and turns fp16 on a CPU into bf16",
            ),
        )
    ),
    Seam(
        target="transformers.trainer_jit_checkpoint:JITCheckpointCallback.set_trainer",
        signature="(self, trainer)",
        wrapper="hf_zero.integrations.transformers.preemption:agree_to_stop",
        versions=TRANSFORMERS,
        why="ranks that get SIGTERM at different moments save at different steps, or wait for "
        "a rank that got none",
    ),
    Seam(
        target="peft.tuners.trainable_tokens.layer:TrainableTokensLayer._collect_token_weights",
        signature="(self, weight, rows, embed_dim)",
        wrapper="hf_zero.integrations.peft.adapters:read_token_rows",
        versions=PEFT,
        why="asks torch for the current CUDA device under ZeRO-3, and sends "
        "rows that every rank has",
    ),
    Seam(
        target="peft.utils.save_and_load:get_peft_model_state_dict",
        signature="(model, state_dict=None, adapter_name='default', unwrap_compiled=False, "
        "save_embedding_layers='auto')",
        wrapper="hf_zero.integrations.peft.adapters:read_state_dict",
        versions=PEFT,
        why="rank 0 saves alone, and would gather modules that are saved whole and prompt "
        "encoders; other ranks look up keys in {}",
    ),
    Seam(
        target="peft.peft_model:PeftModel.save_pretrained",
        signature=(
            "(self, save_directory, safe_serialization=True, selected_adapters=None, "
            "save_embedding_layers='auto', is_main_process=True, "
            "path_initial_model_for_weight_conversion=None, **kwargs)"
        ),
        wrapper="hf_zero.integrations.peft.adapters:leave_files_to_rank_0",
        versions=PEFT,
        why="ranks without the weights would write an empty adapter over that of rank 0",
    ),
)


@functools.cache
def modules() -> frozenset[str]:
    """Names of the modules that hold a seam."""
    return frozenset(seam.module for seam in SEAMS)


def describe(function: Any) -> str:
    """The signature of ``function`` without annotations."""
    signature = inspect.signature(getattr(function, "__func__", function))
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def apply(module: ModuleType) -> None:
    """Put in every seam of ``module`` that is not in yet.

    A symbol that has changed is named in a warning.
    """
    for seam in SEAMS:
        if seam.module == module.__name__:
            _apply(seam, module)


def _apply(seam: Seam, module: ModuleType) -> None:
    from hf_zero.logs import logger

    try:
        holder, name, original = seam.locate(module)
    except AttributeError:
        logger.warning(
            "%s is gone, and hf-zero relies on it (%s). Install %s%s",
            seam.target,
            seam.why,
            seam.package,
            seam.versions,
        )
        return
    function = getattr(original, "__func__", original)  # out of a staticmethod or classmethod
    if getattr(function, MARK, None) == seam.target:
        return
    if (found := describe(function)) != seam.signature:
        logger.warning(
            "%s takes %s, hf-zero was read against %s. Install %s%s",
            seam.target,
            found,
            seam.signature,
            seam.package,
            seam.versions,
        )
    home, _, wrapper = seam.wrapper.partition(":")
    replacement = getattr(importlib.import_module(home), wrapper)(function)
    functools.update_wrapper(replacement, function)
    setattr(replacement, MARK, seam.target)
    setattr(holder, name, type(original)(replacement) if function is not original else replacement)
