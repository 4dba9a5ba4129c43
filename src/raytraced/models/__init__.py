"""Whole models, each around a routed layer of any kind, and the table that builds them by name."""
