"""The workloads of `raytraced benchmark`: what is measured against what. Importing this file does not import torch.

A function of the same name (with _ for -) in model_workloads.py or layer_workloads.py measures it.
"""

WORKLOADS = {
    "step": "a training step as `raytraced train` takes it, batch 256: MRE against top-2",
    "epoch": "an epoch of `raytraced train`, loader included: MRE against top-2",
    "rivals": "a training step of every model against that of top-2, all briefly trained",
    "inference": "1,000 images at once: MRE against top-2, and against MLP(36) in plain PyTorch",
    "latency": "single images, one after the other: MRE against MLP(36) in plain PyTorch",
    "kernels": "MRE on 256 images of noise, at initialisation: compiled operations against plain PyTorch",
    "memory": "resident memory that a training step adds at most: compiled operations against plain PyTorch",
    "threads": "a training step of MRE at batch 1,024: two threads against one",
    "sequence": "the activation sequence, forward and backward, batch 256: compiled against plain, and against a step",
    "growth": "the activation sequence, batch 256, as the grid grows: against that of 4×8",
    "costly-experts": "experts 512→2048→512, batch 256: MRE against every expert on every row, and against top-2",
    "peers": "four layers of top-2, forward and backward, batch 256: ours against other libraries'",
    "core-limit": "MRE with experts D→4D→D: against its multiply-adds at the speed of a large matrix product",
}


def chosen(only: str) -> list[str]:
    """The workloads that were asked for by name (all if none was), in the order of the table."""
    asked = {word.replace("_", "-") for word in only.lower().replace(",", " ").split()}
    for name in sorted(asked - set(WORKLOADS)):
        raise ValueError(f"only={only}: {name} is no workload; must be one or more of {', '.join(WORKLOADS)}")
    return [name for name in WORKLOADS if not asked or name in asked]
