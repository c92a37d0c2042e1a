"""Tokens must be the patches in row-major order, as the model's convolution reads them, and lead back to the image."""

from types import ModuleType

import torch

from exercises.checks.common import Draw, Wrong, expect, expect_tensor, same
from networks.vit import Attention, Block, PatchEmbed

WORLD_SIZES = (1,)


def on_rank(exercise: ModuleType, rank: int, size: int, draw: Draw) -> None:
    """Check `to_tokens`, `to_image` and the count of weights. Raises Wrong."""
    p = draw.integer(2, 4)
    rows = draw.integer(2, 3)
    columns = draw.integer(4, 5)
    channels = draw.integer(2, 3)
    height = rows * p
    width = columns * p

    # Every number of this image is another one, so that its place can be read off.
    numbers = torch.arange(2.0 * channels * height * width).reshape(2, channels, height, width)
    shape = (2, rows * columns, channels * p * p)
    tokens = expect_tensor(exercise.to_tokens(numbers, p), shape, "the tokens")
    for row in range(rows):
        for column in range(columns):
            number = row * columns + column
            of_row = numbers[:, :, row * p : (row + 1) * p]  # (2, C, p, W)
            patch = of_row[..., column * p : (column + 1) * p].flatten(1)  # (2, C p p)
            compare_token(tokens[:, number], patch, number)

    image = draw.tensor(2, channels, height, width)
    embed = PatchEmbed((p, p), channels, 8)
    weight, bias = embed.proj.parameters()
    by_hand = exercise.to_tokens(image, p) @ weight.flatten(1).T + bias
    expect(same(by_hand, embed(image)), "the tokens times the model's weights are not what its convolution gives")
    back = expect_tensor(exercise.to_image(tokens, p, height, width), numbers.shape, "the image")
    expect(
        same(back, numbers), "to_image(to_tokens(image)) is not the image: is each axis put back where it came from?"
    )

    d = 8 * draw.integer(2, 6)
    block = Block(Attention(d, 4, 0.0), d, 4, 0.0)
    matrices = [weight for weight in block.parameters() if weight.dim() == 2]
    count = sum(matrix.numel() for matrix in matrices)
    got = exercise.weights_of_a_block(d)
    expect(got == count, f"a block of {d} features has {count} weights in its four matrices, not {got}")


def compare_token(token: torch.Tensor, patch: torch.Tensor, number: int) -> None:
    """token: to be `patch`, (b, C p p). Raises Wrong."""
    if torch.equal(token, patch):
        return
    if torch.equal(token.sort().values, patch.sort().values):
        raise Wrong(
            f"token {number} has the numbers of its patch, in another order: channels first, then rows, columns"
        )
    raise Wrong(f"token {number} is not the patch at its place: it mixes points of several patches")
