"""The rows of Transformers in the table of seams."""

from __future__ import annotations

from hf_zero.integrations.seams.seam import Seam

TRANSFORMERS = ">=5.17,<5.24"

SEAMS: tuple[Seam, ...] = (
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
        why="the loader gets tensors that have not been read",
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
        why="missing weights start as whatever is in memory, which looks like values",
    ),
    Seam(
        target="transformers.modeling_utils:PreTrainedModel._from_config",
        signature="(cls, config, **kwargs)",
        wrapper="hf_zero.integrations.transformers.loading:build_in_shards",
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
        why="a sharded model is gathered once for all tokens where it fits; else ranks, and those "
        "that hold parts of its layers or other experts, keep together until the last one is done",
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
        target="transformers.integrations.deepspeed:"
        "HfTrainerDeepSpeedConfig.trainer_config_process",
        signature="(self, args, auto_find_batch_size=False)",
        wrapper="hf_zero.integrations.transformers.trainer_route:fill_from_arguments",
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
        target="transformers.trainer:Trainer._maybe_log_save_evaluate",
        signature="(self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, "
        "start_time, learning_rate=None)",
        wrapper="hf_zero.integrations.transformers.trainer_checkpoints:save_into_memory",
        versions=TRANSFORMERS,
        why="the end of a step, after its evaluation and its save on disk: the place where a "
        "checkpoint in memory finds the random generators as one on disk does",
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
        target="transformers.trainer:Trainer.get_batch_samples",
        signature="(self, epoch_iterator, num_batches, device)",
        wrapper="hf_zero.integrations.transformers.trainer_phases:take_prepared_batches",
        versions=TRANSFORMERS,
        why="counts the labels of whole sequences, by which the loss of sequences that the engine "
        "cuts would be divided",
    ),
    *(
        Seam(
            f"transformers.trainer:Trainer.{name}",
            signature,
            f"hf_zero.integrations.transformers.trainer_phases:{wrapper}",
            TRANSFORMERS,
            why,
        )
        for name, signature, wrapper, why in (
            (
                "training_step",
                "(self, model, inputs, num_items_in_batch=None)",
                "train_on_windows",
                "windows of one size are all that the inner loop knows; training_phases make "
                "them grow",
            ),
            (
                "set_initial_training_values",
                "(self, args, dataloader)",
                "count_windows",
                "counts the epochs of max_steps, and the steps of epochs, by windows of one size",
            ),
            (
                "_init_training_state",
                "(self, max_steps, num_update_steps_per_epoch, num_train_epochs, "
                "resume_from_checkpoint, trial)",
                "resume_windows",
                "skips the data of a resumed run by windows of one size",
            ),
        )
    ),
    Seam(
        target="transformers.trainer:Trainer.get_tp_size",
        signature="(self)",
        wrapper="hf_zero.integrations.transformers.trainer:know_the_tensor_ranks",
        versions=TRANSFORMERS,
        why="divides by autotp_size: 0, and counts tensor-parallel ranks as readers where the "
        "configuration comes by accelerate launch or a callback",
    ),
    Seam(
        target="transformers.trainer:Trainer._track_num_input_tokens",
        signature="(self, inputs)",
        wrapper="hf_zero.integrations.transformers.trainer:count_tokens_once",
        versions=TRANSFORMERS,
        why="adds up the tokens of all ranks, also of those that read the same batches",
    ),
    Seam(
        target="transformers.trainer:Trainer._get_grad_norm",
        signature="(self, model, grad_norm=None)",
        wrapper="hf_zero.integrations.transformers.trainer:leave_norm_on_device",
        versions=TRANSFORMERS,
        why="reads the norm back in each step, also where it is not logged",
    ),
    Seam(
        target="transformers.trainer:Trainer.log",
        signature="(self, logs, start_time=None)",
        wrapper="hf_zero.integrations.transformers.trainer:add_figures",
        versions=TRANSFORMERS,
        why="the one way to all reporters, TRL's too; a callback gets the logs once the history "
        "has a copy",
    ),
    *(
        Seam(
            target=f"transformers.trainer_callback:{callback}.on_log",
            signature="(self, args, state, control, logs=None, **kwargs)",
            wrapper="hf_zero.integrations.transformers.trainer:print_without_figures",
            versions=TRANSFORMERS,
            why="a line of the terminal has no room for what reporters get",
        )
        for callback in ("ProgressCallback", "PrinterCallback")
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
    Seam(
        target="transformers.trainer_jit_checkpoint:JITCheckpointCallback.set_trainer",
        signature="(self, trainer)",
        wrapper="hf_zero.integrations.transformers.trainer_checkpoints:leave_signals_to_engine",
        versions=TRANSFORMERS,
        why="ranks that get SIGTERM at different moments save at different steps, or wait for "
        "a rank that got none",
    ),
)
