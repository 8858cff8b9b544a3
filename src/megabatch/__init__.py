"""Exact contrastive training at any batch size."""
