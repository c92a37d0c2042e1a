"""Loss scaling among ranks that hold different parameters; a module of its own, because torch's is slow to import."""

import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from training.step.loss_scaler import INITIAL_SCALE, ScaleOfOneDevice


class SharedScaler(ScaleOfOneDevice, ShardedGradScaler):
    """A scaler of ranks that hold different parameters: they agree whether a step has overflowed."""

    def __init__(self, device: str, enabled: bool, ranks: int):
        # The group is named: the default is the one that was there when torch's module was first imported.
        scale = INITIAL_SCALE / ranks
        super().__init__(device, init_scale=scale, enabled=enabled, process_group=dist.group.WORLD)
        self.ranks = ranks

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, and learn whether any rank has one that is not finite."""
        super().unscale_(optimizer)
        if not self.is_enabled():
            return
        per_device = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for found in per_device.values():
            found.clamp_(max=1)  # torch has summed over the ranks; a fused optimizer skips a step at exactly 1

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16=True):
        scalar = found_inf.squeeze()  # as fused optimizers want it
        return super()._unscale_grads_(optimizer, inv_scale, scalar, allow_fp16)
