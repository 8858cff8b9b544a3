"""What is reduced: one file a reduction, with its operators and its blocks in torch operations."""
