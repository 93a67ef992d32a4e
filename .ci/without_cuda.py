"""Let a CUDA build of torch be imported on the CPU without the gigabytes of CUDA libraries that it is linked against.

    python .ci/without_cuda.py SITE_PACKAGES

For Python 3.13 there is no CPU build of torch on the package registry. The CUDA build, installed with ``--no-deps``, computes
on the CPU with the same code, but the loader wants every library that it names. Those that are missing get an empty stand-in:
each of its functions ends the process and says its name, so no number in a test can have come from one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import List, Set

FUNCTION = re.compile(r" (\w+) ((?:cu|nccl|nvshmem|nvrtc)\w*)(?:@\S+)?(?: \(\d+\))?$", re.MULTILINE)
"""Where a library defines a function of CUDA's (``UND``: nowhere, it wants it), and its name, as readelf shows them."""


def readelf(option: str, library: Path) -> str:
    """What a library says of itself."""
    return subprocess.run(["readelf", "-W", option, str(library)], capture_output=True, text=True, check=True).stdout


def functions(libraries: List[Path], wanted: bool) -> Set[str]:
    """The functions of CUDA's that ``libraries`` want, or define."""
    found = (FUNCTION.findall(readelf("--dyn-syms", library)) for library in libraries)
    return {name for of_library in found for place, name in of_library if (place == "UND") is wanted}


def missing(libraries: List[Path], present: Set[str]) -> Set[str]:
    """The CUDA libraries that ``libraries`` name and that are not installed."""
    named = {name for library in libraries for name in re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d", library))}
    return {name for name in named - present - {"libcuda.so.1"} if name.startswith(("libcu", "libnccl", "libnv"))}


def main(site: Path) -> None:
    """Compile the stand-ins into torch's own folder, where its libraries look last."""
    folder = site / "torch" / "lib"
    libraries, installed = list(folder.glob("*.so*")), list(site.glob("nvidia/**/*.so*"))
    names = missing(libraries, {path.name for path in [*libraries, *installed]})
    if not names:
        return
    # What is installed stays in use, whichever library the loader asks first.
    empty = sorted(functions(libraries, wanted=True) - functions([*libraries, *installed], wanted=False))
    code = "#include <stdio.h>\n#include <stdlib.h>\n" + "\n".join(
        f'void {name}(void) {{ fputs("{name}: a stand-in for a CUDA library was called\\n", stderr); abort(); }}' for name in empty
    )
    for name in names:
        # Each under its own name: the loader knows a library by the name in it.
        command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(folder / name), f"-Wl,-soname,{name}"]
        subprocess.run(command, input=code, text=True, check=True)
    print(f"stand-ins for {', '.join(sorted(names))}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_path("purelib")))
