"""Initial weights that depend on a generator alone."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

MATRICES = nn.Linear | nn.modules.conv._ConvNd
NORMS = nn.LayerNorm | nn.GroupNorm


class InitialWeights(nn.Module):
    """Base of the models: their weights are drawn in one place. reset_parameters() is called at the end of __init__."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights; on the meta device there are none yet."""
        if not any(p.is_meta for p in self.parameters()):
            for name, value in self.initial_weights():
                self.get_parameter(name).copy_(value)

    def initial_weights(self, generator: torch.Generator | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for every parameter, in a fixed order, drawn on the CPU one after the other.

        The values depend on the generator alone (torch's default one if none is given), not on where the model's
        parameters lie or how they are split; a model on the meta device can be asked too.
        """

        def normal(shape: Sequence[int]) -> Tensor:
            return nn.init.trunc_normal_(torch.empty(shape, device="cpu"), std=0.02, generator=generator)

        layers = []
        for name, module in self.named_modules():
            if isinstance(module, MATRICES | NORMS):
                layers.append((name, module))
            else:  # position embeddings
                for own, parameter in module.named_parameters(name, recurse=False):
                    yield own, normal(parameter.shape)
        for name, module in layers:
            shape = module.weight.shape
            yield f"{name}.weight", normal(shape) if isinstance(module, MATRICES) else torch.ones(shape, device="cpu")
            if module.bias is not None:
                yield f"{name}.bias", torch.zeros(module.bias.shape, device="cpu")
