"""The numbers that the paper prints."""

# Table 1: accuracy in percent, mean and standard deviation over three seeds.
ACCURACY = {
    "mlp-total": {"mnist": (95.3, 0.4), "fashion-mnist": (86.4, 0.1), "cifar10": (59.7, 0.6)},
    "mlp-avg": {"mnist": (94.8, 0.2), "fashion-mnist": (85.3, 0.8), "cifar10": (59.1, 0.1)},
    "top-k": {"mnist": (95.3, 0.3), "fashion-mnist": (85.1, 0.4), "cifar10": (55.7, 0.9)},
    "threshold": {"mnist": (93.1, 0.9), "fashion-mnist": (85.1, 0.2), "cifar10": (51.3, 6.1)},
    "mre": {"mnist": (96.3, 0.1), "fashion-mnist": (87.1, 0.1), "cifar10": (60.4, 1.2)},
}
ACCURACY["mre-paper"] = ACCURACY["mre"]

# Table 2: total parameters, mean parameters used, mean experts used.
USE = {
    "mnist": (40_202, 20_275, 7.5),
    "fashion-mnist": (40_202, 21_735, 9.4),
    "cifar10": (33_330, 16_520, 11.4),
}

NAMES = {
    "mlp-total": "MLP (36), residual",
    "mlp-avg": "MLP (24), residual",
    "top-k": "Top-2 MoE",
    "threshold": "Threshold MoE",
    "mre": "MRE, our recipe",
    "mre-paper": "MRE, as in the paper",
}
DATA_NAMES = {
    "digits": "Digits",
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "union": "Union (30 classes)",
}
