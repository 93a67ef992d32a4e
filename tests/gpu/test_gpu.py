"""On real GPUs: patched QAT_Quantizer under nn.DataParallel equals one GPU. Skipped where there is none.

    python -m pytest tests/gpu

One GPU checks the single-device path, two or more check the replicas.
"""

from __future__ import annotations

import copy
from typing import Any, List, Tuple

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def train(count: int, patch: bool) -> Tuple[List[float], Any]:
    import contextlib

    from nni.algorithms.compression.pytorch.quantization import QAT_Quantizer

    import nni_dataparallel

    torch.manual_seed(0)
    with nni_dataparallel.patched() if patch else contextlib.nullcontext():
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)).double().cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        config = [{"quant_types": ["weight", "input", "output"], "quant_bits": 8, "op_types": ["Conv2d", "Linear"]}]
        QAT_Quantizer(net, copy.deepcopy(config), optimizer, dummy_input=torch.randn(1, 1, 8, 8).double().cuda()).compress()
        model = net if count == 1 else nn.DataParallel(net, device_ids=list(range(count)))
        generator = torch.Generator().manual_seed(1)
        losses = []
        for size in (8, 7, 5, 2, 1):
            x = torch.randn(size, 1, 8, 8, generator=generator).double().cuda()
            y = torch.randint(10, (size,), generator=generator).cuda()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, {name: t.detach().cpu() for name, t in net.state_dict().items()}


def test_one_gpu_is_stock() -> None:
    """The fixes change nothing on one GPU."""
    (losses, state), (stock_losses, stock) = train(1, True), train(1, False)
    assert losses == stock_losses
    assert all(torch.equal(state[name], stock[name]) for name in stock)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_all_gpus_equal_one() -> None:
    """Losses and state of all GPUs together are those of one."""
    (losses, state), (one_losses, one) = train(torch.cuda.device_count(), True), train(1, False)
    assert losses == pytest.approx(one_losses, rel=1e-6)
    for name in one:
        torch.testing.assert_close(state[name], one[name], rtol=1e-5, atol=1e-6)
