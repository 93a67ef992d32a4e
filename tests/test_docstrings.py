"""The public names: each has a numpydoc docstring with its parameters, and an example that runs on the installed NNI."""

from __future__ import annotations

import doctest
import inspect
import io
import re
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, Dict, List

import pytest
from conftest import RELEASE
from packaging.specifiers import SpecifierSet

from nni_dataparallel import api, fixes

HOMES = ("nni_dataparallel", "nni_dataparallel.doctor", "nni_dataparallel.rehearsal", "nni_dataparallel.feathermap")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public() -> Dict[str, Any]:
    """Every name in an ``__all__``, and the quantizers of the installed release."""
    names = [(home, name) for home in HOMES for name in import_module(home).__all__]
    names += [(HOMES[0], name) for name in fixes.QUANTIZERS if fixes.ships(RELEASE, name)]
    found: Dict[int, Any] = {}
    for home, name in names:
        value = getattr(import_module(home), name)
        found.setdefault(id(value), (f"{home}.{name}", value))  # some are there twice
    return dict(found.values())


PUBLIC = public()
each_name = pytest.mark.parametrize("name", PUBLIC)


def sections(text: str) -> Dict[str, str]:
    """Heading -> what stands below it, as numpydoc reads it."""
    parts = re.split(r"^(\w[\w ]*)\n-{3,}\n", inspect.cleandoc(text), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def fitting(examples: str) -> str:
    """The examples without those behind ``With NNI <first> - <last>:`` that are for other releases."""
    parts = re.split(r"^With NNI ([\d.]+)(?: - ([\d.]+))?:$", examples, flags=re.MULTILINE)
    kept = parts[0]
    for first, last, code in zip(parts[1::3], parts[2::3], parts[3::3]):
        if SpecifierSet(f">={first},<={last or first}").contains(RELEASE, prereleases=True):
            kept += code
    return kept


def parameters(value: Any) -> List[str]:
    known = inspect.signature(value).parameters.values()
    return [p.name for p in known if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "self"]


def called(value: Any) -> bool:
    """Whether users call a name; results, errors and warnings they get."""
    return not inspect.isclass(value) or not (issubclass(value, Exception) or hasattr(value, "__dataclass_fields__"))


@each_name
def test_a_docstring_says_everything(name: str) -> None:
    """A first line that is a sentence, every parameter and its type, an example; every public method has a docstring, too."""
    value = PUBLIC[name]
    text = value.__doc__ or ""
    first, found = inspect.cleandoc(text).partition("\n\n")[0], sections(text)
    assert re.search(r"[.:]$", first), first
    if called(value):
        typed = re.findall(r"^(\w[\w, ]*) : ", found.get("Parameters", ""), re.MULTILINE)
        assert set(parameters(value)) <= {name for line in typed for name in line.split(", ")}
    assert ">>> " in found.get("Examples", ""), "no example"
    if inspect.isclass(value):
        methods = [m for n, m in vars(value).items() if n[0] != "_" and inspect.isfunction(m)]
        inherited = dir(value.__mro__[1])
        assert not [m for m in methods if m.__name__ not in inherited and not m.__doc__]


@each_name
def test_the_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand there, and what they print is what stands there."""
    monkeypatch.chdir(tmp_path)
    api.patch()  # NNI's modules print lines of their own on import
    api.unpatch()
    value = PUBLIC[name]
    texts = {name: fitting(sections(value.__doc__)["Examples"])}
    if not texts[name].strip():
        pytest.skip(f"no example for NNI {RELEASE}")
    if inspect.isclass(value) and value.__module__.startswith("nni_dataparallel."):
        methods = {n: inspect.getdoc(m) or "" for n, m in vars(value).items() if inspect.isroutine(m)}
        texts.update({f"{name}.{n}": text for n, text in methods.items() if ">>> " in text})
    for place, text in texts.items():
        example = doctest.DocTestParser().get_doctest(text, {}, place, None, 0)
        assert example.examples, place
        report = io.StringIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            doctest.DocTestRunner(optionflags=OPTIONS).run(example, out=report.write)
        assert not report.getvalue(), report.getvalue()
