"""GPUs and their links by their data sheets, and how much of that is reached."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class DataSheet:
    """A GPU and its links: bytes a second are of one direction, FLOPs of dense bf16 products.

    `linked` GPUs share fast links (NVLink); beyond them messages take the network.
    """

    flops: float
    memory_bandwidth: float
    memory_bytes: int
    link_bandwidth: float
    network_bandwidth: float
    linked: int


# By the names that `gpu_type` of a cluster's profile has. Of a network of 400 Gb/s for each GPU.
GPUS = {
    "a100": DataSheet(312e12, 2.04e12, 80 * GIB, 300e9, 25e9, 8),
    "h100": DataSheet(989e12, 3.35e12, 80 * GIB, 450e9, 50e9, 8),
    "h200": DataSheet(989e12, 4.8e12, 141 * GIB, 450e9, 50e9, 8),
    "b200": DataSheet(2250e12, 8.0e12, 180 * GIB, 900e9, 50e9, 8),
    "gb200": DataSheet(2500e12, 8.0e12, 186 * GIB, 900e9, 50e9, 72),
}


@dataclass(frozen=True)
class Efficiencies:
    """The shares of a data sheet's numbers that are reached, and latencies in seconds.

    `dense` and `experts` are of the FLOPs, in dense and in grouped products; `memory` of the
    bandwidth, in decoding; `link` and `network` of the bandwidths. `layer` is the least time of a
    layer's forward pass in training, which its kernels take to launch; `decode_layer` the time that
    a layer adds to a decoding step beside arithmetic and memory; `reduce` and `far_reduce` the
    latency of an all-reduce over linked GPUs and over the network; `load` the time that an engine
    takes to load one tensor of a weight sync; `step` what a step with rollouts takes besides.
    """

    dense: float
    experts: float
    memory: float
    link: float
    network: float
    layer: float
    decode_layer: float
    reduce: float
    far_reduce: float
    load: float
    step: float


# All but `load` are fitted to nine published steps of NeMo-RL 0.6 on H100, which they give within
# 20 %; with one of them left out of the fit, that one is within 43 % (tests/parallel/
# test_roofline.py). `load` is of vLLM's loaders with the experts of a layer stacked, on a
# CPU: 0.94 s for the 18,867 tensors of 30B (benchmarks/weight_loading.py).
REACHED = Efficiencies(
    dense=0.527,
    experts=0.231,
    memory=0.449,
    link=0.406,
    network=0.625,
    layer=1.2e-3,
    decode_layer=120e-6,
    reduce=20e-6,
    far_reduce=33e-6,
    load=0.05e-3,
    step=4.24,
)
