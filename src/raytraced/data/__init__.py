"""Verified arrays of bytes from the cache or from public sources; the tasks know what they mean."""
