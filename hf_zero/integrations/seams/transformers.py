"""The rows of Transformers, and of PEFT and TRL beside it, in the table of seams."""

from __future__ import annotations

from hf_zero.integrations.seams.seam import Seam

SEAMS: tuple[Seam, ...] = (
    *(
        Seam(
            f"transformers.masking_utils:{name}",
            f"hf_zero.integrations.transformers.attention_masks:{wrapper}",
            why,
            uses,
            prepare,
        )
        for name, wrapper, uses, prepare, why in (
            (
                "_preprocess_mask_arguments",
                "drop_whole_masks",
                ("attention_mask", "position_ids"),
                "hf_zero.integrations.transformers.attention_masks:examine_preprocessing",
                "reads back in each forward whether a mask masks anything, which "
                "the data loader knew",
            ),
            (
                "find_packed_sequence_indices",
                "know_own_positions",
                (),
                "",
                "takes positions for packed sequences in a capture of CUDA graphs",
            ),
            (
                "_ignore_causal_mask_sdpa",
                "keep_causal_mask",
                (),
                "",
                "reads back the same for a causal mask with padding",
            ),
            (
                "_ignore_bidirectional_mask_sdpa",
                "keep_bidirectional_mask",
                (),
                "",
                "reads back the same for a bidirectional mask with padding",
            ),
        )
    ),
    Seam(
        target="transformers.modeling_utils:is_deepspeed_zero3_enabled",
        wrapper="hf_zero.integrations.transformers.loading:take_the_ordinary_path",
        why="while a model is made: the zero3 path reads on rank 0 alone, and knows neither "
        "conversions nor mismatched keys",
    ),
    Seam(
        target="transformers.models.auto.configuration_auto:AutoConfig.from_pretrained",
        wrapper="hf_zero.integrations.transformers.loading:name_sharded",
        uses=("pretrained_model_name_or_path",),
        why="of a folder with a sharded checkpoint it says that config.json lacks a model_type",
    ),
    Seam(
        target="transformers.modeling_utils:PreTrainedModel.resize_token_embeddings",
        wrapper="hf_zero.integrations.transformers.loading:resize_in_shards",
        why="the embeddings of a model under an engine lie in its shards, whose layout is fixed",
    ),
    Seam(
        target="transformers.modeling_utils:PreTrainedModel.from_pretrained",
        wrapper="hf_zero.integrations.transformers.loading:load_in_shards",
        uses=("pretrained_model_name_or_path",),
        why="the model that comes back is sharded, and no rank has held it",
    ),
    Seam(
        target="transformers.modeling_utils:PreTrainedModel._load_pretrained_model",
        wrapper="hf_zero.integrations.transformers.loading:open_lazily",
        why="the loader gets tensors that have not been read",
    ),
    Seam(
        target="transformers.modeling_utils:PreTrainedModel._finalize_model_loading",
        wrapper="hf_zero.integrations.transformers.loading:finish_lazily",
        why="buffers are read before weights are initialised; weights that nothing "
        "initialises are an error",
    ),
    Seam(
        target="transformers.modeling_utils:PreTrainedModel._move_missing_keys_from_meta_to_device",
        wrapper="hf_zero.integrations.transformers.loading:mark_missing",
        why="missing weights start as whatever is in memory, which looks like values",
    ),
    Seam(
        target="transformers.quantizers.quantizer_bnb_4bit:Bnb4BitHfQuantizer.update_device_map",
        wrapper="hf_zero.integrations.transformers.quantized_loading:keep_on_host",
        why="puts the whole model on one device",
    ),
    Seam(
        target="transformers.integrations.bitsandbytes:Bnb4bitQuantize.convert",
        wrapper="hf_zero.integrations.transformers.quantized_loading:quantize_in_shards",
        uses=("input_dict", "model"),
        why="each rank quantises the part of a weight that it keeps",
    ),
    Seam(
        target="transformers.quantizers.quantizer_bnb_8bit:Bnb8BitHfQuantizer.update_device_map",
        wrapper="hf_zero.integrations.transformers.quantized_loading:keep_on_host",
        why="puts the whole model on one device",
    ),
    Seam(
        target="transformers.integrations.bitsandbytes:Bnb8bitQuantize.convert",
        wrapper="hf_zero.integrations.transformers.quantized_loading:quantize_rows_in_shards",
        uses=("input_dict", "model"),
        why="each rank quantises the part of a weight that it keeps",
    ),
    Seam(
        target="transformers.integrations.torchao:TorchAoQuantize.convert",
        wrapper="hf_zero.integrations.transformers.quantized_loading:quantize_parts_in_shards",
        uses=("input_dict", "model"),
        why="each rank quantises the part of a weight that it keeps",
    ),
    Seam(
        target="transformers.integrations.bitsandbytes:Bnb8bitDeserialize.convert",
        wrapper="hf_zero.integrations.transformers.quantized_loading:take_packed_in_shards",
        uses=("input_dict",),
        why="each rank reads its part of packed bytes and scales",
    ),
    Seam(
        target="transformers.integrations.bitsandbytes:Bnb4bitDeserialize.convert",
        wrapper="hf_zero.integrations.transformers.quantized_loading:take_packed_in_shards",
        uses=("input_dict",),
        why="each rank reads its part of packed bytes and scales",
    ),
    Seam(
        target="transformers.modeling_utils:PreTrainedModel._from_config",
        wrapper="hf_zero.integrations.transformers.loading:build_in_shards",
        prepare="hf_zero.integrations.transformers.loading:record_initializers",
        why="a model from a configuration comes back sharded, and no rank has held it",
    ),
    Seam(
        target="transformers.generation.utils:GenerationMixin.generate",
        wrapper="hf_zero.integrations.transformers.generation:gather_for_generate",
        uses=("assistant_model", "synced_gpus"),
        why="a sharded model is gathered once for all tokens where it fits; else ranks, and those "
        "that hold parts of its layers or other experts, keep together until the last one is done",
    ),
    Seam(
        target="transformers.training_args:TrainingArguments.__post_init__",
        wrapper="hf_zero.integrations.accelerate.launch:see_ranks",
        why="arguments with use_cpu look for ranks without asking for ZeRO, and each process of "
        "srun would believe to be alone",
    ),
    Seam(
        target="transformers.integrations.deepspeed:"
        "HfTrainerDeepSpeedConfig.trainer_config_process",
        wrapper="hf_zero.integrations.transformers.trainer_route:fill_from_arguments",
        why="what the ZeRO config leaves out comes from the arguments; a config without "
        "gradient_clipping silences max_grad_norm",
    ),
    Seam(
        target="transformers.trainer:Trainer.__init__",
        wrapper="hf_zero.integrations.transformers.trainer:find_zero_callback",
        uses=("callbacks",),
        why="a callback never receives its Trainer, and its first event comes after the "
        "Accelerator was made",
    ),
    Seam(
        target="transformers.trainer:Trainer.create_accelerator_and_postprocess",
        wrapper="hf_zero.integrations.transformers.trainer:route_accelerator",
        why="routes a Trainer that has a ZeroCallback, proves that ZeRO is on, and keeps it from "
        "leaking into the next Trainer",
    ),
    Seam(
        target="transformers.trainer:Trainer.create_optimizer",
        wrapper="hf_zero.integrations.transformers.trainer:build_without_bitsandbytes",
        why="names of bitsandbytes' optimizers raise without it; shards do not need its kernels",
    ),
    Seam(
        target="transformers.trainer:Trainer.train",
        wrapper="hf_zero.integrations.transformers.trainer:train_anew",
        why="a second train() destroys the first one's engine, and leaves a sharded model without "
        "values; resuming takes the highest number, torn or not",
    ),
    Seam(
        target="transformers.trainer:Trainer._finalize_training",
        wrapper="hf_zero.integrations.transformers.trainer_checkpoints:end_with_whole_ones",
        why=(
            "a best checkpoint that is damaged, or still being written, ends the job with an error "
            "before the model is saved; with "
            "save_total_limit=1 all others are deleted"
        ),
    ),
    Seam(
        target="transformers.trainer:Trainer._maybe_log_save_evaluate",
        wrapper="hf_zero.integrations.transformers.trainer_checkpoints:save_into_memory",
        why="the end of a step, after its evaluation and its save on disk: the place where a "
        "checkpoint in memory finds the random generators as one on disk does",
    ),
    Seam(
        target="transformers.trainer:Trainer._push_from_checkpoint",
        wrapper="hf_zero.integrations.transformers.trainer_checkpoints:push_whole_ones",
        why="uploads a checkpoint that is still being written, by a thread or by other ranks",
    ),
    Seam(
        target="transformers.trainer:rotate_checkpoints",
        wrapper="hf_zero.integrations.transformers.trainer_checkpoints:keep_whole_ones",
        why="counts torn folders as checkpoints, and a removal that is cut off leaves one more",
    ),
    Seam(
        target="transformers.trainer:Trainer._prepare_for_training",
        wrapper="hf_zero.integrations.transformers.trainer:prepare_engine",
        why="a model that is wrapped in something else than the engine would train "
        "unsharded in silence",
    ),
    Seam(
        target="transformers.trainer:Trainer.get_batch_samples",
        wrapper="hf_zero.integrations.transformers.trainer_phases:take_prepared_batches",
        why="counts the labels of whole sequences, by which the loss of sequences that the engine "
        "cuts would be divided",
    ),
    *(
        Seam(
            f"transformers.trainer:Trainer.{name}",
            f"hf_zero.integrations.transformers.trainer_phases:{wrapper}",
            why,
        )
        for name, wrapper, why in (
            (
                "training_step",
                "train_on_windows",
                "windows of one size are all that the inner loop knows; training_phases make "
                "them grow",
            ),
            (
                "set_initial_training_values",
                "count_windows",
                "counts the epochs of max_steps, and the steps of epochs, by windows of one size",
            ),
            (
                "_init_training_state",
                "resume_windows",
                "skips the data of a resumed run by windows of one size",
            ),
        )
    ),
    Seam(
        target="transformers.trainer:Trainer.get_tp_size",
        wrapper="hf_zero.integrations.transformers.trainer:know_the_tensor_ranks",
        why="divides by autotp_size: 0, and counts tensor-parallel ranks as readers where the "
        "configuration comes by accelerate launch or a callback",
    ),
    Seam(
        target="transformers.trainer:Trainer._track_num_input_tokens",
        wrapper="hf_zero.integrations.transformers.trainer:count_tokens_once",
        why="adds up the tokens of all ranks, also of those that read the same batches",
    ),
    Seam(
        target="transformers.trainer:Trainer._get_grad_norm",
        wrapper="hf_zero.integrations.transformers.trainer:leave_norm_on_device",
        why="reads the norm back in each step, also where it is not logged",
    ),
    Seam(
        target="transformers.trainer:Trainer.log",
        wrapper="hf_zero.integrations.transformers.trainer:add_figures",
        why="the one way to all reporters, TRL's too; a callback gets the logs once the history "
        "has a copy",
    ),
    *(
        Seam(
            target=f"transformers.trainer_callback:{callback}.on_log",
            wrapper="hf_zero.integrations.transformers.trainer:print_without_figures",
            why="a line of the terminal has no room for what reporters get",
        )
        for callback in ("ProgressCallback", "PrinterCallback")
    ),
    Seam(
        target="transformers.trainer:deepspeed_init",
        wrapper="hf_zero.integrations.transformers.trainer:keep_what_was_given",
        why="drops the optimizer and the scheduler of Trainer(optimizers=...) in silence, and sets "
        "the level of our logger",
    ),
    Seam(
        target="transformers.trainer:Trainer.evaluation_loop",
        wrapper="hf_zero.integrations.transformers.trainer:evaluate_raw",
        why="evaluation before training raises at stages 0 to 2 and spoils the "
        "training after it at stage 3",
    ),
    Seam(
        target="transformers.trainer:Trainer.save_model",
        wrapper="hf_zero.integrations.transformers.trainer:save_untrained",
        why="asks an engine that does not exist yet when nothing was trained",
    ),
    Seam(
        target="transformers.trainer:Trainer.create_model_card",
        wrapper="hf_zero.integrations.transformers.trainer:add_run",
        why="the card that is pushed says nothing of stage, ranks, tokens, losses and resumptions",
    ),
    Seam(
        target="transformers.trainer_jit_checkpoint:JITCheckpointCallback.set_trainer",
        wrapper="hf_zero.integrations.transformers.trainer_checkpoints:leave_signals_to_engine",
        why="ranks that get SIGTERM at different moments save at different steps, or wait for "
        "a rank that got none",
    ),
    Seam(
        target="peft.tuners.trainable_tokens.layer:TrainableTokensLayer._collect_token_weights",
        wrapper="hf_zero.integrations.peft.adapters:read_token_rows",
        why="asks torch for the current CUDA device under ZeRO-3, and sends "
        "rows that every rank has",
    ),
    Seam(
        target="peft.utils.save_and_load:get_peft_model_state_dict",
        wrapper="hf_zero.integrations.peft.adapters:read_state_dict",
        why="rank 0 saves alone, and would gather modules that are saved whole and prompt "
        "encoders; other ranks look up keys in {}",
    ),
    Seam(
        target="peft.peft_model:PeftModel.save_pretrained",
        wrapper="hf_zero.integrations.peft.adapters:leave_files_to_rank_0",
        why="ranks without the weights would write an empty adapter over that of rank 0",
    ),
    Seam(
        target="trl.trainer.base_trainer:_BaseTrainer.create_model_card",
        wrapper="hf_zero.integrations.transformers.trainer:add_run",
        why="writes a card of its own, without calling that of the Trainer",
    ),
    Seam(
        target="trl.generation.vllm_generation:VLLMGeneration._iter_named_params",
        wrapper="hf_zero.integrations.trl.rollout_weights:iter_in_buckets",
        why="gathers a unit for each of its parameters, and the whole model to merge adapters",
    ),
    Seam(
        target="trl.experimental.online_dpo.online_dpo_trainer:"
        "OnlineDPOTrainer._move_model_to_vllm_inner",
        wrapper="hf_zero.integrations.trl.rollout_weights:move_in_buckets",
        why="gathers a unit for each of its parameters, and sends each by itself",
    ),
)
