"""The rows of Lightning in the table of seams."""

from __future__ import annotations

from hf_zero.integrations.seams.seam import Seam

PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # one library under two names

SEAMS: tuple[Seam, ...] = (
    *(
        Seam(
            f"{package}.{target}",
            f"hf_zero.integrations.lightning.wrappers:{wrapper}",
            why,
        )
        for package in PACKAGES
        for target, wrapper, why in (
            (
                "strategies.deepspeed:DeepSpeedStrategy.register_strategies",
                "register_stages",
                "Trainer(strategy='zero_stage_3') is found without an import; the registry asks "
                "each class of Lightning for its names",
            ),
            (
                "strategies.deepspeed:DeepSpeedStrategy.init_deepspeed",
                "go_on_with_an_engine",
                "the model of an engine is given to initialize again (test after fit, fit after "
                "validate), its hooks removed; windows cross epochs",
            ),
            (
                "callbacks.finetuning:BaseFinetuning.filter_on_optimizer",
                "leave_out_by_identity",
                "compares the values of parameters with those of an optimizer, which has shards",
            ),
            (
                "callbacks.finetuning:BaseFinetuning._store",
                "store_names_of_groups",
                "looks for the parameters of an optimizer in the model, and it has shards",
            ),
            (
                "callbacks.finetuning:BaseFinetuning.on_fit_start",
                "add_groups_again",
                "puts other groups in the place of those that an engine steps",
            ),
            (
                "strategies.ddp:DDPStrategy.teardown",
                "keep_engines_in_place",
                "moves the module and the optimizer's state to the CPU, out of an engine that a "
                "later save still needs",
            ),
            (
                "strategies.strategy:Strategy.lightning_module_state_dict",
                "leave_weights_in_shards",
                "makes the model whole on every rank for each checkpoint, and "
                "DeepSpeedStrategy then drops it",
            ),
            (
                "strategies.strategy:Strategy.remove_checkpoint",
                "remove_once_replaced",
                "removes the last whole checkpoint while the new one is still being written; a "
                "removal that is cut off leaves half a folder",
            ),
            (
                "strategies.strategy:Strategy.on_train_end",
                "end_with_whole_ones",
                "a fit returns, and its best_model_path is read, while the last checkpoint "
                "is still being written",
            ),
            (
                "callbacks.model_checkpoint:ModelCheckpoint._find_last_checkpoints",
                "find_whole_ones",
                "ckpt_path='last' takes the newest folder called last, torn or not",
            ),
            (
                "trainer.connectors.checkpoint_connector:_CheckpointConnector._parse_ckpt_path",
                "refuse_torn_ones",
                "a torn folder is met when the model has been made, by an error that knows no "
                "other checkpoint of the run",
            ),
            (
                "trainer.connectors.checkpoint_connector:_CheckpointConnector.resume_start",
                "resume_from_memory",
                "the path of the last checkpoint is chosen before there is an engine, and there "
                "is none where only the memory of the hosts has one",
            ),
            (
                "trainer.connectors.signal_connector:_SignalConnector.register_signal_handlers",
                "save_after_a_step",
                "its handler of SIGTERM broadcasts, and that of a SLURM job saves, inside of "
                "whatever collective is under way: ranks wait for each other without end",
            ),
            (
                "trainer.connectors.accelerator_connector:"
                "_AcceleratorConnector._check_and_init_precision",
                "choose_precision",
                "knows the precision of its own strategies only, and turns fp16 on a CPU into bf16",
            ),
        )
    ),
)
