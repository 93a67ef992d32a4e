"""``ObserverQuantizer`` of NNI 2.4 - 2.10.1: histograms of the whole batch, quantised weights in evaluation.

All replicas of a forward would feed one histogram at once, in the order of their threads. Here each
hands over what it saw, and the histogram gets the batch in one piece when the replicas are done.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional

import torch
from torch import Tensor

from .. import replicas

__all__ = ["quantize_weight", "record"]


def record(stock: Callable[..., None], self: Any, wrapper: Any, quant_type: str, tensor: Any) -> None:
    """``ObserverQuantizer.record``: once per forward, the shards in their order."""
    if replicas.recomputing():
        return
    if replicas.alone() and replicas.current() is None:
        stock(self, wrapper, quant_type, tensor)
        return
    # Releases differ in whether an input comes in a tuple.
    seen: Tensor = tensor[0] if isinstance(tensor, tuple) else tensor

    def settle(shards: List[Tensor]) -> None:
        parts = shards[:1] if quant_type == "weight" else shards
        # Flat, since shards may be cut along any dimension; the histogram does not look at shapes.
        stock(self, wrapper, quant_type, torch.cat(parts))

    # A copy, since an in-place activation behind this layer writes into what was seen here; on the host, where
    # the histograms are.
    seen = seen.detach().to("cpu", copy=True).flatten()
    replicas.defer(seen, wrapper, f"record {quant_type}", settle, None if quant_type == "weight" else torch.cat)


def quantize_weight(stock: Callable[..., Any], self: Any, wrapper: Any, **kwargs: Any) -> Optional[Tensor]:
    """``ObserverQuantizer.quantize_weight``: after ``compress()`` a forward has the quantised weight.

    From 2.5 on the wrapper puts the float weight back in every forward.
    """
    if not self.compressed:
        return stock(self, wrapper, **kwargs)  # type: ignore[no-any-return]
    module = wrapper.module
    quantised: Tensor = self._quantize(
        module.old_weight.detach(), module.weight_scale, module.weight_zero_point, module.weight_qmin, module.weight_qmax
    )
    module._buffers["weight"] = quantised
    return quantised
