"""The plain models, and their registry. No process group, mesh or rank is named here."""

# What --model calls a model: its module and class. build_model of training/models/build.py imports it.
MODELS = {
    "vit": "networks.vit:ViT",
    "unet": "networks.unet:UNet",
    "afno": "networks.afno:AFNO",
    "neighborhood": "networks.neighborhood:NeighborhoodTransformer",
    "classifier": "networks.classifier:Classifier",
}
