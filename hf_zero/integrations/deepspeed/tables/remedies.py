"""What to do instead of names that are not built, and why names are left out."""

from __future__ import annotations

HERE = "hf_zero.integrations.deepspeed"
EXPERT = "hf_zero.parallel.expert"
NO_SEQUENCE_PARALLEL = "use hf_zero.sequence_parallel, or UlyssesSPAttentionHF"
BY_TENSOR_PARALLEL = "write tensor_parallel.autotp_size, or call hf_zero.tensor_parallel"
NO_EXPERTS = (
    "leave the experts in the model: set_z3_leaf_modules gathers them together, and every rank "
    "computes its own tokens"
)
NO_DUALPIPE = "use PipelineModule, with pipeline.schedule in the configuration"
PIPELINE = "hf_zero.parallel.pipeline"
GENERATE = "generate with the engine's module, `engine.module.generate(...)`"
KERNELS = "use the model's own layers, with `kernels` of the configuration"
NO_MONITOR = "log from the training loop, or with the callbacks of the Trainer and Accelerate"
PROFILE = "profile with torch.profiler: the engine's gathers, reductions and updates are spans"
ADAMW = "use an element-wise optimizer such as AdamW"
TRAIN_ADAPTERS = "train adapters of peft over a frozen model"
PROPOSE = "`hf-zero propose` finds a configuration that fits"
GATHERED = "gather parameters with deepspeed.zero.GatheredParameters"
QUANTIZED = "write `zero_quantized_weights`, whose kernels are of hf_zero.ops"
ZENFLOW = "write `offload_optimizer`, whose exact update overlaps the next forward"

INTERNAL = "internal to DeepSpeed's implementation"
BY_CONFIG = "an object of DeepSpeed's configuration reader; hf_zero.ZeroConfig reads configurations"
CONSTANT = "a constant of DeepSpeed's implementation"
BY_LAUNCHER = "hf-zero reads the launcher's variables by itself (hf_zero.distributed.rendezvous)"
BY_HOSTS = "hosts are started by hf_zero.hosts, whichever launcher is asked for"
FILES = "a name of DeepSpeed's file format, which hf_zero.checkpoint.foreign reads"
OWN_OPTIMIZER = "the engine keeps the user's own optimizer object; engine.optimizer is it"
