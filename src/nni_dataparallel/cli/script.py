"""Run a script as Python itself would: argv, path, ``__main__``, exit status, tracebacks.

Not by :mod:`runpy`, which puts its own module back when the script ends, leaves ``__main__`` to others meanwhile
(pickle and multiprocessing look there) and shows itself in every traceback.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Callable, List, Tuple

from .errors import CommandError

__all__ = ["run_code", "run_file", "run_module", "run_stdin"]

Program = Tuple[CodeType, ModuleType]
_former_main: List[ModuleType] = []  # while it is referenced, the interpreter does not clear its globals


def run_file(path: str, arguments: List[str]) -> None:
    """``python path arguments``; a folder or zip file with a ``__main__.py`` as well."""
    if not os.path.exists(path):
        raise CommandError(f"there is no script {path!r}")
    entry = importlib.machinery.PathFinder.find_spec("__main__", [_absolute(path)])  # None for a file that is no archive
    if entry is not None:
        _start([path, *arguments], _absolute(path))
        _execute(lambda: _program_of_spec(entry, "__main__"))
        return
    if not os.path.isfile(path):
        raise CommandError(f"{path!r} is no script: a file, or a folder or zip file with a __main__.py in it")
    _start([path, *arguments], str(Path(path).resolve().parent))
    _execute(lambda: _program_of_file(path))


def run_module(name: str, arguments: List[str]) -> None:
    """``python -m name arguments``."""
    _start(["-m", *arguments], os.getcwd())
    _execute(lambda: _program_of_module(name))


def run_code(code: str, arguments: List[str]) -> None:
    """``python -c code arguments``."""
    _start(["-c", *arguments], "")
    _execute(lambda: _program_of_text(code, "<string>"))


def run_stdin(arguments: List[str]) -> None:
    """``python - arguments``: the script comes from standard input."""
    _start(["-", *arguments], "")
    _execute(lambda: _program_of_text(sys.stdin.read(), "<stdin>", __file__="<stdin>", __cached__=None))


def _start(argv: List[str], first: str) -> None:
    sys.argv = argv
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):  # then Python has put nothing there
        sys.path[0] = first  # in place of ours: the current folder, or the one of the console script


def _absolute(path: str) -> str:
    """As Python puts it: dots stay in it."""
    if sys.version_info < (3, 9):
        return path
    return os.path.abspath(path) if os.name == "nt" else os.path.join(os.getcwd(), path)


def _main(**attributes: Any) -> ModuleType:
    module = ModuleType("__main__")
    if sys.version_info < (3, 14):
        vars(module)["__annotations__"] = {}
    vars(module).update(__builtins__=builtins, **attributes)
    return module


def _program_of_file(path: str) -> Program:
    filename = _absolute(path)
    loader: Any
    if filename.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", filename)
        code = loader.get_code("__main__")
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", filename)
        code = compile(Path(filename).read_bytes(), filename, "exec", dont_inherit=True)
    return code, _main(__file__=filename, __loader__=loader, __cached__=None)


def _program_of_text(text: str, filename: str, **attributes: Any) -> Program:
    code = compile(text, filename, "exec", dont_inherit=True)
    return code, _main(__loader__=importlib.machinery.BuiltinImporter, **attributes)


def _program_of_module(name: str) -> Program:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            if importlib.util.find_spec(f"{name}.__main__") is None:
                raise CommandError(f"No module named {name}.__main__; {name!r} is a package and cannot be directly executed", 1)
            return _program_of_module(f"{name}.__main__")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise CommandError(f"Error while finding module specification for {name!r} ({type(error).__name__}: {error})", 1) from error
    if spec is None or spec.loader is None:
        raise CommandError(f"No module named {name}", 1)
    program = _program_of_spec(spec, name)
    sys.argv[0] = str(spec.origin)
    return program


def _program_of_spec(spec: Any, name: str) -> Program:
    code = spec.loader.get_code(name)
    if code is None:
        raise CommandError(f"{name} has no Python code to run", 1)
    place = {"__file__": spec.origin, "__cached__": spec.cached, "__loader__": spec.loader}
    return code, _main(__package__=spec.parent, __spec__=spec, **place)


def _execute(build: Callable[[], Program]) -> None:
    try:
        code, module = build()
        _former_main.append(sys.modules["__main__"])
        sys.modules["__main__"] = module
        exec(code, vars(module))
    except (SystemExit, CommandError):
        raise
    except BaseException as error:
        _hide_our_frames(error)
        raise


def _hide_our_frames(error: BaseException) -> None:
    """Show ``error`` from the script's first line on.

    It goes on to the interpreter as it is, which knows what exit status an exception or Ctrl-C has; on its way it
    collects the frames above this one, so what is shown is cut in the last moment, by whichever hook the script has set.
    """
    visible = error.__traceback__
    while visible is not None and visible.tb_frame.f_code.co_filename in (__file__, importlib.util.__file__):
        visible = visible.tb_next
    hook = sys.excepthook

    def show(kind: Any, value: Any, traceback: Any) -> None:
        if value is error:
            value, traceback = value.with_traceback(visible), visible
            sys.last_traceback = visible
        hook(kind, value, traceback)

    sys.excepthook = show
