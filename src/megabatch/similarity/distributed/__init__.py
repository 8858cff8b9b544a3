"""Groups of ranks, and the schedules by which they exchange features and results."""
