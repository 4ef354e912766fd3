"""Configurations that are refused, each with what is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError, NotBuiltError
from tests.helpers.cells import in_one_item

# A configuration in YAML, and after "=>" the error, of which " ~ " leaves out a part. Indented
# lines continue a row. "2>" resolves the configuration for two ranks, "!" says that the feature is
# not built.
REFUSED = """
{zero: {}} => 'zero' ~ 'zero_optimization'
{overlap_comm: true} => 'overlap_comm' ~ 'zero_optimization.overlap_comm', which has no effect
{zero_optimization.reduce_bucketsize: 1}
    => 'zero_optimization.reduce_bucketsize' ~ 'zero_optimization.reduce_bucket_size', which has no
{autotunin: {enabled: true}} => it resembles 'autotuning', which hf-zero does not provide: remove it
{zero_optimization: {xyzzy: 1}, gradient_clipping: auto}
    => 2 mistakes ~ 'zero_optimization.xyzzy'; known here: ~ still 'auto' ~ gradient_clipping
{3: 1} => 3 is not a name; keys are strings

{zero_optimization: true}
    => zero_optimization = true is not a section ~ write {'zero_optimization': {'stage': …}}
{tensor_parallel: {tp: 2}} => tensor_parallel.tp = 2 is not a section ~ {'tp': {'tp_size': …}}
{quantize_training: {quantize_algo: 3}} => quantize_training.quantize_algo = 3 is not a section
{zero_optimization: {stage: null}} => zero_optimization.stage = null is not an integer from 0 to 3
{gradient_clipping: .inf} => gradient_clipping = Infinity is not a number of at least 0
{communication_data_type: int8} => "int8" is not one of 'fp32', 'bf16', 'fp16'
{steps_per_print: 0} => steps_per_print = 0 is not a positive number of steps or infinity
{optimizer: {type: ""}} => optimizer.type = "" is not a non-empty string
{optimizer: {params: {lr: 0.1}}} => optimizer names no type; write optimizer: {type: …, params: {…}}
{optimizer: {type: Adam, params: {lr: 2020-01-01}}} => is not a section of keys and plain values
{optimizer: {type: Adam, params: {1: 0.1}}} => is not a section of keys and plain values
{optimizer: {type: Adam, params: {max_grad_norm: 1.0}}} => write gradient_clipping: 1.0
{kernels: norms} => is not 'auto', 'off' or a list of names among norms, activations
{activation_checkpointing: {blocks: some}} => blocks = "some"
{activation_offload: {in_flight_bytes: 0}} => in_flight_bytes = 0 ~ at least 1
{timeout: 1.0e+10} => timeout = 10000000000.0 is not a number greater than 0 and at most 1e+09
{host_timeout: 0.5} => host_timeout = 0.5 is not 0 or a number of at least 1
{host_timeout: -15} => host_timeout = -15 is not 0 or a number of at least 1

{host_timeout: 30, timeout: 20} => host_timeout = 30 ~ is above timeout = 20 ~ write at most 20
{nccl: {min_ctas: 8, max_ctas: 4}} => nccl.min_ctas = 8 ~ is above nccl.max_ctas = 4 ~ at most 4
{stage: 2, zero_optimization: {stage: 3}} => zero_optimization.stage = 3 contradicts ~ stage = 2
{gradient_accumulation_dtype: bf16, data_types: {grad_accum_dtype: fp32}}
    => grad_accum_dtype = "fp32" contradicts ~ gradient_accumulation_dtype = "bf16"
{activation_checkpointing: {blocks: 2, number_checkpoints: 3}}
    => blocks = 2 ~ contradicts ~ number_checkpoints = 3 ~ remove one

{zero_optimization: {stage: 3, offload_optimizer: {ratio: 1.5}}} => ratio = 1.5 is not
{zero_optimization: {stage: 3, offload_optimizer: {moments: fp8}}} => moments = "fp8" ~ 'int8'
{zero_optimization: {stage: 3, offload_optimizer: {cpuadam_cores_perc: 0}}} => perc = 0 ~ above 0
{zero_optimization: {stage: 3, offload_optimizer: {device: cpu, buffer_count: auto}}}
    => still 'auto' ~ offload_optimizer.buffer_count
{zero_optimization: {stage: 3, offload_optimizer: {cores: 1.5}}} => cores = 1.5 ~ at most 1
{aio: {block_size: 5000}} => block_size = 5000 ~ a multiple of 4096 bytes
{aio: {thread_count: 2, intra_op_parallelism: 3}} => = 3 contradicts ~ thread_count = 2
{zero_optimization: {cpu_offload: true, offload_optimizer: {device: nvme, nvme_path: /a}}}
    => cpu_offload = true contradicts ~ = "nvme"
! {aio: {use_gds: true}} => use_gds = true asks for reads from NVMe into GPU memory

4> {train_batch_size: 10, train_micro_batch_size_per_gpu: 2}
    => train_batch_size = 10 (config file ds.json: train_batch_size) is not a multiple of
    train_micro_batch_size_per_gpu × ranks = ~ change one of them
4> {train_batch_size: 10, gradient_accumulation_steps: 2}
    => is not a multiple of gradient_accumulation_steps × ranks =
4> {replicate_size: 3} => replicate_size = 3 ~ does not divide 4 ranks: ~ choose a divisor
3> {zero_optimization: {stage: 3, mics_shard_size: 2}} => mics_shard_size = 2 ~ not divide 3 ranks
8> {replicate_size: 2, zero_optimization: {stage: 3, mics_shard_size: 2}}
    => replicate_size = 2 ~ contradicts ~ ranks / mics_shard_size = 8 / 2 = 4; remove one of them
8> {zero_optimization: {stage: 3, zero_hpz_partition_size: 4, mics_shard_size: 2}}
    => zero_hpz_partition_size = 4 ~ does not divide the 2 ranks
8> {zero_optimization: {stage: 2, zero_hpz_partition_size: 4}} => 4 ~ gathers of stage 3
3> {train_batch_size: 7, replicate_size: 2, tensor_parallel: {autotp_size: 2}} => 3 mistakes

2> {zero_optimization: {stage: 0}, compressed_communication: {bits: 4}}
    => compressed_communication ~ = ~ write zero_optimization.stage: 1
2> {zero_optimization: {stage: 0, zero_quantized_gradients: true}}
    => zero_quantized_gradients = ~ stage 0 has an all-reduce; write ~ stage: 1
2> {zero_optimization: {stage: 0, zero_quantized_weights: true}}
    => zero_quantized_weights = ~ at stage 0 weights are whole; remove it$
2> {zero_optimization: {stage: 3}, zeropp_loco_param: {err_beta: 0.8}}
    => zeropp_loco_param ~ = ~ needs gradients ~ write ~ zero_quantized_gradients: true
2> {zero_optimization: {stage: 1, zero_quantized_nontrainable_weights: true}}
    => zero_quantized_nontrainable_weights = ~ weights are whole; remove it$
2> {zero_optimization: {stage: 0, zero_quantized_weights: true, zero_quantized_gradients: true}}
    => zero_quantized_gradients = ~ zero_quantized_weights =
2> {zero_optimization: {stage: 1}, compressed_communication: {bits: 4, block_size: 2048}}
    => block_size = 2048 ~ is for 1 bit; write 1024 or less
2> {zero_optimization: {stage: 2, zero_quantized_gradients: true,
    zeropp_loco_param: {err_beta: 1.0}}} => err_beta = 1.0 ~ takes in no error at all

! {nebula: {enabled: true}} => use checkpoint.async_save; remove the key or write
! {tensor_parallel: {preset_model: llama}} => tensor_parallel.preset_model = ~ does not provide
! {hybrid_engine: {enabled: true}, autotuning: {enabled: true}}
    => 2 mistakes in the configuration: ~ hybrid engine ~ autotuning

{deepspeed_config: {zero_stag: 3}} => 'deepspeed_config.zero_stag' ~ 'zero_stage'
{deepspeed_config: {}, zero_stage: 3} => beside Accelerate's own; put 'zero_stage' under deepspeed_c
{distributed_type: MULTI_GPU}
    => distributed_type = "MULTI_GPU" does not train with ZeRO; write distributed_type: DEEPSPEED
{distributed_type: FSDP, fsdp_config: {fsdp_version: 2}}
    => distributed_type = "FSDP": the file is for FSDP; `hf-zero migrate ds.json -o zero3.yaml`
{deepspeed_config: 3} => deepspeed_config = 3 is not a section ~ write deepspeed_config: {zero_stage
{deepspeed_config: {zero3_init_flag: "yes"}} => zero3_init_flag = "yes" is not true
{deepspeed_config: {gradient_clipping: auto}} => gradient_clipping (config file ds.json:
{deepspeed_config: {deepspeed_config_file: no.json}} => config file no.json does not exist
! {deepspeed_config: {}, mixed_precision: fp8} => mixed_precision = "fp8" ~ write bf16
! {deepspeed_config: {}, fsdp_config: {fsdp_version: 2}} => fsdp_config asks for FSDP
! {deepspeed_config: {}, megatron_lm_config: {x: 2}} => megatron_lm_config asks for Megatron-LM
{deepspeed_config: {}, parallelism_config: {parallelism_config_cp_size: 2,
    parallelism_config_sp_size: 2}}
    => parallelism_config has both ~ write the other as
"""
ROWS = re.split(r"\n(?=[^\s])", re.sub(r"(?m)^(#.*)?\n", "", REFUSED).strip())


@in_one_item(ROWS)
def test_what_cannot_be_meant(row: str) -> None:
    given, said = re.sub(r"\s*\n\s*", " ", row).split(" => ")
    ranks, unbuilt, written = re.fullmatch(r"(?:(\d+)> )?(! )?(.*)", given).groups()
    with pytest.raises((ConfigError, NotBuiltError)) as caught:
        made = ZeroConfig.from_dict(yaml.safe_load(written), source="config file ds.json")
        if ranks:
            made.resolve(int(ranks))
    assert type(caught.value) is (NotBuiltError if unbuilt else ConfigError)
    parts = map(re.escape, said.removesuffix("$").split(" ~ "))
    end = r"\Z" if said.endswith("$") else ""
    assert re.search(f"(?s){'.*'.join(parts)}{end}", str(caught.value)), str(caught.value)


def test_paths_that_cannot_be_meant() -> None:
    said = r"offload_param\.device = 'nvme' .* names no folder .*nvme_path"
    for path in (None, "none", []):
        with pytest.raises(ConfigError, match=said):
            ZeroConfig(3, offload_param={"device": "nvme", "nvme_path": path})
    said = r"offload_param\.nvme_path = .* is not a path, or a list of different paths"
    for wrong in ("/a,/b", "", 3, ["/a", "/a"], ["/a", ""], "/a\0b", Path("/a\0b")):
        with pytest.raises(ConfigError, match=said):
            ZeroConfig(3, offload_param={"device": "nvme", "nvme_path": wrong})


def test_keywords() -> None:
    for keywords, said in (
        ({"hybrid_engine": {}}, "'hybrid_engine'; .* use ZeroConfig.from_dict"),
        ({"fp16": True, "bf16": True}, r"fp16.enabled \(keyword\) and bf16.enabled \(keyword\)"),
        ({"stage": 4, "gradient_cliping": 1.0, "hybrid_engine": {}}, "(?s)3 mistakes.*stage = 4"),
    ):
        with pytest.raises(ConfigError, match=said):
            ZeroConfig(**{"stage": 3, **keywords})
