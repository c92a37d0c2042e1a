"""Forecasts with a trained model: dates, rollout, scores and files."""
