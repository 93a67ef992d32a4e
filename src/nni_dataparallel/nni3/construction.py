"""A compressor of NNI 3.0 that is given a model in its DataParallel.

The compressor works on the plain model, so that names have no prefix. The user's functions, which train and
evaluate, are called with the DataParallel that the user gave.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, Optional

from torch import nn

from .. import given
from .reducing import by_name

__all__ = ["compress", "compressor_init", "fusion_compress", "in_the_models_order"]

_ORDER = (
    "Build the compressor on the plain model first, then wrap it: an evaluator with the optimizer of model.parameters(), "
    "{name}(model, config_list, evaluator, ...), and the {kind} in the training function, around the model that NNI hands over."
)


def compressor_init(stock: Callable[..., None], self: Any, model: nn.Module, config_list: Any, *args: Any, **kwargs: Any) -> None:
    """``Compressor.__init__``: take the model out of its DataParallel, and names without its prefix."""
    with given.constructing(self) as first:
        if not first:
            stock(self, model, config_list, *args, **kwargs)
            return
        plain = given.plain_model(model)
        given.warn_of_ddp(self, plain, "masks and calibration config", _ORDER)
        config_list = given.without_prefix(config_list, plain, plain is not model)
        _construct(stock, self, plain, config_list, *args, **kwargs)
    if plain is not model:
        self.parallel_model = model
        _warn_of_lightning(self, model)
    if config_list and not any(self._target_spaces.values()):
        given.warn(
            f"{type(self).__name__} compresses nothing: no layer of {given.kind_of(plain)} matches config_list "
            f"{config_list!r}. Use op_types or op_names of its layers, which are: {given.described(plain)}."
        )


def _construct(stock: Callable[..., None], self: Any, model: nn.Module, config_list: Any, *args: Any, **kwargs: Any) -> None:
    try:
        stock(self, model, config_list, *args, **kwargs)
    except KeyError as error:
        unknown = [name for config in config_list for name in config.get("op_names", ()) if name == error.args[0]]
        if not unknown:
            raise
        raise KeyError(
            f"{type(self).__name__}: {unknown[0]!r} in op_names is no layer of {given.kind_of(model)}, "
            f"whose layers are: {given.described(model)}"
        ) from error


def _warn_of_lightning(self: Any, model: nn.Module) -> None:
    if any(kind.__name__ == "LightningEvaluator" for kind in type(self.evaluator).__mro__):
        given.warn(
            f"{type(self).__name__} was given a {type(model).__name__} and a LightningEvaluator. Lightning's Trainer takes the "
            "plain LightningModule and trains that: the DataParallel is not used. Give it the plain model, and to the Trainer "
            "its strategy (Lightning 1.x: 'dp'; 2.x has no DataParallel)."
        )


def _parallel_model(self: Any) -> Optional[nn.Module]:
    """The DataParallel that this compressor, or one that it was made from, was given."""
    for compressor in (self, *self.fused_compressors, self.__dict__.get("bound_pruner")):
        parallel: Optional[nn.Module] = getattr(compressor, "parallel_model", None)
        if parallel is not None and parallel.module is self.bound_model:
            return parallel
    return None


def compress(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """``compress``: what was given in a DataParallel comes back in it; ranks go through the layers in one order."""
    by_name(self)
    result = stock(self, *args, **kwargs)
    parallel = _parallel_model(self)
    if parallel is None:
        return result
    return (parallel, *result[1:]) if isinstance(result, tuple) else parallel


def in_the_models_order(stock: Callable[..., Dict[str, Any]], self: Any) -> Dict[str, Any]:
    """``patch_optimizer_param_group``: the optimizer gets learned scales in the model's order.

    NNI goes through a set of names, whose order is another one in every process. An optimizer's state knows
    Parameters by their number: loaded elsewhere, scales would swap their momenta.
    """
    places = {name: place for place, (name, _) in enumerate(self.bound_model.named_modules())}
    return dict(sorted(stock(self).items(), key=lambda item: places.get(item[0], len(places))))


def fusion_compress(stock: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """``Compressor._fusion_compress``: train and evaluate the DataParallel."""
    with _called_with(self.evaluator, _parallel_model(self)):
        stock(self, *args, **kwargs)


@contextlib.contextmanager
def _called_with(evaluator: Any, parallel: Optional[nn.Module]) -> Iterator[None]:
    """Have the evaluator call the user's functions with ``parallel`` instead of its plain model.

    NNI's own code goes on seeing the plain model: it looks up parameters by their names.
    """
    if parallel is None or evaluator is None:
        yield
        return
    state = vars(evaluator)
    mine = {name: state[name] for name in ("training_func", "evaluating_func") if state.get(name) is not None}
    state.update({name: _with(function, parallel) for name, function in mine.items()})
    try:
        yield
    finally:
        state.update(mine)


def _with(function: Callable[..., Any], parallel: Any) -> Callable[..., Any]:
    def called(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(parallel if model is parallel.module else model, *args, **kwargs)

    return called
