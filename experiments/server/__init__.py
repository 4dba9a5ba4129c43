"""Attacks on a running server and its speed under load; all of it against 127.0.0.1 alone."""
