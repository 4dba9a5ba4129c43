"""Prints the table of docs/scale.md: a simulation of a training step with experts on many devices. It is no measurement.

How many experts a row runs in each layer is measured: a trained model on images that it was not trained on. All else is
assumed, in `Machine` and `Work`.
"""

from typing import Any, NamedTuple

import torch

import raytraced as rt
from raytraced.tasks.images.loading import load

DEVICES, ROWS = (8, 16, 32, 64, 128, 256), (16, 256, 8192)


class Machine(NamedTuple):
    """What is assumed of devices and of the network between them, in seconds, bytes and operations a second."""

    product_speed: float = 400e12  # of matrix products in bfloat16, as reached, not as printed
    host_devices: int = 8
    host_bandwidth: float = 450e9  # of one device, one way, to others of its host
    network_bandwidth: float = 50e9  # to other hosts
    start: float = 15e-6  # of any exchange, and for each further host
    start_host: float = 2e-6
    look: float = 20e-6  # the host waits for the device, reads counts, and queues anew

    def exchange(self, num_bytes: float, num_devices: int) -> float:
        """Every device sends that many bytes in all, evenly to all devices."""
        hosts = -(-num_devices // self.host_devices)
        outside = 1 - 1 / hosts
        inside = min(num_devices, self.host_devices) / num_devices * (1 - 1 / min(num_devices, self.host_devices))
        sending = max(num_bytes * outside / self.network_bandwidth, num_bytes * inside / self.host_bandwidth)
        return self.start + self.start_host * (hosts - 1) + sending


class Work(NamedTuple):
    """What is assumed of the model: experts D → 4D → D in bfloat16, loads that are even."""

    dim: int = 4096
    sequence: float = 50e-6  # finding all sequences, forward and backward; the kernels were never timed

    def compute(self, pairs: float, machine: Machine) -> float:
        return pairs * 2 * 8 * self.dim**2 / machine.product_speed


def pairs_by_layer() -> list[float]:
    """Experts that a row runs in each layer, measured."""
    model, images = rt.load("mre-digits").eval(), load("digits").test.images
    with torch.no_grad():
        routes = model(torch.as_tensor(images)).routes
    return routes[0].active.sum(-1).mean(0).tolist()


def travel(pairs: float, rows: int, devices: int, machine: Machine, work: Work, halves: bool) -> float:
    """One layer, forward and backward: rows there, experts, rows back; in halves, one travels while the other computes."""
    num = 2 if halves else 1
    way = machine.exchange(rows * pairs / num * 2 * work.dim, devices)
    run = work.compute(rows * pairs / num, machine)
    if halves:
        return sum(2 * way + 2 * max(times * run, way) for times in (1, 2))
    return 4 * way + 3 * run


def layer_by_layer(pairs_L: list[float], *args: Any, halves: bool) -> float:
    """Each layer's router is asked when its input is there: in every layer an exchange of counts, and a look at them."""
    _, devices, machine, _ = args
    return sum(machine.exchange(0, devices) + machine.look + travel(pairs, *args, halves) for pairs in pairs_L)


def planned(pairs_L: list[float], *args: Any) -> float:
    """The whole path first, then one exchange of counts for all layers."""
    _, devices, machine, work = args
    plan = work.sequence + machine.exchange(0, devices) + machine.look
    return plan + sum(travel(pairs, *args, True) for pairs in pairs_L)


def lines() -> list[str]:
    """The table in Markdown."""
    pairs_L, machine, work = pairs_by_layer(), Machine(), Work()
    table = [
        "| rows of a device | devices | layer by layer, ms | the same in halves, ms | planned, ms |",
        "|---:|---:|---:|---:|---:|",
    ]
    for rows in ROWS:
        for devices in DEVICES:
            args = (pairs_L, rows, devices, machine, work)
            times = (layer_by_layer(*args, halves=False), layer_by_layer(*args, halves=True), planned(*args))
            table.append(f"| {rows:,} | {devices} | " + " | ".join(f"{1e3 * time:.2f}" for time in times) + " |")
    return [f"Experts of a row by layer: {', '.join(f'{pairs:.2f}' for pairs in pairs_L)}.", "", *table]


if __name__ == "__main__":
    print("\n".join(lines()))
