"""Loaders, samplers and datasets for torch, resumable in our order."""
