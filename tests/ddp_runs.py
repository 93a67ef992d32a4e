"""Start the ranks of a DDP run, wait for them with a limit, and read what they left."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

from harness import Record, differences

WORKER = Path(__file__).parent / "ddp_worker.py"
Ranks = List[Dict[str, Any]]


class Ended:
    """A rank's exit status and what it wrote on stderr."""

    def __init__(self, status: int, errors: str) -> None:
        self.status, self.errors = status, errors


def launch(script: Path, world: int, folder: Path, *arguments: str, limit: float = 240.0) -> List[Ended]:
    """Run ``script RANK WORLD FOLDER ...`` in ``world`` processes until all have ended; raises after ``limit`` seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment.pop("NNI_DATAPARALLEL_STATISTICS", None)
    folder.mkdir(parents=True, exist_ok=True)
    # A file, since nobody reads a pipe while the ranks run, and a full one stops them.
    logs = [folder / f"{rank}.err" for rank in range(world)]
    processes = []
    try:
        for rank in range(world):
            environment["PYTHONHASHSEED"] = str(rank + 1)  # NNI goes through sets: every process in an order of its own
            command = [sys.executable, str(script), str(rank), str(world), str(folder), *arguments]
            with logs[rank].open("w") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log))
        end = time.monotonic() + limit
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            time.sleep(0.05)
        late = [rank for rank, process in enumerate(processes) if process.poll() is None]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    errors = [log.read_text()[-3000:] for log in logs]
    if late:
        raise TimeoutError(f"ranks {late} of {world} were still running after {limit} s, {script.name} {arguments}: {errors}")
    return [Ended(process.returncode, text) for process, text in zip(processes, errors)]


def run(world: int, folder: Path, way: str, *jobs: str, worker: Path = WORKER) -> List[Dict[str, Any]]:
    """What each rank left of each job (all cases of the release if none are named), or the error in words."""
    for rank, ended in enumerate(launch(worker, world, folder, way, *jobs)):
        if ended.status:
            raise RuntimeError(f"rank {rank} of {world} failed with status {ended.status}:\n{ended.errors}")
    return [dict(pickle.loads((folder / f"{rank}.pickle").read_bytes())) for rank in range(world)]


_read: Dict[Path, Any] = {}  # reading what was left takes longer than what a test does with it


def once(folder: Path, name: str, make: Callable[[Path], Any], limit: float = 300.0) -> Any:
    """What ``make`` returned, run by the first test process that asks; the others wait for it.

    The workers of pytest-xdist share ``folder``. An error is kept, too, and raised in all of them. What is returned is
    shared by all who ask.
    """
    place, done = folder / name, folder / f"{name}.done"
    if done in _read:
        return _read[done]
    try:
        place.mkdir()
    except FileExistsError:
        end = time.monotonic() + limit
        while not done.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"no other process has finished {name} in {limit} s") from None
            time.sleep(0.2)
    else:
        try:
            found: Any = make(place)
        except Exception as error:
            found = error
        partial = folder / f"{name}.partial"
        partial.write_bytes(pickle.dumps(found))
        partial.rename(done)
    result = pickle.loads(done.read_bytes())
    if isinstance(result, Exception):
        raise result
    _read[done] = result
    return result


def faults(expected: Record, ranks: List[Any]) -> List[str]:
    """In words, where any rank is not what the reference says."""
    found = []
    for rank, record in enumerate(ranks):
        lines = [record] if isinstance(record, str) else differences(expected, record)
        found += [f"rank {rank}: {line}" for line in lines]
    return found
