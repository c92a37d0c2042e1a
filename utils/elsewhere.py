"""Options of programs that users come from, and what takes their place here. docs/coming_from.md is the page of it."""

BATCH = "--global_batch_size (of all devices) or --local_batch_size (of one device)"

OF_TUTORIALS = {  # NERSC's deep learning at scale
    "batch_size": BATCH,
    "enable_apex": "--enable_fused (torch's own fused optimizer)",
    "enable_benchy": "python benchmark.py data",
    "enable_manual_profiling": "ENABLE_PROFILING=1 (Nsight Systems) or --profile torch",
    "enable_amp": "--amp_mode bf16, or fp16",
    "num_epochs": "--num_iters",
    "use_shifter": "CONTAINER=shifter IMAGE=... in the environment (docs/launch.md)",
}

OF_DEEPSPEED = {
    "deepspeed": "--data_parallel zero1, zero2 or fsdp (stages 1, 2, 3)",
    "deepspeed_config": "--yaml_config and --config; docs/coming_from.md has the keys",
    "zero_stage": "--data_parallel zero1, zero2 or fsdp (stages 1, 2, 3)",
    "train_batch_size": BATCH,
    "train_micro_batch_size_per_gpu": "--local_batch_size with --gradient_accumulation",
    "gradient_accumulation_steps": "--gradient_accumulation",
    "gradient_clipping": "--clip_grad_norm",
    "reduce_bucket_size": "--bucket_cap_mb, in MiB",
    "offload_optimizer": "--cpu_offload",
    "offload_param": "--cpu_offload",
}

OF_MEGATRON = {
    "tensor-model-parallel-size": "train_mp.py --tensor_parallel",
    "pipeline-model-parallel-size": "train_mp.py --pipeline_parallel",
    "context-parallel-size": "train_mp.py --context_parallel",
    "cp-comm-type": "--cp_method gather, ring or all_to_all",
    "sequence-parallel": "--sequence_parallel",
    "num-layers-per-virtual-pipeline-stage": "--pp_schedule interleaved",
    "use-distributed-optimizer": "--data_parallel zero1",
    "overlap-grad-reduce": "no option: reductions always run beside the backward pass",
    "micro-batch-size": "--local_batch_size with --gradient_accumulation",
    "global-batch-size": "--global_batch_size",
    "recompute-granularity": "--activation_checkpointing full or selective",
    "recompute-activations": "--activation_checkpointing selective",
    "clip-grad": "--clip_grad_norm",
    "train-iters": "--num_iters",
    "save": "--expdir and --run_num: a run keeps its checkpoints, and goes on from them",
    "load": "--expdir and --run_num: a run keeps its checkpoints, and goes on from them",
    "save-interval": "--checkpoint_every",
    "log-interval": "--log_every",
    "bf16": "--amp_mode bf16",
    "fp16": "--amp_mode fp16",
    "hidden-size": "--embed_dim",
    "num-layers": "--depth",
    "num-attention-heads": "--num_heads",
    "enable-cuda-graph": "--enable_cuda_graphs",
}

OF_FSDP = {
    "sharding_strategy": "--data_parallel: fsdp is FULL_SHARD, zero2 SHARD_GRAD_OP, hsdp HYBRID_SHARD",
    "backward_prefetch": "--prefetch, in units",
    "auto_wrap_policy": "--wrap_policy block, size or none",
    "state_dict_type": "no option: a checkpoint is read by every layout, and a run ends with one file of weights",
    "nproc_per_node": "torchrun --nproc_per_node, in front of the script",
}

ELSEWHERE = OF_TUTORIALS | OF_DEEPSPEED | OF_MEGATRON | OF_FSDP
