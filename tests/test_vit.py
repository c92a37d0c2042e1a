"""The plain network."""

import pytest
import torch
from torch.nn import functional as F

from networks.vit import LAYER_NORM_EPS, Attention, ImageHead, PatchEmbed, ViT

SMALL = {"in_channels": 3, "out_channels": 5, "embed_dim": 16, "depth": 2, "num_heads": 4}


@pytest.mark.parametrize(("img_size", "patch_size"), [((8, 12), 4), ((8, 12), (2, 3)), ((4, 6, 8), (2, 3, 4))])
def test_image_to_image_in_two_and_three_dimensions(img_size, patch_size):
    model = ViT(img_size, patch_size, **SMALL)
    assert model(torch.randn(2, 3, *img_size)).shape == (2, 5, *img_size)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"img_size": (8, 13)}, r"img_size \[8, 13\] cannot be cut into patches of \[4, 4\]"),
        ({"patch_size": (4, 4, 4)}, r"\[4, 4, 4\] for 2 spatial axes"),
        ({"num_heads": 3}, "embed_dim 16 is not a multiple of num_heads 3"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(change, line):
    with pytest.raises(ValueError, match=line):
        ViT(**({"img_size": (8, 12), "patch_size": 4} | SMALL | change))


def test_attention_is_softmax_of_scaled_products_with_heads_outermost():
    attention, x = Attention(16, 4, 0.0), torch.randn(2, 7, 16)
    expected = []
    for head in range(4):
        rows = attention.qkv.weight[head * 12 : (head + 1) * 12], attention.qkv.bias[head * 12 : (head + 1) * 12]
        q, k, v = F.linear(x, *rows).split(4, dim=-1)
        expected.append((q @ k.transpose(1, 2) / 4**0.5).softmax(-1) @ v)
    torch.testing.assert_close(attention(x), attention.proj(torch.cat(expected, -1)))


def test_tokens_lie_one_after_another_in_memory_so_that_no_layer_copies_them():
    """A convolution leaves channel after channel, and an addition keeps the order of its input."""
    model = ViT((8, 12), 4, **SMALL)
    seen = []
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].is_contiguous()))
    model(torch.randn(2, 3, 8, 12))
    assert seen == [True] * 5


def test_the_head_folds_tokens_back_to_where_the_patches_came_from():
    """With one-hot weights the patch embedding and the head together are the identity."""
    grid, patch = (2, 3), (4, 2)
    embed, head = PatchEmbed(patch, 3, 24), ImageHead(grid, patch, 3, 24)
    with torch.no_grad():
        embed.proj.weight.copy_(torch.eye(24).view(24, 3, *patch))
        head.proj.weight.copy_(torch.eye(24))
        embed.proj.bias.zero_()
        head.proj.bias.zero_()
    x = torch.randn(2, 3, 8, 6)
    torch.testing.assert_close(head(embed(x)), x)


def test_dropout_acts_in_training_only():
    model, x = ViT((8, 12), 4, **SMALL, dropout=0.5), torch.randn(1, 3, 8, 12)
    assert not torch.equal(model(x), model(x))
    model.eval()
    torch.testing.assert_close(model(x), model(x), rtol=0, atol=0)


def test_one_layer_norm_eps_everywhere():
    model = ViT((8, 12), 4, **SMALL)
    assert {m.eps for m in model.modules() if isinstance(m, torch.nn.LayerNorm)} == {LAYER_NORM_EPS}
