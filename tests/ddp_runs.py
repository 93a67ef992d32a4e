"""Start the ranks of a DDP run, wait for them with a limit, and read what they left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

import torch

WORKER = Path(__file__).parent / "ddp_worker.py"


def launch(script: Path, world: int, *arguments: str, limit: float = 300.0) -> List[subprocess.Popen]:
    """Run ``script RANK WORLD ...`` in ``world`` processes; the first that fails ends the others."""
    command = [sys.executable, str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(p for p in sys.path if p)}
    processes = []
    for rank in range(world):
        environment["PYTHONHASHSEED"] = str(rank + 1)  # NNI goes through sets: as elsewhere, every process in an order of its own
        whole = [*command, str(rank), str(world), *arguments]
        processes.append(subprocess.Popen(whole, env=environment, stderr=subprocess.PIPE, text=True))
    end = time.monotonic() + limit
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.1)
    late = [rank for rank, process in enumerate(processes) if process.poll() is None]
    for process in processes:
        process.kill()
    if late:
        raise TimeoutError(f"ranks {late} of {world} were still running after {limit} s: {' '.join(command)}")
    return processes


def run(world: int, way: str, worker: Path = WORKER, limit: float = 300.0) -> List[Dict[str, Any]]:
    """What each rank of a run over all cases left: case -> record, or the error in words."""
    with tempfile.TemporaryDirectory() as folder:
        processes = launch(worker, world, folder, way, limit=limit)
        for rank, process in enumerate(processes):
            if process.returncode:
                raise RuntimeError(f"rank {rank} of {world} failed:\n{process.stderr.read()[-3000:]}")
        return [dict(torch.load(Path(folder) / f"{rank}.pt", weights_only=False)) for rank in range(world)]


def run_once(world: int, way: str, worker: Path, limit: float) -> List[Dict[str, Any]]:
    """:func:`run`, once for all workers of a pytest-xdist run: the first that comes runs it, the others wait for its file."""
    one_run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if one_run is None:
        return run(world, way, worker, limit)
    folder = Path(tempfile.gettempdir()) / f"{worker.stem}-{world}-{way}-{one_run}"
    result = folder / "result.pt"
    try:
        folder.mkdir()
    except FileExistsError:
        end = time.monotonic() + limit + 60
        while not result.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"no {result} after {limit + 60} s: the launch in another worker of pytest failed") from None
            time.sleep(0.2)
        found = torch.load(result, weights_only=False)
        if isinstance(found, str):
            raise RuntimeError(found) from None
        return found
    try:
        found = run(world, way, worker, limit)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    torch.save(found, folder / "unfinished.pt")
    (folder / "unfinished.pt").rename(result)
    if isinstance(found, str):
        raise RuntimeError(found)
    return found
