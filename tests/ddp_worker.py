"""One rank of a DDP run over gloo: does jobs one after the other and writes down what they left.

    python tests/ddp_worker.py RANK WORLD FOLDER (patched | stock | uncaught) [JOB ...]

A job is the id of a case, which is trained on this rank's share of each batch, or the name of a scenario of
``ddp_scenarios.py`` or ``ddp_edges.py``. Each job has a process group of its own: if one rank fails in it, the connection ends,
the others fail, too, and all go on with the next job (``uncaught``: the process ends, as a script would). Started by
``ddp_runs.py``.
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import gc
import os
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, Iterable, List, Tuple

import ddp_edges
import ddp_scenarios
from conftest import CASES
from torch import distributed

import nni_dataparallel

RANK, WORLD, FOLDER, WAY = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
CASE = {case.id: case for case in CASES}
LIMIT = datetime.timedelta(seconds=20)
"""Of a collective: less than that of the launch, so that a hang ends as an error of the job."""


def do(job: str) -> Any:
    if job in CASE:
        return ddp_scenarios.train(CASE[job], WAY)
    return getattr(ddp_scenarios if hasattr(ddp_scenarios, job) else ddp_edges, job)(FOLDER)


def main(jobs: Iterable[Tuple[str, Callable[[], Any]]]) -> None:
    """Do the jobs, and write down what each left, or the error in words."""
    warnings.simplefilter("ignore")
    if WAY != "stock":
        nni_dataparallel.patch()
    found: List[Tuple[str, Any]] = []
    kept: List[Any] = []
    gc.freeze()  # a collection looks at what the jobs made only
    gc.disable()
    faulthandler.dump_traceback_later(200, exit=True)  # less than the launch waits: a hang says where it is
    for number, (job, run) in enumerate(jobs):
        store = distributed.FileStore(str(FOLDER / f"store{number}"), WORLD)
        distributed.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD, timeout=LIMIT)
        try:
            found.append((job, run()))
            # While the group is there: a DDP that goes later takes gloo's threads down with the interpreter locked, and one
            # that waits for the lock then waits for ever.
            gc.collect()
            distributed.barrier()
        except Exception as error:
            if WAY == "uncaught":
                raise
            found.append((job, f"{type(error).__name__}: {error}"))
            # What is left of it stays as it is: taking down a DDP in the middle of a reduction may wait for ever.
            kept.append((error, distributed.group.WORLD))
        distributed.destroy_process_group()
    (FOLDER / f"{RANK}.pickle").write_bytes(pickle.dumps(found))
    if kept:
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main((job, functools.partial(do, job)) for job in sys.argv[5:] or CASE)
