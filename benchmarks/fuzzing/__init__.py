"""What fuzz.py draws, calls and compares."""
