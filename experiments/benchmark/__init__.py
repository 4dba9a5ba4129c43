"""Ratios of times and of memory, measured side by side in one run: docs/lab/speed.md."""
