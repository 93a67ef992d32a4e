"""``import nni_dataparallel.auto``: patch NNI now, or as soon as a script imports it.

Place the line before or after ``import nni``, it does not matter. What cannot be patched is said in
a warning, and the script goes on with stock NNI.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any, Callable

from wrapt import register_post_import_hook

from . import fixes, patching
from .api import HOLDER


def _installer(row: patching.Fix) -> Callable[[Any], None]:
    def install(module: Any) -> None:
        problem = patching.check(row)
        if problem is None:
            patching.install(row, HOLDER)
        else:
            warnings.warn(f"skipped the fix {row.name!r}: {problem}", patching.PatchWarning, stacklevel=2)

    return install


def _arm() -> None:
    try:
        rows = fixes.rows_for(fixes.installed_release())
    except fixes.UnsupportedReleaseError as error:
        warnings.warn(str(error), patching.PatchWarning, stacklevel=3)
        return
    for row in rows:
        if row.module in sys.modules or not row.module.startswith("nni."):
            _installer(row)(importlib.import_module(row.module))
        else:
            register_post_import_hook(_installer(row), row.module)


_arm()
