"""Where a tile of the similarity matrix is computed: torch operations or Triton kernels."""
