"""Files: written whole or not at all, and read without running what is in them."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import tempfile
import types
import zipfile
from typing import Any, BinaryIO, Dict, Iterator, List, Tuple, Union

__all__ = ["PathLike", "read_tensors", "written_whole"]

PathLike = Union[str, "os.PathLike[str]"]


@contextlib.contextmanager
def written_whole(*targets: PathLike) -> Iterator[List[str]]:
    """Yield a path to write to for each target; all of them appear, complete, when the block is done without an error.

    A full disk, an exception or an interrupt leaves what was there before. The files are written in folders of their
    own beside their targets, under the same names, which go into an archive, or into ONNX's reference to its weights
    beside the model; what a writer puts beside its file comes along. What is no regular file (``/dev/null``, a pipe)
    cannot be replaced, and is written to.

    Raises
    ------
    OSError
        When there is no folder to write to, or a target is a folder itself.
    """
    with contextlib.ExitStack() as stack:
        ends = [os.path.realpath(target) for target in targets]  # a link stays a link
        drafts = [stack.enter_context(_drafted(end, target)) for end, target in zip(ends, targets)]
        yield drafts
        moves = [move for draft, end in zip(drafts, ends) if draft != end for move in _moves(draft, end)]
        for draft, _ in moves:
            _flush(draft)
        for draft, end in moves:
            os.replace(draft, end)


@contextlib.contextmanager
def _drafted(end: str, target: PathLike) -> Iterator[str]:
    folder, name = os.path.split(end)
    if os.path.exists(end) and not os.path.isfile(end):
        if os.path.isdir(end):
            raise IsADirectoryError(f"{os.fspath(target)!r} is a folder: give the name of a file in it")
        yield end
        return
    try:
        room = tempfile.mkdtemp(prefix=f".{name[:80]}.", suffix=".partial", dir=folder)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no folder {folder!r} for {os.fspath(target)!r}") from None
    except OSError as error:
        raise type(error)(
            error.errno,
            f"{error.strerror}; a file is written beside its old version and takes its place when it is complete",
            folder,
        ) from error
    try:
        yield os.path.join(room, name)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _moves(draft: str, end: str) -> List[Tuple[str, str]]:
    """What was written, and where it belongs; the file itself last, since it refers to those beside it."""
    room, name = os.path.split(draft)
    others = sorted(other for other in os.listdir(room) if other != name)
    written = [*others, name] if os.path.exists(draft) else others
    if os.path.exists(end) and os.path.exists(draft):
        shutil.copymode(end, draft)
    return [(os.path.join(room, each), os.path.join(os.path.dirname(end), each)) for each in written]


def _flush(path: str) -> None:
    """To the disk: a renamed file whose data are not there yet is empty after a power failure."""
    if os.path.isfile(path):
        with open(path, "rb+") as file:
            os.fsync(file.fileno())


def read_tensors(file: Union[PathLike, BinaryIO], map_location: Any = "cpu") -> Any:
    """What ``torch.save`` wrote: tensors, numbers, names and containers of them, nothing that runs code.

    The checksums in the file, which torch does not look at, are.

    Raises
    ------
    ValueError
        When the file is truncated, damaged, none of torch's, or holds something else; the text says what.
    OSError
        When it cannot be opened.
    """
    import torch

    where = os.fspath(file) if isinstance(file, (str, os.PathLike)) else "the file"
    with contextlib.ExitStack() as stack:
        opened: Any = stack.enter_context(open(file, "rb")) if isinstance(file, (str, os.PathLike)) else file
        # Before torch 2.0 the loader that runs no code knows no Python floats, before 1.13 there is none.
        safely: Dict[str, Any] = {"weights_only": True} if hasattr(torch, "compile") else {"pickle_module": _restricted()}
        try:
            start = opened.tell()
            _check_sums(opened)
            opened.seek(start)
            return torch.load(opened, map_location=map_location, **safely)
        except OSError:
            raise
        except Exception as error:  # a parser runs into whatever there is
            raise ValueError(
                f"{where} cannot be read, it is truncated, damaged or no checkpoint of tensors: {_cause(error)}"
            ) from error


def _cause(error: BaseException) -> str:
    """torch's reason without its advice to read the file by the loader that runs code."""
    text = str(error).strip()
    named = re.search(r"GLOBAL ([\w.]+)", text)
    if named:
        return f"it names {named.group(1)}, which is neither tensor nor number: reading it could run code"
    parts = [part for part in text.split("\n\n") if not part.startswith("Weights only load failed")] or [text]
    return f"{type(error).__name__}: {parts[0]}" if parts[0] else type(error).__name__


def _check_sums(opened: BinaryIO) -> None:
    """Raise where a record is not what was written; 0 stands for a sum that was not computed."""
    if opened.read(2) != b"PK":
        return  # torch's format before 1.6 has no sums
    with zipfile.ZipFile(opened) as archive:
        for record in archive.infolist():
            if record.external_attr & 0x10 and record.file_size:
                # torch takes it for a folder, reads nothing, and gives what happened to be in memory.
                raise zipfile.BadZipFile(f"{record.filename} is marked as a folder")
            if record.CRC:
                with archive.open(record) as part:
                    while part.read(1 << 20):
                        pass


def _restricted() -> types.ModuleType:
    """A pickle module that knows tensors only, for versions of torch without such a loader."""
    import torch

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) == ("collections", "OrderedDict") or (module, name) == ("_codecs", "encode"):
                return super().find_class(module, name)
            known = getattr(torch, name, None) if module == "torch" else None
            storage = module in ("torch", "torch.storage", "torch.cuda") and name.endswith("Storage")
            rebuild = module == "torch._utils" and name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter")
            if storage or rebuild or isinstance(known, torch.dtype) or known in (torch.Size, torch.device):
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f"unsupported GLOBAL {module}.{name}")

    safe = types.ModuleType("nni_dataparallel_tensors")
    safe.Unpickler = Unpickler  # type: ignore[attr-defined]
    safe.load = lambda opened, **more: Unpickler(opened, **more).load()  # type: ignore[attr-defined]
    return safe
