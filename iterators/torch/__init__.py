"""Resumable loaders, samplers and datasets for torch."""
