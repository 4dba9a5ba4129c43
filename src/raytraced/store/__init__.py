"""Experts on disk: the file that holds them, the memory that they are read into, and the grid that runs them from there."""
