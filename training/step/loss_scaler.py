"""Loss scaling for float16: the same gradients overflow in every layout.

A data-parallel rank computes the mean loss of its own samples, and a domain-parallel rank multiplies its loss by the
number of ranks that share the image. The mean over these ranks is the gradient of one device, but before it is taken
every number of the backward pass is as many times larger as there are ranks. A rank therefore scales its loss by the
scale of one device divided by their number.

What is summed over samples in float16, the gradient of a weight, is still a sum over fewer samples than on one device.
"""

from typing import Any

import torch

INITIAL_SCALE = 2.0**16  # torch's own


class ScaleOfOneDevice(torch.amp.GradScaler):
    """What a scaler of gradients that are averaged over `ranks` tells and reads: the scale of one device."""

    ranks: int

    def get_scale(self) -> float:
        """The scale that one device has."""
        return super().get_scale() * self.ranks

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of any layout; empty where losses are not scaled."""
        if state_dict:
            super().load_state_dict(own_state(state_dict, self.ranks))


class OwnScaler(ScaleOfOneDevice):
    """A scaler of ranks that hold the same parameters."""

    def __init__(self, device: str, enabled: bool, ranks: int):
        super().__init__(device, init_scale=INITIAL_SCALE / ranks, enabled=enabled)
        self.ranks = ranks


def own_state(state: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The state of a rank's scaler, from that of one device."""
    return state | {"scale": state["scale"] / ranks}
