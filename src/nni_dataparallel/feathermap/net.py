"""FeatherNet: a model whose weights come from two small factors."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Union

from torch import nn

from .. import notices
from ..rollback import unchanged_on_error
from .building import Built, build, check_compress, plain_on_error
from .choosing import Exclude, checked_exclude, choose
from .converting import check_scalars, int8_factors
from .integers import Scheme
from .layers import apart, follow
from .loading import adopt
from .materialising import all_tensors, plain_model
from .order import refuse_wrong_order
from .pool import Pool
from .report import CompressionReport
from .tracing import compiling
from .trained import REPLACED, sign_of_training
from .upstream import hashed_names, read

__all__ = ["FeatherNet"]


class FeatherNet(nn.Module):
    """A model whose weights come from two small factors: structured multi-hashing (Eban et al., CVPR 2020).

    All N hashed weights are the first N entries of ``V = V1 @ V2``, V1 (n x m), V2 (m x n), n = ceil(sqrt(N)),
    m = ceil(compress * n / 2), each layer's weight and bias times one learned scalar (``weight_p``, ``bias_p``). The
    factors are the weights of two linear layers, ``pool.V1`` and ``pool.V2`` (the latter transposed).

    Parameters
    ----------
    module : torch.nn.Module
        Any model. Its weights are replaced by new ones: a trained model is no better a start than a fresh one, and
        wrapping it warns. Norms, PReLU, recurrent and parametrised layers, and frozen Parameters stay as they are.
    compress : float
        Size of the factors over the number of hashed weights, in (0, 1].
    exclude : class, str, or sequence of them
        Classes and names of modules to leave out, a single one or a sequence.
    clone : bool
        Work on a copy of ``module``; otherwise on itself.
    verbose : bool
        Print what was hashed and what not.

    Raises
    ------
    ValueError
        ``compress`` outside (0, 1], nothing to hash, an unknown name in ``exclude``, a model that was quantised before, or one
        that cannot be copied.
    TypeError
        Complex or integer weights; a model in ``DataParallel`` (FeatherNet comes first).

    Examples
    --------
    >>> import torch
    >>> from nni_dataparallel.feathermap import FeatherNet
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    >>> net = FeatherNet(model, compress=0.1).prepare_qat()
    >>> net.pool
    Pool(
      n=87, m=5, tensors=4
      (V1): Linear(in_features=5, out_features=87, bias=False)
      (V2): Linear(in_features=5, out_features=87, bias=False)
    )
    >>> optimizer = torch.optim.Adam(net.param_groups(lr=1e-2))
    >>> net(torch.randn(8, 64)).square().mean().backward()
    >>> optimizer.step()
    >>> net = net.eval().convert().deploy()
    >>> net.state_dict()["pool.V1.qweight"].dtype
    torch.int8
    """

    module: nn.Module
    pool: Pool
    _modes: Optional[List[bool]]

    def __init__(
        self,
        module: nn.Module,
        compress: float = 0.5,
        exclude: Exclude = (),
        clone: bool = True,
        verbose: bool = False,
    ) -> None:
        super().__init__()
        refuse_wrong_order(module)
        compress = check_compress(compress)
        classes, paths = checked_exclude(exclude, module)
        sign = sign_of_training(module, choose(module, classes, paths))
        with plain_on_error(module):
            self._adopt(build(module, compress, lambda model: choose(model, classes, paths), clone), compress)
            self.exclude, self.verbose = exclude, verbose
            if sign is not None:
                notices.warn(REPLACED.format(sign))
            if verbose:
                print(self.compression_report())

    def _adopt(self, built: Built, compress: float) -> None:
        self.compress, self._report, self._modes = compress, built.report, None
        self.pool, self.module = built.pool, built.model
        self.training = built.model.training

    @classmethod
    def from_upstream(
        cls, checkpoint: Union[str, os.PathLike[str], Mapping[str, Any]], module: nn.Module, clone: bool = True
    ) -> FeatherNet:
        """A FeatherNet from a checkpoint of phelps-matthew/FeatherMap, saved under ``DataParallel`` or not.

        Compression and exclusions are read from the checkpoint. In evaluation the net's output is bit for bit that of FeatherMap's
        ``eval()`` (its ``deploy()`` computes other weights than were trained).

        Parameters
        ----------
        checkpoint
            A state dict, a dict that holds one (``"net"``, ``"state_dict"``, ``"model"``), or a file of either.
        module
            The plain model that was wrapped; its weights do not matter. With ``clone`` a copy is worked on.

        Raises
        ------
        ValueError
            When the file is truncated, holds no factors, or is of another model.
        """
        refuse_wrong_order(module)
        state = read(checkpoint)
        names, n, m = hashed_names(state, module)
        net = cls.__new__(cls)
        nn.Module.__init__(net)
        with plain_on_error(module):
            net._adopt(build(module, 2 * m / n, lambda model: choose(model, only=names), clone, m), min(1.0, 2 * m / n))
            net.exclude, net.verbose = (), False
            try:
                net.load_state_dict(state)
            except RuntimeError as error:
                raise ValueError(f"the checkpoint does not fit this model: {error}") from error
        return net

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, whatever it takes and returns."""
        if self.__dict__.get("_is_replica"):
            # nn.DataParallel has copied the layers' references, which lead to device 0's pool.
            self._point_at_own_pool()
        if compiling():
            return self.module(*args, **kwargs)
        with self.pool.working():
            return self.module(*args, **kwargs)

    def _point_at_own_pool(self) -> None:
        self.pool.__dict__["cache"] = None  # computed on device 0
        follow(self.module, self.pool)

    def _localise_replica(self, copy: Any, local: Callable[[nn.Module], nn.Module]) -> None:
        """Where this package's patch is in place, a layer called without ``forward`` is right as well."""
        copy._point_at_own_pool()

    def train(self, mode: bool = True) -> FeatherNet:
        """Set the mode; training ends a deployment. Returns ``self``."""
        if mode:
            self.pool.deployed, self.pool.cache, self._modes = False, None, None
        super().train(mode)
        return self

    @property
    def deployed(self) -> bool:
        """Whether layers compute their weights one by one."""
        return self.pool.deployed

    def deploy(self, mode: bool = True) -> FeatherNet:
        """Evaluation in little memory: every layer computes its weight from the rows it needs, when it needs it.

        The output is that of ``eval()``; nothing is kept. ``deploy(False)`` goes back to the modes of before. Returns ``self``.
        """
        if mode and not self.deployed:
            modes = [module.training for module in self.modules()]
            self.eval()
            self._modes, self.pool.deployed = modes, True
        elif not mode and self.deployed:
            self.pool.deployed = False
            modules = list(self.modules())
            if self._modes is not None and len(self._modes) == len(modules):
                for module, before in zip(modules, self._modes):
                    module.training = before
            self._modes = None
        return self

    def prepare_qat(self, bits: int = 8, per_row: bool = True) -> FeatherNet:
        """Train quantization-aware from now on: symmetric fake quantization of both factors, straight-through.

        Nothing is observed and no state is added: the scale is the largest entry of today's row (or factor) over
        ``2 ** (bits - 1) - 1``, the same on every device and rank. ``eval()`` and ``deploy()`` use the quantised factors.
        Returns ``self``.

        Parameters
        ----------
        bits
            2 to 8.
        per_row
            One scale for each of the n rows of a factor (n being what both are long in), or one for the factor.
        """
        scheme = Scheme(bits, per_row).checked()
        if not self.pool.plain:
            raise RuntimeError(
                "the factors are INT8 or wrapped by a toolkit already: one of both quantises them. Load the float checkpoint, or "
                "leave prepare_qat() out"
            )
        self.pool.scheme, self.pool.cache = scheme, None
        return self

    def convert(self, bits: Optional[int] = None, per_row: Optional[bool] = None) -> FeatherNet:
        """Replace the factors by INT8 codes and their scales. Returns ``self``.

        After ``prepare_qat()`` these are the codes that were trained. Factors that a toolkit quantises (NNI, torch.ao, any other)
        are taken as it computes them in evaluation, and its wrappers go. Plain float factors are quantised as they are.

        Parameters
        ----------
        bits, per_row
            For plain float factors; 8 and True if not given.

        Raises
        ------
        ValueError
            A factor or a scalar holds NaN, or a factor is on no symmetric grid of 8 bits. The net is unchanged.
        RuntimeError
            The factors are INT8 already.
        """
        check_scalars(self.module)
        factors = int8_factors(self.pool, bits, per_row)
        if not self.pool.plain:
            self._buffers.pop("steps", None)  # NNI 2.x counts on the model; strict loading would miss it elsewhere
        self.pool.set_factors(*factors)
        return self

    @contextlib.contextmanager
    def cached(self) -> Iterator[FeatherNet]:
        """Compute all weights once and use them for every forward in the block, in all threads of this net.

        For many small batches. The weights take a dense model's memory meanwhile. They do not follow writes to the factors, but
        an inner block computes them anew, and after loading, converting, ``train()``, another dtype or device none are kept.

        Raises
        ------
        RuntimeError
            In training mode.
        """
        if self.training:
            raise RuntimeError("cached() keeps weights without gradients: call eval() or deploy() first")
        with self.pool.keeping(all_tensors(self.module, self.pool)):
            yield self

    def materialized(self) -> nn.Module:
        """A plain model with today's weights, as evaluation computes them; tied weights are tied.

        Examples
        --------
        >>> import torch; from nni_dataparallel.feathermap import FeatherNet
        >>> net, x = FeatherNet(torch.nn.Linear(4, 3)).eval(), torch.randn(2, 4)
        >>> bool((net.materialized()(x) == net(x)).all())
        True
        """
        return plain_model(self.module, self.pool)

    def param_groups(self, lr: float, scale_lr: Optional[float] = None) -> List[Dict[str, Any]]:
        """Parameters for an optimizer, the scalars with a learning rate of their own.

        Parameters
        ----------
        lr
            For the factors and what is not hashed.
        scale_lr
            For ``weight_p`` and ``bias_p``; a tenth of ``lr`` if not given, which is worth a point of accuracy with Adam.
        """
        scalars, others = apart(self)
        rate = 0.1 * lr if scale_lr is None else scale_lr
        return [{"params": others, "lr": lr}, {"params": scalars, "lr": rate}]

    def compression_report(self) -> CompressionReport:
        """What was hashed, what not and why, with counts, ratios and bytes."""
        return self._report.now(self, self.pool)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module.load_state_dict``; the net takes the form, float or INT8, that the file has.

        FeatherMap's checkpoints load, and those saved under ``DataParallel``. If an error is raised, nothing has changed.
        """
        with unchanged_on_error(self, values=True):
            return super().load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        adopt(self.module, self.pool, state_dict, prefix, self.compress)
        super()._load_from_state_dict(state_dict, prefix, *rest)
