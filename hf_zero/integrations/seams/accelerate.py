"""The rows of Accelerate in the table of seams."""

from __future__ import annotations

from hf_zero.integrations.seams.seam import Seam

SEAMS: tuple[Seam, ...] = (
    Seam(
        target="accelerate.commands.utils:CustomArgumentParser.add_argument",
        wrapper="hf_zero.integrations.accelerate.launch:alias_config",
        why="`accelerate launch --config FILE` means --config_file; the parser "
        "takes no abbreviations",
    ),
    Seam(
        target="accelerate.commands.launch:_validate_launch_command",
        wrapper="hf_zero.integrations.accelerate.launch:check_zero_launch",
        why="`--cpu` beside a DEEPSPEED file starts one plain process without a word",
    ),
    Seam(
        target="accelerate.utils.launch:prepare_deepspeed_cmd_env",
        wrapper="hf_zero.integrations.accelerate.launch:prepare_ranks",
        why=(
            "several machines default to `pdsh`, which runs a program named deepspeed; neither "
            "`use_cpu`, nor the `nvme_path`s, nor keys of "
            "deepspeed_config that Accelerate does not know reach the ranks"
        ),
    ),
    Seam(
        target="accelerate.utils.launch:prepare_simple_launcher_cmd_env",
        wrapper="hf_zero.integrations.accelerate.launch:refuse_plain_launch",
        why="the last place before a plain, unsharded process where a ZeRO "
        "configuration was asked for",
    ),
    Seam(
        target="accelerate.utils.operations:_gpu_gather",
        wrapper="hf_zero.integrations.accelerate.state:gather_without_deprecation",
        why="under torch 2.13 every rank of a device run warns that all_gather_into_tensor is "
        "deprecated, which no user can change",
    ),
    Seam(
        target="accelerate.state:PartialState._prepare_backend",
        wrapper="hf_zero.integrations.accelerate.state:answer_gloo",
        why="ranks without an accelerator get no backend under DEEPSPEED and "
        "each believe to be alone",
    ),
    Seam(
        target="accelerate.state:AcceleratorState.__init__",
        wrapper="hf_zero.integrations.accelerate.state:shard_on_cpu",
        why="cpu=True and ACCELERATE_USE_CPU drop DEEPSPEED in silence; plain `python` has no "
        "group and wait_for_everyone raises",
    ),
    Seam(
        target="accelerate.utils.deepspeed:HfDeepSpeedConfig.__init__",
        wrapper="hf_zero.integrations.accelerate.plugin:read_strictly",
        why="a path that does not exist ends in an error about base64; presets are not known, and "
        "a key given twice is not seen",
    ),
    Seam(
        target="accelerate.utils.dataclasses:DeepSpeedPlugin.__post_init__",
        wrapper="hf_zero.integrations.accelerate.plugin:add_written_keys",
        why="a plugin made from a file without deepspeed_config_file knows eight keys; kernels and "
        "the like come to it here; a written steps_per_print is replaced by infinity",
    ),
    Seam(
        target="accelerate.utils.dataclasses:DeepSpeedPlugin.fill_match",
        wrapper="hf_zero.integrations.accelerate.plugin:leave_own_autos",
        why="takes every auto for a hole and raises where nothing fills it; "
        "offload_optimizer.ratio and kernels mean it",
    ),
    Seam(
        target="accelerate.utils.dataclasses:DeepSpeedPlugin.zero3_init_context_manager",
        wrapper="hf_zero.integrations.accelerate.plugin:leave_models_whole",
        why="its enable=False leaves the ZeRO-3 configuration alive in transformers, and frozen "
        "models that no engine takes are sharded",
    ),
    Seam(
        target="accelerate.accelerator:map_pytorch_optim_to_deepspeed",
        wrapper="hf_zero.integrations.accelerate.accelerator:keep_the_optimizer",
        why="under offload every optimizer that is not Adagrad or Lion becomes Adam, "
        "SGD too, without a word",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator._prepare_deepspeed",
        wrapper="hf_zero.integrations.accelerate.accelerator:prepare_engines",
        why="TRL handles names of engines at stage 3; of several models that train, one "
        "Accelerator steps the first whatever the loss is",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator.prepare_data_loader",
        wrapper="hf_zero.integrations.accelerate.loaders:draw_by_difficulty",
        why="the one place that the loaders of scripts and of the Trainer come through, which "
        "draw by difficulty where the configuration says so",
    ),
    Seam(
        target="accelerate.accelerator:prepare_data_loader",
        wrapper="hf_zero.integrations.accelerate.loaders:share_out",
        uses=("num_processes", "process_index", "torch_device_mesh", "use_seedable_sampler"),
        why="a loader that dispatches gives all tensor-parallel groups the same batches, and once "
        "some were skipped each rank others",
    ),
    Seam(
        target="accelerate.data_loader:DataLoaderAdapter.adjust_state_dict_for_prefetch",
        wrapper="hf_zero.integrations.accelerate.loaders:rewind_what_was_fetched",
        why="takes back one batch a process from the state of a loader that dispatches, which has "
        "fetched one a data-parallel rank",
    ),
    Seam(
        target="accelerate.data_loader:skip_first_batches",
        wrapper="hf_zero.integrations.accelerate.loaders:skip_what_was_trained",
        why="counts from the beginning of an epoch, and a loader that draws by difficulty begins "
        "with the training's next step",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator.clip_grad_norm_",
        wrapper="hf_zero.integrations.accelerate.multiple_models:clip_by_the_engine",
        why="drops max_norm in silence, knows the norm of one engine alone, and reads "
        "it back in each step",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator.prepare_optimizer",
        wrapper="hf_zero.integrations.accelerate.accelerator:refuse_optimizer_apart",
        why="under DEEPSPEED it and prepare_model leave each rank with a model of its own, which "
        "trains apart without a word",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator.log",
        wrapper="hf_zero.integrations.accelerate.accelerator:add_figures",
        why="trackers get what the script logs, and the engine's figures beside it",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator._do_sync",
        wrapper="hf_zero.integrations.accelerate.accelerator:follow_the_phases",
        why="windows of `accumulate` have one size, which training_phases change",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator.no_sync",
        wrapper="hf_zero.integrations.accelerate.multiple_models:add_up_in_no_sync",
        why="does nothing for engines of stages 2 and 3, whose backward inside would be a step",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator.gather_for_metrics",
        wrapper="hf_zero.integrations.accelerate.loaders:count_samples_once",
        why="gathers what tensor-parallel ranks have of the same samples from each of them, and "
        "cuts a last batch off in the middle of that",
    ),
    Seam(
        target="accelerate.scheduler:AcceleratedScheduler.step",
        wrapper="hf_zero.integrations.accelerate.loaders:count_batches_once",
        why="steps as many times as there are processes, as if each had a batch of its own: a "
        "schedule would run faster by the size of tensor and sequence parallelism",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator.get_state_dict",
        wrapper="hf_zero.integrations.accelerate.accelerator:empty_elsewhere",
        why="rank 0 alone gets the weights; None on the others makes save_pretrained gather "
        "again, without rank 0",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator.save_state",
        wrapper="hf_zero.integrations.accelerate.checkpoints:keep_until_saved",
        why="total_limit removes the oldest states before the new one is written: with 1 there is "
        "none meanwhile; a torn state ends the job",
    ),
    Seam(
        target="accelerate.accelerator:Accelerator.load_state",
        wrapper="hf_zero.integrations.accelerate.checkpoints:resume_from_whole",
        why="loads the state with the highest number, torn or not",
    ),
    *(
        Seam(
            target=f"accelerate.data_loader:{name}",
            wrapper="hf_zero.integrations.accelerate.memory_saves:save_between_batches",
            why="the body of the script's loop has ended, and with it the step: the one place "
            "where its own state and the loader's are those of a checkpoint in memory",
        )
        for name in ("DataLoaderAdapter._update_state_dict", "DataLoaderStateMixin.end")
    ),
    Seam(
        target="accelerate.data_loader:send_to_device",
        wrapper="hf_zero.integrations.transformers.attention_masks:note_padding",
        why="the last place where an attention mask can be read without waiting for the device",
    ),
)
