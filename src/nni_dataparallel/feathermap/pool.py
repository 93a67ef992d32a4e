"""The pool: the only place that hashed weights come from."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any, ContextManager, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor, nn

from .. import replicas
from .factors import Factors, Int8Factor, is_plain, weight_of
from .integers import Scheme
from .layout import Layout
from .marks import quantizer_of
from .tracing import autocasting, compiling

__all__ = ["Pool"]


class _Shared:
    """What one forward in one thread has computed so far."""

    def __init__(self, factors: Factors, pieces: Optional[List[Tensor]]) -> None:
        self.factors, self.pieces, self.grad = factors, pieces, torch.is_grad_enabled()
        self.memo: Optional[Dict[Tuple[int, bool], Tensor]] = None


class _Here(threading.local):
    # By thread, and not on the pool: two threads may run one net at the same time.
    def __init__(self) -> None:
        self.forwards: Dict[int, _Shared] = {}


_here = _Here()
_counting = threading.Lock()  # not on the pool: locks cannot be copied


class Pool(nn.Module):
    """V1 and V2, and every hashed tensor computed from them.

    V1 and V2 are ``nn.Linear(m, n, bias=False)``, V2 being the transpose of the paper's, so that any tool that quantises,
    prunes or parametrises linear layers works on them; V = V1.weight @ V2.weight.T. Layers hold a reference to the pool,
    the pool holds none to them: replicas of ``nn.DataParallel`` are freed without the garbage collector.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.layout = layout
        self.scheme: Optional[Scheme] = None
        self.deployed = False
        self.cache: Optional[Dict[int, Tensor]] = None
        self.blocks = 0
        v1, v2 = self.new_factor(dtype, device), self.new_factor(dtype, device)
        # Uniform, std(V) = 1. Drawn as FeatherMap does, so that a seed gives the same net.
        bound = math.sqrt(12) / 2 * (layout.m ** (-1 / 4))
        with torch.no_grad():
            v1.weight.uniform_(-bound, bound)
            v2.weight.copy_(torch.empty(layout.m, layout.n, dtype=dtype, device=device).uniform_(-bound, bound).t())

        self.V1: nn.Module = v1
        self.V2: nn.Module = v2

    def set_factors(self, v1: nn.Module, v2: nn.Module) -> None:
        """Put both factors into another form."""
        self.V1, self.V2 = v1.train(self.training), v2.train(self.training)
        self.cache = None

    def new_factor(self, dtype: torch.dtype, device: torch.device) -> nn.Linear:
        """An uninitialised factor of this layout."""
        made: nn.Linear = nn.utils.skip_init(nn.Linear, self.layout.m, self.layout.n, bias=False, dtype=dtype, device=device)
        return made

    def __getstate__(self) -> Dict[str, Any]:
        return {**self.__dict__, "cache": None, "blocks": 0}

    def _apply(self, *args: Any, **kwargs: Any) -> Pool:
        self.cache = None  # of another dtype or on another device
        super()._apply(*args, **kwargs)
        return self

    def forward(self, *args: Any) -> Any:
        """The pool is asked for tensors, not called."""
        raise RuntimeError("the pool is no layer: call the FeatherNet that it belongs to")

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        return f"n={self.layout.n}, m={self.layout.m}, tensors={len(self.layout.slots)}"

    @property
    def plain(self) -> bool:
        """Whether both factors are the ``nn.Linear`` they were made as."""
        return is_plain(self.V1) and is_plain(self.V2)

    def factors(self) -> Factors:
        """The factors as they are now; quantised, if the pool trains quantization-aware."""
        return Factors.of(self.V1, self.V2, self.layout.m, self.scheme)

    def refuse_two_quantizers(self) -> None:
        """Raise where ``prepare_qat()`` and a toolkit both quantise; pruned or parametrised factors it does quantise."""
        for name, factor in (("V1", self.V1), ("V2", self.V2)):
            if self.scheme is None or isinstance(factor, Int8Factor) or is_plain(factor):
                continue
            toolkit = next((found for found in map(quantizer_of, factor.modules()) if found is not None), None)
            if toolkit is not None:
                raise RuntimeError(
                    f"pool.{name} is quantised twice, by prepare_qat() and by {toolkit}: one of both. Leave prepare_qat() out and "
                    "apply the toolkit to a new FeatherNet, or unwrap the factors and keep prepare_qat()"
                )

    @property
    def _in_pieces(self) -> bool:
        """Whether a forward computes V as a whole, once, and cuts it.

        Not where quantised factors are evaluated: each tensor is then computed as the deployed net does, to the last bit.
        """
        quantised = isinstance(self.V1, Int8Factor) or (self.scheme is not None and not self.training)
        return not (self.deployed or quantised)

    def _compute(self) -> _Shared:
        self.refuse_two_quantizers()
        factors = self.factors()
        if not self._in_pieces:
            return _Shared(factors, None)
        entries = factors.whole().reshape(-1)[: self.layout.count]
        # One split: its gradient is one tensor of n x n entries, where a slice per tensor would make one each.
        pieces = entries.split(self.layout.sizes)
        return _Shared(factors, [piece.view(slot.shape) for piece, slot in zip(pieces, self.layout.slots)])

    @contextlib.contextmanager
    def keeping(self, tensors: Dict[int, Tensor]) -> Iterator[None]:
        """Answer with these tensors inside the block; the last of several blocks to end, in whatever thread, ends that."""
        with _counting:
            self.cache = tensors
            self.blocks += 1
        try:
            yield
        finally:
            with _counting:
                self.blocks -= 1
                if not self.blocks:
                    self.cache = None

    @contextlib.contextmanager
    def working(self, afresh: bool = False) -> Iterator[None]:
        """The block of one forward: what its tensors share is computed once, whatever is kept if ``afresh``."""
        if self.cache is not None and not self.training and not afresh:
            yield
            return
        here, key = _here.forwards, id(self)
        outer = here.get(key)
        if outer is not None and outer.grad == torch.is_grad_enabled() and not afresh:  # the net calls itself
            yield
            return
        with _full_precision(weight_of(self.V1)):
            here[key] = self._compute()
        try:
            yield
        finally:
            if outer is None:
                del here[key]
            else:
                here[key] = outer

    @contextlib.contextmanager
    def reading_once(self) -> Iterator[None]:
        """The forward of a layer that reads a weight several times (attention): it is computed at the first."""
        shared = None if compiling() else _here.forwards.get(id(self))
        if shared is None or shared.memo is not None:
            yield
            return
        shared.memo = {}
        try:
            yield
        finally:
            shared.memo = None

    def tensor(self, index: int, scalar: Tensor) -> Tensor:
        """Hashed tensor ``index`` times ``scalar``, in ``scalar``'s dtype and on its device."""
        shared = None if compiling() else _here.forwards.get(id(self))
        cache = self.cache
        if shared is None and cache is not None and not self.training:
            kept = cache[index]
            if kept.dtype == scalar.dtype and kept.device == scalar.device:
                return kept
        if shared is None or shared.memo is None:
            return self._tensor(index, scalar, shared)
        key = (index, torch.is_grad_enabled())
        if key not in shared.memo:
            shared.memo[key] = self._tensor(index, scalar, shared)
        return shared.memo[key]

    def _tensor(self, index: int, scalar: Tensor, shared: Optional[_Shared]) -> Tensor:
        slot = self.layout.slots[index]
        if shared is not None and torch.is_grad_enabled() and not shared.grad:
            shared = None  # made without a graph, and here one is wanted
        with _full_precision(scalar):
            if shared is not None:
                factors, piece = shared.factors, None if shared.pieces is None else shared.pieces[index]
            else:
                with _unsaved():
                    factors = self.factors()
                    piece = factors.piece(slot, torch.ones_like(scalar)) if self._in_pieces else None
            result = factors.piece(slot, scalar) if piece is None else piece * scalar
        if slot.zero_row is not None:
            kept = torch.arange(slot.shape[0], device=result.device) != slot.zero_row
            result = result * kept.to(result.dtype).view(-1, *(1 for _ in slot.shape[1:]))
        return result.to(scalar.device, scalar.dtype)


def _full_precision(like: Tensor) -> ContextManager[Any]:
    """No autocast on a tensor's device: a V in half precision would be another V."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if autocasting(kind) else contextlib.nullcontext()


def _unsaved() -> ContextManager[Any]:
    """Hide from activation checkpointing what a forward computes outside the checkpointed part.

    A recomputation runs after its forward. It must save the same tensors as the first time, when the
    factors were at hand: hooks of its own, innermost, keep the additional ones out of the count.
    """
    if not compiling() and replicas.recomputing():
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    return contextlib.nullcontext()
