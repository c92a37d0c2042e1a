"""Forecasts in training: several steps and several members, their losses, scores and pictures.

It gives tasks and tools what they score with. It imports no other room of training/.
"""
