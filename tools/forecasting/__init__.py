"""Forecasts with a trained model: dates, rollout, scores and files.

Gives forecast.py its stages. Imports no other room of tools.
"""
