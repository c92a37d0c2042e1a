"""Exercise 12, rungs 2 and 3: choose a layout before anything is queued.

The configuration `mp` of config/mp.yaml, or a wider model, on 8 or 16 A100 of 40 GB, four in a node. For each question
below: which layout fits into memory, and is within 10 % of the fastest that does? Predict first, with these:

  memory: 16 bytes a parameter for weights, gradients and moments, of which ZeRO and FSDP leave 1/N, and beside them the
  activations of the local batch. A model of width D has about 12 D^2 parameters a block, here 12 blocks.
  ranks: dp is what tp leaves, dp x tp = GPUs, and the global batch is a multiple of dp.
  time: tp sends in every block, dp once a step; activation_checkpointing=full computes a third more.

Then ask the planner, which needs no GPU, and mend your answer:

  python plan.py --yaml_config config/mp.yaml --config mp --gpus 16 --global_batch_size 4 --tensor_parallel 2

Fill in the options. Those of use: --tensor_parallel, --sequence_parallel, --data_parallel (ddp, zero1, zero2, fsdp),
--activation_checkpointing full. Done for real by plan.py without a layout. Chapters: docs/data_parallel.md, "The idea",
docs/reference/model_parallel.md, "When tensor wins over context, and the reverse".
"""

# TODO: the options of a layout, as after plan.py; without any it is ddp on all GPUs
ANSWERS = {
    "few samples": "",  # --gpus 16 --global_batch_size 4
    "very wide": "",  # --gpus 16 --global_batch_size 16 --embed_dim 6144 --num_heads 48
    "wide": "",  # --gpus 8 --global_batch_size 8 --embed_dim 4096 --num_heads 32
}
# END
