"""The fix table's machinery, on targets of its own."""

from __future__ import annotations

import importlib
import sys
import threading
import types
import warnings
from typing import Any, Iterator

import pytest
from conftest import RELEASE

import nni_dataparallel
from nni_dataparallel import api, fixes, patching
from nni_dataparallel.patching import Fix, PatchError, PatchWarning


class Base:
    """Stock class."""

    def inherited(self, x: int) -> int:
        """Add one."""
        return x + 1


class Stock(Base):
    def method(self, x: int) -> int:
        """Double."""
        return 2 * x

    @staticmethod
    def static(x: int) -> int:
        return 3 * x

    @classmethod
    def of_class(cls, x: int) -> Any:
        return cls.__name__, x


def times_ten(stock: Any, *args: Any, **kwargs: Any) -> Any:
    result = stock(*args, **kwargs)
    return (result[0], result[1] * 10) if isinstance(result, tuple) else result * 10


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType("stock_module")
    made.Stock = Stock
    made.function = lambda x: x
    sys.modules["stock_module"] = made
    yield made
    del sys.modules["stock_module"]


def row(path: str, **more: Any) -> Fix:
    return Fix(path, f"stock_module:{path}", times_ten, "a test", inherited=path.endswith(".inherited"), **more)


NAMES = ["method", "static", "of_class", "inherited"]


@pytest.mark.parametrize("name", NAMES)
def test_install_and_uninstall_restore_by_identity(module: Any, name: str) -> None:
    """Every kind of attribute is replaced, called through, and restored as the very same object."""
    before = dict(vars(Stock))
    fix = row(f"Stock.{name}")
    patching.install(fix, "test")
    assert patching.is_live(fix)
    expected = {"method": 40, "static": 60, "of_class": ("Stock", 20), "inherited": 30}[name]
    assert getattr(Stock(), name)(2) == expected
    patching.uninstall(fix, "test")
    assert not patching.is_live(fix)
    after = dict(vars(Stock))
    assert before.keys() == after.keys()
    assert all(before[key] is after[key] for key in before)


def test_installing_twice_is_installing_once(module: Any) -> None:
    """The fix is not applied on top of itself."""
    fix = row("Stock.method")
    for _ in range(2):
        patching.install(fix, "test")
    assert Stock().method(1) == 20
    patching.uninstall(fix, "test")
    assert Stock().method(1) == 2


def test_a_fix_stays_for_its_other_holder(module: Any) -> None:
    """Who else needs a fix keeps it in place."""
    fix = row("function")
    patching.install(fix, "one")
    patching.install(fix, "two")
    patching.uninstall(fix, "one")
    assert module.function(1) == 10
    patching.uninstall(fix, "two")
    assert module.function(1) == 1


def test_a_foreign_patch_on_top_is_left_alone(module: Any) -> None:
    """Taking our fix back does not undo what others put over it; the user is told."""
    fix = row("function")
    patching.install(fix, "test")
    module.function = foreign = lambda x: -x
    with pytest.warns(PatchWarning, match="stock_module:function was replaced"):
        patching.uninstall(fix, "test")
    assert module.function is foreign


def test_name_signature_and_wrapped_survive(module: Any) -> None:
    """A fixed method looks like the stock one and leads to it."""
    fix, stock = row("Stock.method"), Stock.method
    patching.install(fix, "test")
    try:
        assert Stock.method.__name__ == "method"
        assert Stock.method.__doc__ == "Double."
        assert Stock.method.__wrapped__ is stock
    finally:
        patching.uninstall(fix, "test")


@pytest.mark.parametrize(
    ("fix", "text"),
    [
        (row("Stock.missing"), "does not exist"),
        (Fix("base", "stock_module:Stock.inherited", times_ten, "a test"), "only a base class has it"),
        (row("Stock.method", expects=("self", "y")), r"takes \(self, x\), not \(self, y, ...\)"),
        (Fix("gone", "no_such_module:f", times_ten, "a test"), "cannot be imported"),
    ],
    ids=["missing", "moved", "signature", "module"],
)
def test_a_target_that_does_not_fit_is_named_and_nothing_is_patched(module: Any, fix: Fix, text: str) -> None:
    """The error names the row, the target and the remedy."""
    with pytest.raises(PatchError, match=text):
        patching.require([row("Stock.method"), fix])
    assert Stock().method(1) == 2


def test_every_row_of_the_table_is_unique_and_explained() -> None:
    """Per release a target has one row, and every row says which fault it repairs."""
    for release in fixes.covered_releases():
        targets = [fix.target for fix in fixes.rows_for(release)]
        assert len(targets) == len(set(targets))
    assert all(len(fix.reason) > 20 for fix in fixes.FIXES)


def namespaces(rows: Any) -> Any:
    """What stands in each class and module that the rows touch."""
    return [dict(vars(patching._locate(fix)[0])) for fix in rows]


def assert_same_objects(rows: Any, before: Any) -> None:
    """Each touched namespace has the same names, for the very same objects."""
    for fix, old, new in zip(rows, before, namespaces(rows)):
        assert new.keys() == old.keys(), fix.target
        assert all(new[key] is old[key] for key in old), fix.target


covered = pytest.mark.skipif(RELEASE not in fixes.covered_releases(), reason=f"NNI {RELEASE} is not covered")


@covered
def test_unpatch_leaves_every_class_as_it_was() -> None:
    """patch(), twice, then unpatch(): each touched namespace has the same objects as before."""
    rows = fixes.rows_for(RELEASE)
    patching.require(rows)
    before = namespaces(rows)
    nni_dataparallel.patch()
    nni_dataparallel.patch()
    assert nni_dataparallel.is_patched()
    assert nni_dataparallel.patch_map() == dict.fromkeys([fix.target for fix in rows], True)
    nni_dataparallel.unpatch()
    assert not nni_dataparallel.is_patched()
    assert_same_objects(rows, before)


@covered
def test_patched_is_a_context_manager_that_keeps_an_earlier_patch() -> None:
    """Inside the block NNI is patched; outside it is what it was before, also after an exception."""
    with pytest.raises(KeyError), nni_dataparallel.patched():
        assert nni_dataparallel.is_patched()
        raise KeyError
    assert not nni_dataparallel.is_patched()
    nni_dataparallel.patch()
    with nni_dataparallel.patched():
        pass
    assert nni_dataparallel.is_patched()


METHOD = "update_calibration_config" if RELEASE == "3.0" else "_wrap_modules"


def compressor() -> Any:
    """The release's module with Quantizer in it."""
    return importlib.import_module(next(row.module for row in fixes.rows_for(RELEASE) if row.module.endswith(".compressor")))


@covered
def test_patch_map_reads_the_live_attributes() -> None:
    """Somebody else's assignment shows, it is not remembered away."""
    quantizer = compressor().Quantizer
    nni_dataparallel.patch()
    ours = getattr(quantizer, METHOD)
    setattr(quantizer, METHOD, lambda *args: None)
    try:
        assert not nni_dataparallel.is_patched()
        assert not nni_dataparallel.patch_map()[f"{compressor().__name__}:Quantizer.{METHOD}"]
    finally:
        setattr(quantizer, METHOD, ours)
    assert nni_dataparallel.is_patched()


@covered
def test_a_changed_target_stops_patch_and_is_skipped_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NNI of another shape: patch() raises and changes nothing, auto warns with the row's name."""
    nni_dataparallel.unpatch()
    monkeypatch.setattr(compressor().Quantizer, METHOD, lambda self, other: None)
    with pytest.raises(PatchError, match=rf"Quantizer\.{METHOD}"):
        nni_dataparallel.patch()
    live = nni_dataparallel.patch_map()
    assert not any(live[target] for target in live if target.startswith("nni."))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        api.arm()
    assert any(f"Quantizer.{METHOD}" in str(w.message) for w in caught)
    assert sum(nni_dataparallel.patch_map().values()) == len(nni_dataparallel.patch_map()) - 1


@covered
def test_patching_from_many_threads_is_patching_once() -> None:
    """A race for patch() and unpatch() ends with stock classes."""
    rows = fixes.rows_for(RELEASE)
    patching.require(rows)
    before = namespaces(rows)

    def work() -> None:
        for _ in range(20):
            nni_dataparallel.patch()
            nni_dataparallel.unpatch()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    nni_dataparallel.unpatch()
    assert_same_objects(rows, before)


@pytest.mark.parametrize("release", ["2.99", "999.dev0", "3.1", "1.3"])
def test_an_unknown_release_is_told_in_words(release: str) -> None:
    """The error names the release, the covered ones and the remedy."""
    with pytest.raises(nni_dataparallel.UnsupportedReleaseError, match=rf"NNI {release} is unknown.*2\.10\.1.*pip install"):
        fixes.rows_for(release)


def test_every_release_has_rows() -> None:
    """No release that we know is left to stock NNI."""
    assert fixes.covered_releases() == list(fixes.RELEASES)
