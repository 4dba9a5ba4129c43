"""Experts that do not fit into memory: what knowing the path beforehand is worth, against guessing it.

Which experts a token runs is what small decoders chose after a short training on Python sources, on text that they did not
see. The store's experts have the size of a larger model's and random numbers. The aims are in benchmarks/aims-store.md.
"""
