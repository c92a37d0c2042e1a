"""The plain models, and their registry. No process group, mesh or rank is named here."""

# What --model calls a model: its module and class. build_model of training/model.py imports the one that is asked for.
MODELS = {
    "vit": "networks.vit:ViT",
    "unet": "networks.unet:UNet",
    "afno": "networks.afno:AFNO",
    "neighborhood": "networks.neighborhood:NeighborhoodTransformer",
    "classifier": "networks.classifier:Classifier",
}
