"""Routers: they choose the experts that run for each vector, and the weight of each expert's output. One file per method.

`raytraced.py` is the method of this package, with its options in `raytraced_config.py`; the other files are baselines.
To add a router:

1. Write a subclass of `raytraced.router.Router` in a new file. Its `route` returns a `Choice` for one step: the active
   experts (B, N), their weights (B, N) and, in training, a loss of its own. A router that needs only the layer's input
   implements `plan` instead, which returns the `Choice` of all steps (B, S, N).
2. Add a line to `MODELS` in `raytraced/models/registry.py`. Keyword arguments of the class become options of the model.

`top_k.py` is the shortest example.
"""
