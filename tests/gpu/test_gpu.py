"""On real GPUs: patched quantizers under nn.DataParallel equal one GPU. Skipped where there is none.

    python -m pytest tests/gpu

One GPU checks the single-device path, two or more check the replicas.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any, List, Tuple

import new_line
import pytest
import torch
from cases import Case, is_new
from references import reference_class
from torch import nn

import nni_dataparallel
from nni_dataparallel.fixes import installed_release, ships, stock_quantizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


QUANTIZERS = {
    "QAT_Quantizer": (["weight", "input", "output"], 8),
    "LsqQuantizer": (["weight", "input", "output"], 8),
    "DoReFaQuantizer": (["weight"], 8),
    "BNNQuantizer": (["weight", "output"], 1),
    "NaiveQuantizer": (["weight"], 8),
    "QATQuantizer": (["weight", "input", "output"], 8),
    "LsqPlusQuantizer": (["weight", "input", "output"], 8),
}
RELEASE = installed_release()
each_quantizer = pytest.mark.parametrize("name", [name for name in QUANTIZERS if ships(RELEASE, name)])


def train(name: str, count: int, patch: bool) -> Tuple[List[float], Any]:
    torch.manual_seed(0)
    with nni_dataparallel.patched() if patch else contextlib.nullcontext():
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10)).double().cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        targets, bits = QUANTIZERS[name]
        config = [{"quant_types": targets, "quant_bits": bits, "op_types": ["Conv2d", "Linear"]}]
        more = {"dummy_input": torch.randn(1, 1, 8, 8).double().cuda()} if name == "QAT_Quantizer" else {}
        quantizer_class = stock_quantizer(name)
        if not patch:
            quantizer_class = reference_class(quantizer_class)
        if is_new(RELEASE):
            new_line.make(quantizer_class, Case("", "", config, quantizer=name), net, optimizer)
        else:
            quantizer_class(net, copy.deepcopy(config), optimizer, **more).compress()
            net.double()  # LSQ's scales, too
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


@each_quantizer
def test_one_gpu_is_stock(name: str) -> None:
    """The fixes change nothing on one GPU."""
    (losses, state), (stock_losses, stock) = train(name, 1, True), train(name, 1, False)
    assert losses == stock_losses
    assert all(torch.equal(state[key].flatten(), stock[key].flatten()) for key in stock)


@each_quantizer
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_all_gpus_equal_one(name: str) -> None:
    """Losses and state of all GPUs together are those of one."""
    (losses, state), (one_losses, one) = train(name, torch.cuda.device_count(), True), train(name, 1, False)
    assert losses == pytest.approx(one_losses, rel=1e-6)
    for key in one:
        torch.testing.assert_close(state[key].flatten(), one[key].flatten(), rtol=1e-5, atol=1e-6)
