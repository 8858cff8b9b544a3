"""The cases that fuzz.py draws, calls and compares."""
