"""Exercise 14, rung 1: from an image to tokens, and back.

A vision transformer works on tokens. It cuts an image of H x W points into patches of p x p points, row by row: patch 0
is at the top left, patch 1 to its right. A patch of C channels has C p p numbers, and these are its token, first the
channels, then the rows of the patch, then its columns. At the end the model does the reverse with its output.

Both are a matter of `reshape` (or `unflatten`, `flatten`) and `permute`: no loop, no copy of your own.

Done for real in networks/vit.py: PatchEmbed does the first step inside a convolution, ImageHead the reverse. Chapter:
docs/model_and_data.md, "The model".
"""

from torch import Tensor


def to_tokens(image: Tensor, p: int) -> Tensor:
    """The patches of an image as tokens: (b, C, H, W) -> (b, N, C p p), with N = H / p x W / p."""
    # TODO: which axes does each patch come from, and in which order?
    b, channels, height, width = image.shape
    x = image.reshape(b, channels, height // p, p, width // p, p)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(b, -1, channels * p * p)
    # END


def to_image(tokens: Tensor, p: int, height: int, width: int) -> Tensor:
    """The image of which these are the tokens: (b, N, C p p) -> (b, C, H, W)."""
    # TODO: the reverse
    b, _, numbers = tokens.shape
    x = tokens.reshape(b, height // p, width // p, numbers // (p * p), p, p)
    return x.permute(0, 3, 1, 4, 2, 5).reshape(b, -1, height, width)
    # END


def weights_of_a_block(d: int) -> int:
    """Weights of the matrices of a block with d features: qkv, proj, fc1 and fc2 (mlp_ratio 4), without biases."""
    # TODO: a formula
    return (3 + 1 + 4 + 4) * d * d
    # END
