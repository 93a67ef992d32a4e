"""The files of an export: looked at before anything is unwrapped, written whole, and all of them or none.

NNI unwraps the model, writes one file after the other, and leaves what it came to when one cannot be written: half a
file, a file without the other, a model that is no longer quantised or pruned.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from pathlib import Path
from typing import Any, Callable, Dict, Iterator

from torch import nn

from ..files import written_whole
from ..rollback import unchanged_on_error

__all__ = ["UNCHANGED", "arguments_of", "check_paths", "export_pruned", "save", "unchanged"]

UNCHANGED = "nothing was exported, the model is unchanged"


def arguments_of(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """The call's arguments by name."""
    return inspect.signature(stock).bind(*args, **kwargs)


def _paths(arguments: Dict[str, Any]) -> Dict[str, Any]:
    return {
        name: value for name, value in arguments.items() if name.endswith("_path") and isinstance(value, (str, os.PathLike))
    }  # torch.save also takes an open file, which is the user's to complete


def check_paths(arguments: Dict[str, Any]) -> None:
    """Raise where a file cannot be written, or not be made of what was given."""
    for name, path in _paths(arguments).items():
        if not Path(path).parent.is_dir():
            raise FileNotFoundError(f"{name}: there is no folder {str(Path(path).parent)!r}; {UNCHANGED}")
        if Path(path).is_dir():
            raise IsADirectoryError(f"{name}: {os.fspath(path)!r} is a folder, give the name of a file in it; {UNCHANGED}")
    if arguments.get("onnx_path") is not None and arguments.get("input_shape") is None and arguments.get("dummy_input") is None:
        # AssertionError is what NNI raises here, after it has unwrapped the model.
        raise AssertionError(f"input_shape must be specified to export onnx model; {UNCHANGED}")


@contextlib.contextmanager
def unchanged(compressor: Any) -> Iterator[None]:
    """Put compressor and model back, wrapped as they were, if the block raises."""
    model = compressor.bound_model
    with unchanged_on_error(*([model] if isinstance(model, nn.Module) else []), compressor):
        yield


def save(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """``Quantizer.export_model_save``: the files appear, complete, when all are written."""
    bound = arguments_of(stock, self, *args, **kwargs)
    paths = _paths(bound.arguments)
    with written_whole(*paths.values()) as drafts:
        bound.arguments.update(zip(paths, drafts))
        with _named_in_the_log(stock, dict(zip(drafts, map(os.fspath, paths.values())))):
            return stock(*bound.args, **bound.kwargs)


def export_pruned(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """``export_model`` of the pruners, which unwrap, mask and write in one method."""
    check_paths(arguments_of(stock, self, *args, **kwargs).arguments)
    with unchanged(self):
        return save(stock, self, *args, **kwargs)


@contextlib.contextmanager
def _named_in_the_log(stock: Callable[..., Any], names: Dict[str, str]) -> Iterator[None]:
    """Have NNI's log say where the files end, not where they are written first."""

    def rename(record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(
                names.get(argument, argument) if isinstance(argument, str) else argument for argument in record.args
            )
        return True

    loggers = [value for value in stock.__globals__.values() if isinstance(value, logging.Logger)]
    with contextlib.ExitStack() as stack:
        for logger in loggers:
            logger.addFilter(rename)
            stack.callback(logger.removeFilter, rename)
        yield
