"""Devices by name: dense 16-bit peak, memory, and the link that their hosts usually have; pure."""

from __future__ import annotations

from typing import NamedTuple

from gradsync.cluster import Device
from gradsync.planner.catalogue.naming import unknown

# A copy reaches so much of the data sheet's bandwidth: 4.3 of 4.8 TB/s, measured on an H200.
_COPY_SHARE = 0.9

# From a bucket's being ready to its first byte. 8 x H200 took 40 µs for 32 KiB from PyTorch (ml-engineering), where
# NCCL's own model says 15.
_GPU_CALL_S = 25e-6


class Processor(NamedTuple):
    """A device and where its figures are from."""

    device: Device
    link: str  # inside the hosts that are usually sold with it
    source: str


def _gpu(name: str, tflops: float, gigabytes: float, gb_per_s: float, link: str, source: str = "") -> Processor:
    device = Device(
        name=name,
        kind="gpu",
        flops=tflops * 1e12,
        memory_nbytes=gigabytes * 1e9,
        memory_bandwidth=_COPY_SHARE * gb_per_s * 1e9,
        call_s=_GPU_CALL_S,
    )
    return Processor(device, link, source or "NVIDIA data sheet")


_ACCUMULATES = "NVIDIA white paper, FP16 with FP32 accumulation"

DEVICES: dict[str, Processor] = {
    made.device.name: made
    for made in (
        _gpu("v100", 125, 32, 900, "nvlink2", "NVIDIA data sheet, SXM2 32 GB"),
        _gpu("a100", 312, 80, 2039, "nvlink3", "NVIDIA data sheet, SXM 80 GB"),
        _gpu("a100-40gb", 312, 40, 1555, "nvlink3", "NVIDIA data sheet, SXM 40 GB"),
        _gpu("h100", 989, 80, 3350, "nvlink4", "NVIDIA data sheet, SXM"),
        _gpu("h100-pcie", 756, 80, 2000, "pcie5", "NVIDIA data sheet, PCIe"),
        _gpu("h200", 989, 141, 4800, "nvlink4", "NVIDIA data sheet, SXM"),
        _gpu("b200", 2250, 180, 8000, "nvlink5", "NVIDIA data sheet, an eighth of a DGX B200"),
        _gpu("t4", 65, 16, 320, "pcie3"),
        _gpu("l4", 121, 24, 300, "pcie4"),
        _gpu("a10", 125, 24, 600, "pcie4"),
        _gpu("l40s", 362, 48, 864, "pcie4"),
        _gpu("rtx3090", 71, 24, 936, "pcie4", _ACCUMULATES),
        _gpu("rtx4090", 165.2, 24, 1008, "pcie4", _ACCUMULATES),
        Processor(Device(), "memory", "assumptions: 10 GB/s of memory for each rank; cores differ too much for a peak"),
    )
}


def device(name: str) -> Device:
    """A device by its name in the catalogue.

    >>> device("a100").flops, device("cpu").kind
    (312000000000000.0, 'cpu')
    """
    return processor(name).device


def processor(name: str) -> Processor:
    """A device by its name, with its usual link and its source."""
    found = DEVICES.get(name.strip().lower()) if isinstance(name, str) else None
    if found is None:
        raise ValueError(unknown("device", name, DEVICES))
    return found
