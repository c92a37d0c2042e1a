"""Models of public libraries, unchanged, on split images: outputs, gradients and running statistics of the whole."""

import importlib
import importlib.util
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distributed.shard_tensor import ShardTensor, local, part_of
from tests.support.shard_parity import X, domain_mesh, draw, split

TOLERANCE = 1e-8  # relative, in float64


def library(name):
    """A library, even where torchvision is of another build than torch, so that it lacks its compiled operations."""
    with warnings.catch_warnings(), mock.patch.object(torch.library, "register_fake", lambda *args: lambda f: f):
        warnings.simplefilter("ignore")
        importlib.import_module("torchvision")
    return importlib.import_module(name)


def timm(name, **options):
    """A model of timm with 5 classes."""
    return lambda: library("timm").create_model(name, num_classes=5, **options)


def smp(name, **options):
    """A model of segmentation-models-pytorch on a narrow encoder."""
    return lambda: getattr(library("segmentation_models_pytorch"), name)(
        "timm-mobilenetv3_small_minimal_100", encoder_weights=None, classes=2, **options
    )


def monai(name, *args, **options):
    return lambda: getattr(library("monai.networks.nets"), name)(*args, **options)


def transformers(name, **options):
    def build():
        module = library("transformers")
        config = getattr(module, name + "Config")(**options)
        return getattr(module, name + "Model")(config)

    return build


def diffusers(name, **options):
    model = lambda: getattr(library("diffusers"), name)(**options)  # noqa: E731
    return lambda: Timed(model())


class Timed(nn.Module):
    """A model that also takes a time."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x, 3).sample


def timm_class(name, **options):
    """A class of timm, where its named models do not let their sizes be chosen."""
    module, name = name.split(".")
    return lambda: getattr(library(f"timm.models.{module}"), name)(num_classes=5, **options)


VIT = {"embed_dim": 12, "depth": 2, "num_heads": 2, "patch_size": 8, "img_size": 64}
SMALL = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
STAGES = {"depths": (1, 1, 2), "num_heads": (1, 2, 2), "embed_dim": 8, "img_size": 64, "drop_path_rate": 0.0}
WIDTHS = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
HYBRID = {"img_size": 128, "depths": (1, 1), "embed_dim": (32, 32), "stem_width": 8}
WINDOWS = {"image_size": 64, "embed_dim": 8, "depths": (1, 2), "num_heads": (1, 2), "window_size": 3}
MONAI = (2, 3, 2, (4, 8, 8), (2, 2))
MODELS = {
    # convolutional
    "resnet": timm("resnet10t"),
    "mobilenetv3": timm("mobilenetv3_small_050", drop_rate=0.0),
    "lcnet": timm("lcnet_035", drop_rate=0.0),
    "convnext": timm("convnext_atto", **WIDTHS),
    "convnextv2": timm("convnextv2_atto", **WIDTHS),
    "densenet": timm("densenet121", growth_rate=4, block_config=(2, 2, 2, 2)),
    "regnetx": timm("regnetx_002"),
    "mambaout": timm("mambaout_femto", **WIDTHS),
    "inception_next": timm_class("inception_next.MetaNeXt", depths=(1, 1, 1, 1), dims=(16, 16, 16, 16)),
    "metaformer": timm_class("metaformer.MetaFormer", **WIDTHS),
    "focalnet": timm_class("focalnet.FocalNet", depths=(1, 1), embed_dim=8),
    "edgenext": timm_class("edgenext.EdgeNeXt", depths=(1, 1, 1, 2), dims=(8, 8, 16, 16)),
    # windows
    "swin": timm("swin_tiny_patch4_window7_224", window_size=4, **STAGES),
    "swin_padded": timm("swin_tiny_patch4_window7_224", window_size=3, **STAGES),
    "swinv2": timm("swinv2_tiny_window8_256", window_size=4, **STAGES),
    "maxvit": timm("maxvit_rmlp_pico_rw_256", **HYBRID),
    "coatnet": timm("coatnet_pico_rw_224", **HYBRID),
    "twins": timm("twins_svt_small", depths=(1, 1), embed_dims=(8, 8), num_heads=(1, 1), img_size=64),
    "davit": timm("davit_tiny", depths=(1, 1), embed_dims=(8, 16), num_heads=(1, 2)),
    "hiera": timm("hiera_tiny_224", img_size=64, stages=(1, 1, 1, 1), embed_dim=8),
    "nest": timm_class("nest.Nest", img_size=64, embed_dims=(8, 8, 16), num_heads=(1, 1, 2), depths=(1, 1, 1)),
    # transformers with and without class tokens
    "vit": timm("vit_tiny_patch16_224", **VIT),
    "vit_pooled": timm("vit_tiny_patch16_224", class_token=False, global_pool="avg", **VIT),
    "vit_registers": timm("vit_small_patch14_reg4_dinov2", **VIT),
    "deit": timm("deit_tiny_distilled_patch16_224", **VIT),
    "deit3": timm("deit3_small_patch16_224", **VIT),
    "beit": timm("beit_base_patch16_224", **VIT),
    "cait": timm("cait_xxs24_224", **VIT),
    "xcit": timm("xcit_nano_12_p8_224", **VIT),
    "mixer": timm_class("mlp_mixer.MlpMixer", embed_dim=8, num_blocks=2, patch_size=8, img_size=64),
    # segmentation
    "unet": smp("Unet"),
    "linknet": smp("Linknet"),
    "fpn": smp("FPN"),
    "pspnet": smp("PSPNet"),
    "monai_unet": monai("UNet", *MONAI),
    "monai_attention_unet": monai("AttentionUnet", *MONAI),
    "monai_segresnet": monai("SegResNet", 2, 8, 3, 2),
    "monai_swin_unetr": monai("SwinUNETR", 3, 2, depths=(1, 1, 1, 1), feature_size=12, spatial_dims=2),
    "monai_unetr": monai(
        "UNETR", 3, 2, (64, 64), spatial_dims=2, feature_size=4, hidden_size=12, mlp_dim=16, num_heads=2
    ),
    # transformers, diffusers
    "hf_vit": transformers("ViT", image_size=64, patch_size=8, **SMALL),
    "hf_dinov2": transformers("Dinov2", image_size=64, patch_size=8, **SMALL),
    "hf_swin": transformers("Swin", **WINDOWS),
    "hf_swinv2": transformers("Swinv2", **WINDOWS),
    "hf_segformer": transformers(
        "Segformer", depths=(1, 1, 1, 1), hidden_sizes=(8, 8, 16, 16), num_attention_heads=(1, 1, 2, 2)
    ),
    "hf_convnext": transformers("ConvNext", depths=(1, 1), hidden_sizes=(8, 16), num_stages=2),
    "hf_resnet": transformers("ResNet", embedding_size=8, hidden_sizes=(8, 16), depths=(1, 1)),
    "hf_focalnet": transformers("FocalNet", embed_dim=8, depths=(1, 1), hidden_sizes=(8, 16)),
    "hf_donut": transformers("DonutSwin", **WINDOWS),
    "unet2d": diffusers(
        "UNet2DModel", in_channels=3, out_channels=3, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4,
        attention_head_dim=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ),
}  # fmt: skip


def outputs(y):
    """All tensors in the output of a model, in order."""
    if isinstance(y, torch.Tensor):
        return [y]
    values = y.values() if hasattr(y, "values") else y
    return [x for value in values if value is not None for x in outputs(value)]


def close(found, expected, what, scale=None):
    scale = max(expected.abs().max().item() if scale is None else scale, 1e-3) if expected.numel() else 1.0
    wrong = (found - expected).abs().max().item() / scale if expected.numel() else 0.0
    assert wrong < TOLERANCE, f"{what}: {wrong:.1e}"


def compare(name, splits, sizes, mesh):
    """One step of a model in training mode, on whole and on split images."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(MODELS[name]().double().train())
    for module in (m for model in models for m in model.modules()):
        if "Dropout" in type(module).__name__ or "DropPath" in type(module).__name__:
            module.p = module.drop_prob = 0.0
    size = 128 if name in ("maxvit", "coatnet") else 64
    full = draw((2, 3, size, size), torch.float64, 1)
    sizes = {m: tuple(n * size // 64 for n in cut) for m, cut in sizes.items()}
    part = split(full, X(tuple(full.shape), splits, sizes), domain_mesh(mesh))
    total = found_total = 0
    torch.manual_seed(1)
    expected = outputs(models[0](full))
    torch.manual_seed(1)
    found = outputs(models[1](part))
    assert len(found) == len(expected)
    for i, (y, z) in enumerate(zip(expected, found, strict=True)):
        close(z.full_tensor() if isinstance(z, ShardTensor) else z, y, f"output {i}")
        weight = draw(y.shape, torch.float64, 90 + i).detach()
        total, found_total = total + (y * weight).sum(), found_total + (z * weight).sum()
    total.backward()
    found_total.backward()
    close(local(part.grad), part_of(full.grad, part.spec), "gradient of the image", full.grad.abs().max().item())
    scale = max(p.grad.abs().max().item() for p in models[0].parameters() if p.grad is not None)
    for (parameter, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        grad = torch.zeros_like(q) if q.grad is None else local(q.grad)
        dist.all_reduce(grad)
        close(grad, torch.zeros_like(p) if p.grad is None else p.grad, f"gradient of {parameter}", scale)
    for (buffer, b), c in zip(models[0].named_buffers(), models[1].buffers(), strict=True):
        if b.is_floating_point():
            close(local(c), b, buffer)


LAYOUTS = {
    "bands": SimpleNamespace(ranks=2, splits=(2,), sizes={0: (32, 32)}, mesh=()),
    "cut anywhere": SimpleNamespace(ranks=3, splits=(2,), sizes={0: (19, 30, 15)}, mesh=()),
    "tiles": SimpleNamespace(ranks=4, splits=(2, 3), sizes={0: (32, 32), 1: (24, 40)}, mesh=(2, 2)),
}


def every_model(layout):
    """The models that this layout computes otherwise than the whole, and why."""
    how, found = LAYOUTS[layout], {}
    for name in MODELS:
        try:
            compare(name, how.splits, how.sizes, how.mesh)
        except (AssertionError, NotImplementedError) as wrong:
            found[name] = str(wrong)
    return found


@pytest.mark.nightly
@pytest.mark.slow("models that nobody here wrote")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_models_of_public_libraries_compute_as_on_whole_images(ranks, layout):
    for name in ("timm", "transformers", "diffusers", "segmentation_models_pytorch", "monai", "torchvision"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    assert ranks(LAYOUTS[layout].ranks, every_model, layout, timeout=280)[0] == {}
