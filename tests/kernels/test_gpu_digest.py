"""On a GPU the digest is the same number as on the host, by Triton and by torch, and is asked for without waiting."""

from __future__ import annotations

import pytest
import torch

from gradsync.kernels.digest import digest, launch, reference
from silent_device import host_never_waits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.bool)
_ALL = (1 << 64) - 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_length_gives_the_digest_of_the_host(dtype: torch.dtype) -> None:
    for numel in (0, 1, 3, 8, 100, 1023, 4096, 4097, 300_001):
        for shift in (0, 1):
            host = (torch.randn(numel + shift, generator=torch.Generator().manual_seed(numel)) * 9).to(dtype)[shift:]
            device = host.cuda()
            expected = digest(host)
            assert int(launch(device)) & _ALL == expected, (numel, shift)
            assert int(reference(device)) & _ALL == expected, (numel, shift)
            assert digest(device) == expected


def test_it_is_asked_for_without_waiting() -> None:
    tensor = torch.randn(1 << 20, device="cuda")
    launch(tensor)  # compiles
    with host_never_waits():
        launch(tensor)
