"""Fresh interpreters: scripts and commands, run beside what this interpreter sees."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, List, Mapping, Optional

__all__ = ["last_line", "python", "seen_here"]


def seen_here(*more: Any) -> str:
    """A PYTHONPATH of what this interpreter sees, behind ``more``."""
    return os.pathsep.join([*map(str, more), *(path for path in sys.path if path)])


def python(
    *lines: str,
    path: Any = None,
    arguments: List[str] = (),
    env: Optional[Mapping[str, str]] = None,
    cwd: Optional[Path] = None,
    given: str = "",
) -> subprocess.CompletedProcess:
    """A fresh interpreter that sees what this one sees; ``lines`` are its code, or ``arguments`` its command line."""
    environment = {**os.environ, "PYTHONPATH": seen_here(*(path or [])), **(env or {})}
    code = ["-c", textwrap.dedent("\n".join(lines))] if lines else []
    return subprocess.run(
        [sys.executable, *code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
        cwd=cwd,
        input=given,
    )


def last_line(result: subprocess.CompletedProcess) -> str:
    """What the script printed; 2.7 and 2.8 print lines of their own at import."""
    return result.stdout.strip().splitlines()[-1]
