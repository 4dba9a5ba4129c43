"""Verified arrays of bytes from wherever they can be had; what they mean is a task's business."""
