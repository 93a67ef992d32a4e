"""Shared fixtures: the release under test, and stock NNI before and after every test."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Iterator

import pytest
from cases import cases_for, is_first, is_modern, is_new

from nni_dataparallel import api, fixes, parallel, patching

logging.getLogger("nni").setLevel(logging.ERROR)
RELEASE = fixes.installed_release()
IS_MODERN = is_modern(RELEASE)
IS_FIRST = is_first(RELEASE)
IS_NEW = is_new(RELEASE)
CASES = cases_for(RELEASE)
needs_a_quantizer = pytest.mark.skipif(not CASES, reason=f"NNI {RELEASE} has no quantizer")
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


@pytest.fixture(autouse=True)
def stock_nni() -> Iterator[None]:
    """No test sees another one's patch."""
    api.unpatch()
    yield
    api.unpatch()


@pytest.fixture
def worker_contexts() -> Iterator[None]:
    """The wrapped names of torch.nn.parallel, without NNI."""
    for fix in parallel.FIXES:
        patching.install(fix, "test")
    yield
    for fix in parallel.FIXES:
        patching.uninstall(fix, "test")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers of pytest-xdist share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if re.match(r"popen-gw\d+", base.name) else base) / "ddp"
    folder.mkdir(exist_ok=True)
    return folder
