"""``deepspeed.ops``: optimizers, sparse attention, and the builders of operators."""

from __future__ import annotations

from hf_zero.deepspeed.rows import (
    classes_not_built,
    functions_not_built,
    left_out,
    module,
    names,
)
from hf_zero.deepspeed.tables.remedies import (
    CONSTANT,
    GENERATE,
    INTERNAL,
    KERNELS,
)

BUILDERS = names(
    ".op_builders",
    "AsyncIOBuilder CCLCommBuilder CPUAdagradBuilder CPUAdamBuilder CPULionBuilder "
    "DeepCompileBuilder EvoformerAttnBuilder FPQuantizerBuilder FusedAdamBuilder "
    "FusedLambBuilder FusedLionBuilder GDSBuilder InferenceBuilder InferenceCoreBuilder "
    "InferenceCutlassBuilder NotImplementedBuilder OpBuilder PinMemoryBuilder "
    "QuantizerBuilder RaggedOpsBuilder RaggedUtilsBuilder RandomLTDBuilder "
    "ShareMemCommBuilder SparseAttnBuilder SpatialInferenceBuilder "
    "StochasticTransformerBuilder TransformerBuilder UtilsBuilder",
)
CPU_ADAM = names(".optimizers", "DeepSpeedCPUAdam")
FUSED_ADAM = names(".optimizers", "FusedAdam")
LAYERS = classes_not_built(KERNELS, "DeepSpeedTransformerLayer DeepSpeedTransformerConfig")
CPU_LAMB = classes_not_built(
    "take FusedLamb, also with offload", "DeepSpeedCPULamb", base="torch.optim:Optimizer"
)

OPS = (
    module(
        "deepspeed.ops",
        "Optimizers and sparse attention, and which operators are here.",
        names(".op_builders", "__compatible_ops__=COMPATIBLE"),
        LAYERS,
    ),
    module(
        "deepspeed.ops.adagrad",
        "Adagrad.",
        names(".optimizers", "DeepSpeedCPUAdagrad"),
    ),
    module(
        "deepspeed.ops.adam",
        "Adam and AdamW.",
        CPU_ADAM,
        FUSED_ADAM,
        classes_not_built(
            "offload the optimizer: its update overlaps the next forward",
            "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3",
            base="torch.optim:Optimizer",
        ),
    ),
    module("deepspeed.ops.adam.cpu_adam", "Adam on the host.", CPU_ADAM),
    module(
        "deepspeed.ops.adam.fused_adam",
        "Adam of the device.",
        FUSED_ADAM,
        left_out(INTERNAL, "multi_tensor_applier"),
    ),
    module(
        "deepspeed.ops.aio",
        "Files.",
        names(".op_builders", "AsyncIOBuilder"),
    ),
    module("deepspeed.ops.lamb", "Lamb.", names(".optimizers", "FusedLamb"), CPU_LAMB),
    module(
        "deepspeed.ops.lion",
        "Lion.",
        names(".optimizers", "DeepSpeedCPULion FusedLion"),
    ),
    module(
        "deepspeed.ops.op_builder",
        "Which operators are here.",
        BUILDERS,
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.ops.op_builder.all_ops",
        "All of them.",
        names(".op_builders", "ALL_OPS"),
        left_out(INTERNAL, "*"),
    ),
    module(
        "deepspeed.ops.op_builder.builder",
        "What an operator answers.",
        names(".op_builders", "OpBuilder CUDAOpBuilder=OpBuilder"),
        left_out(CONSTANT, "YELLOW END WARNING DEFAULT_TORCH_EXTENSION_PATH"),
        left_out(
            "nothing is compiled on this machine",
            "DEFAULT_COMPUTE_CAPABILITIES MissingCUDAException CUDAMismatchException "
            "installed_cuda_version get_default_compute_capabilities cuda_minor_mismatch_ok "
            "assert_no_cuda_mismatch",
        ),
        left_out(INTERNAL, "probe_is_compatible"),
    ),
    module(
        "deepspeed.ops.sparse_attention",
        "Block-sparse attention.",
        names(".sparse_attention", "SparseAttentionUtils SparseSelfAttention"),
        names(
            "hf_zero.ops.sparse_attention",
            "BSLongformerSparsityConfig BigBirdSparsityConfig DenseSparsityConfig "
            "FixedSparsityConfig LocalSlidingWindowSparsityConfig SparsityConfig "
            "VariableSparsityConfig",
        ),
        classes_not_built(
            "use hf_zero.optimize(model, sparse_attention=config), which keeps the layers",
            "BertSparseSelfAttention",
        ),
    ),
    module(
        "deepspeed.ops.transformer",
        "Layers of transformers.",
        LAYERS,
        classes_not_built(
            GENERATE,
            "DeepSpeedInferenceConfig DeepSpeedTransformerInference DeepSpeedMoEInferenceConfig "
            "DeepSpeedMoEInference",
        ),
    ),
    module(
        "deepspeed.ops.fp_quantizer",
        "Weights in 8 bits and fewer.",
        classes_not_built("load quantised weights", "FP_Quantize Quantizer"),
        functions_not_built("load quantised weights", "matmul_fp8"),
    ),
)
