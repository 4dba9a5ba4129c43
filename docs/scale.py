"""Print the table of docs/lab/scale.md: a simulation, not a measurement, of a training step with experts on many devices.

The number of experts per row and layer is measured, with a trained model on test images. Everything else is assumed, in
`Machine` and `Cost`.
"""

from typing import Any, NamedTuple

import torch

import raytraced as rt
from raytraced.tasks.images.loading import load

DEVICES, ROWS = (8, 16, 32, 64, 128, 256), (16, 256, 8192)


class Machine(NamedTuple):
    """Assumptions about devices and the network between them, in seconds, bytes and operations per second."""

    product_speed: float = 400e12  # of matrix products in bfloat16, as reached, not as printed
    host_devices: int = 8
    host_bandwidth: float = 450e9  # of one device, one way, to others of its host
    network_bandwidth: float = 50e9  # to other hosts
    start: float = 15e-6  # of any exchange, and for each further host
    start_host: float = 2e-6
    read_counts: float = 20e-6  # the host waits for the device, reads counts, and queues again

    def exchange(self, num_bytes: float, num_devices: int) -> float:
        """Every device sends that many bytes in all, evenly to all devices."""
        hosts = -(-num_devices // self.host_devices)
        outside = 1 - 1 / hosts
        inside = min(num_devices, self.host_devices) / num_devices * (1 - 1 / min(num_devices, self.host_devices))
        sending = max(num_bytes * outside / self.network_bandwidth, num_bytes * inside / self.host_bandwidth)
        return self.start + self.start_host * (hosts - 1) + sending


class Cost(NamedTuple):
    """Assumptions about the model: experts D → 4D → D in bfloat16, equal loads."""

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


def in_turn(pairs_L: list[float], rows: int, devices: int, machine: Machine, cost: Cost, num: int) -> float:
    """Layer by layer, rows as a whole or in two halves, of which one is sent while the other computes.

    Each layer's router runs when its input is there: an exchange of counts, which the host then reads.
    """
    time = 0.0
    for pairs in pairs_L:
        way = machine.exchange(rows * pairs / num * 2 * cost.dim, devices)
        run = cost.compute(rows * pairs / num, machine)
        time += machine.exchange(0, devices) + machine.read_counts
        for times in (1, 2):  # forward, backward
            time += 2 * way + (times * run if num == 1 else 2 * max(times * run, way))
    return time


def in_thirds(
    pairs_L: list[float], rows: int, devices: int, machine: Machine, cost: Cost, *, times: int, recount: bool
) -> float:
    """One pass as `raytraced.kernels.sharded_experts` makes it: thirds of the rows in turn, from layer to layer.

    Products and exchanges each keep their order. With `recount`, counts are exchanged and read for each third of
    each layer, and no further product starts before that is done.
    """
    thirds = range(3)
    way_L = [machine.exchange(rows * pairs / 3 * 2 * cost.dim, devices) for pairs in pairs_L]
    run_L = [times * cost.compute(rows * pairs / 3, machine) for pairs in pairs_L]
    computed = sent = 0.0  # when the last product, the last exchange so far ends
    arrives = [0.0] * 3

    def send(duration: float) -> float:
        return max(computed, sent) + duration

    def leave(layer: int, third: int) -> None:
        nonlocal computed, sent
        if recount:
            sent = send(machine.exchange(0, devices))
            computed = sent + machine.read_counts
        arrives[third] = sent = send(way_L[layer])

    for third in thirds:
        leave(0, third)
    turns = [(layer, third) for layer in range(len(pairs_L)) for third in thirds]
    for index, (layer, third) in enumerate(turns):
        computed = max(computed, arrives[third]) + run_L[layer]
        arrives[third] = sent = send(way_L[layer])
        if index:
            layer, third = turns[index - 1]
            computed = max(computed, arrives[third])
            if layer + 1 < len(pairs_L):
                leave(layer + 1, third)
    return max(computed, sent)


def both_passes(pairs_L: list[float], *args: Any, recount: bool) -> float:
    """Forward, then backward from the last layer, with twice the products and all counts known."""
    return in_thirds(pairs_L, *args, times=1, recount=recount) + in_thirds(pairs_L[::-1], *args, times=2, recount=False)


def planned(pairs_L: list[float], *args: Any) -> float:
    """The whole path first, then one exchange of counts for all layers."""
    _, devices, machine, cost = args
    return (
        cost.sequence + machine.exchange(0, devices) + machine.read_counts + both_passes(pairs_L, *args, recount=False)
    )


def seconds(pairs_L: list[float], rows: int, devices: int) -> tuple[float, ...]:
    """Seconds of a step: layer by layer, the same in halves, the same in thirds, planned."""
    args = (pairs_L, rows, devices, Machine(), Cost())
    return in_turn(*args, 1), in_turn(*args, 2), both_passes(*args, recount=True), planned(*args)


def lines() -> list[str]:
    """The table in Markdown."""
    pairs_L = pairs_by_layer()
    table = [
        "| rows of a device | devices | layer by layer, ms | in halves, ms | in thirds, ms | planned, ms |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for rows in ROWS:
        for devices in DEVICES:
            times = seconds(pairs_L, rows, devices)
            table.append(f"| {rows:,} | {devices} | " + " | ".join(f"{1e3 * time:.2f}" for time in times) + " |")
    return [f"Experts of a row by layer: {', '.join(f'{pairs:.2f}' for pairs in pairs_L)}.", "", *table]


if __name__ == "__main__":
    print("\n".join(lines()))
