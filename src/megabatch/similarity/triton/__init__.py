"""Fused Triton kernels: tiles of the similarity matrix that never leave the registers."""
