"""The rows of ``api.py``, by subject; remedies for names that are not built, and reasons why names
are left out, that several rows give.
"""

from __future__ import annotations

EXPERT = "hf_zero.parallel.expert"
NO_SEQUENCE_PARALLEL = "use hf_zero.sequence_parallel, or UlyssesSPAttentionHF"
BY_TENSOR_PARALLEL = "write tensor_parallel.autotp_size, or call hf_zero.tensor_parallel"
NO_DUALPIPE = "use PipelineModule, with pipeline.schedule in the configuration"
PIPELINE = "hf_zero.parallel.pipeline"
GENERATE = "generate with the engine's module, `engine.module.generate(...)`"
QUANTIZED_MODEL = "load the model with its weights quantised"
KERNELS = "use the model's own layers, with `kernels` of the configuration"
PROFILE = "profile with torch.profiler: the engine's gathers, reductions and updates are spans"
TRAIN_ADAPTERS = "train adapters of peft over a frozen model"
PROPOSE = "`hf-zero estimate MODEL --fit` finds a configuration that fits"
GATHERED = "gather parameters with deepspeed.zero.GatheredParameters"
QUANTIZED = "write `zero_quantized_weights`, whose kernels are of hf_zero.ops"
ZENFLOW = "write `offload_optimizer`, whose exact update overlaps the next forward"

INTERNAL = "internal to DeepSpeed's implementation"
BY_CONFIG = "an object of DeepSpeed's configuration reader; hf_zero.ZeroConfig reads configurations"
CONSTANT = "a constant of DeepSpeed's implementation"
BY_LAUNCHER = "hf-zero reads the launcher's variables by itself (hf_zero.distributed.rendezvous)"
BY_HOSTS = "hosts are started by hf_zero.launch, whichever launcher is asked for"
FILES = "a name of DeepSpeed's file format, which hf_zero.checkpoint.foreign reads"
OWN_OPTIMIZER = "the engine keeps the user's own optimizer object; engine.optimizer is it"
TORCH_GROUPS = "call deepspeed.init_distributed, and then torch.distributed"
