"""Files: whole or not at all, whatever happens while they are written; nothing in them runs when they are read."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import random
import signal
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch
from damage import SCALE, files_in, flipped, full_disk
from torch import nn

from nni_dataparallel import files
from nni_dataparallel.files import read_tensors, written_whole

pytestmark = pytest.mark.once

OLD = b"what was there before"


def test_what_is_written_appears_when_all_of_it_is(tmp_path: Path) -> None:
    """Until the end of the block the folder shows the old files; then the new ones, and nothing else."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(OLD)
    with written_whole(first, str(second)) as drafts:
        for draft in drafts:
            Path(draft).write_text(draft)
        assert first.read_bytes() == OLD
        assert not second.exists()
    assert files_in(tmp_path) == {"first": drafts[0].encode(), "second": drafts[1].encode()}


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("written", [0, 1, 2])
def test_an_error_in_between_leaves_what_was_there(tmp_path: Path, kind: Any, written: int) -> None:
    """Before, between and after the files: the old one is whole, the new one does not exist, no draft is left."""
    (tmp_path / "first").write_bytes(OLD)
    with pytest.raises(kind), written_whole(tmp_path / "first", tmp_path / "second") as drafts:
        for draft in drafts[:written]:
            Path(draft).write_bytes(b"half")
        raise kind
    assert files_in(tmp_path) == {"first": OLD}


@pytest.mark.parametrize("size", [0, 1000, 50_000])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, size: int) -> None:
    """torch's own writer, which does not say why it failed."""
    (tmp_path / "model.pth").write_bytes(OLD)
    with pytest.raises((OSError, RuntimeError)), written_whole(tmp_path / "model.pth") as (draft,), full_disk(size):
        torch.save(torch.randn(50_000), draft)
    assert files_in(tmp_path) == {"model.pth": OLD}


def test_a_killed_process_leaves_what_was_there(tmp_path: Path) -> None:
    """Nothing is cleaned up then: the target is the old file, the draft lies beside it under a name that says so."""
    code = (
        "import sys, time\nfrom nni_dataparallel.files import written_whole\n"
        "with written_whole(sys.argv[1]) as (draft,):\n"
        "    open(draft, 'w').write('half'); print('written', flush=True); time.sleep(60)"
    )
    target = tmp_path / "model.pth"
    target.write_bytes(OLD)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert target.read_bytes() == OLD
    (left,) = (path for path in tmp_path.iterdir() if path != target)
    assert left.name.startswith(".model.pth.")
    assert left.name.endswith(".partial")


def test_what_a_writer_puts_beside_its_file_comes_along(tmp_path: Path) -> None:
    """As ONNX does with weights; names in the file are those that it has in the end."""
    with written_whole(tmp_path / "net.onnx") as (draft,):
        assert Path(draft).name == "net.onnx"
        Path(draft).write_text(Path(draft).name + ".data")
        Path(f"{draft}.data").write_text("weights")
    assert files_in(tmp_path) == {"net.onnx": b"net.onnx.data", "net.onnx.data": b"weights"}


def test_a_saved_archive_is_the_one_that_torch_writes(tmp_path: Path) -> None:
    """The archive's folder is named after the file."""
    with written_whole(tmp_path / "model.pth") as (draft,):
        torch.save(torch.ones(3), draft)
    torch.save(torch.ones(3), tmp_path / "other.pth")
    names = [zipfile.ZipFile(tmp_path / f"{name}.pth").namelist() for name in ("model", "other")]
    assert [name.replace("model", "other") for name in names[0]] == names[1]


def test_links_permissions_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    """A link goes on pointing at the file, the file keeps its mode, a new one has that of any new file, a device is written to."""
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "file", tmp_path / "link"
    target.write_bytes(OLD)
    target.chmod(0o604)
    link.symlink_to(target)
    (tmp_path / "plain").write_bytes(OLD)
    with written_whole(link, tmp_path / "new", os.devnull) as drafts:
        for draft in drafts:
            Path(draft).write_bytes(b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o604
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert drafts[2] == os.devnull


def test_a_place_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    """A folder for a file, a folder that does not exist, a file for a folder."""
    (tmp_path / "file").write_bytes(OLD)
    for target, kind, text in (
        (tmp_path, IsADirectoryError, "is a folder: give the name of a file in it"),
        (tmp_path / "no" / "file", FileNotFoundError, "there is no folder .*no' for "),
        (tmp_path / "file" / "in it", NotADirectoryError, "a file is written beside its old version"),
    ):
        with pytest.raises(kind, match=text), written_whole(target):
            raise AssertionError("not reached")
    assert files_in(tmp_path) == {"file": OLD}


class Malicious:
    """A pickle that writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _state() -> Dict[str, Any]:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    more = {"numbers": (1, 2.5, None, True, "text"), "half": torch.ones(2, dtype=torch.bfloat16), "weight": net[0].weight}
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), **more}


def _saved(value: Any, archive: bool = True) -> io.BytesIO:
    held = io.BytesIO()
    torch.save(value, held, _use_new_zipfile_serialization=archive)
    held.seek(0)
    return held


def _restricted(held: Any) -> Any:
    """The loader for torch before 2.0, on any torch."""
    return torch.load(held, pickle_module=files._restricted(), **({"weights_only": False} if hasattr(torch, "compile") else {}))


@pytest.mark.parametrize("read", [read_tensors, _restricted])
@pytest.mark.parametrize("archive", [True, False])
def test_reading_gives_tensors_and_runs_nothing(tmp_path: Path, read: Callable[[Any], Any], archive: bool) -> None:
    """Both of torch's formats, by the loader of torch and by ours for torch before 2.0."""
    state = _state()
    loaded = read(_saved(state, archive))
    assert str(loaded) == str(state)
    assert isinstance(loaded["model"], collections.OrderedDict)
    with pytest.raises((ValueError, pickle.UnpicklingError), match=r"pathlib\.\S*Path\S*|Path\.touch|getattr"):
        read(_saved({"model": Malicious(tmp_path / "ran")}, archive))
    assert not (tmp_path / "ran").exists()


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    """The file is named, and what is wrong with it; no file and no permission are the system's errors."""
    path = tmp_path / "model.pth"
    for content, text in ((b"", "EOFError"), (b"text", "model.pth cannot be read, it is truncated, damaged or no"), (b"PK", "zip")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=text):
            read_tensors(path)
    torch.save(Malicious(tmp_path / "ran"), path)
    with pytest.raises(ValueError, match=r"model\.pth cannot .* names \S+, which is neither tensor nor number: reading it could"):
        read_tensors(path)
    with pytest.raises(FileNotFoundError):
        read_tensors(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        read_tensors(tmp_path)


def test_every_truncation_is_told() -> None:
    """A file of a few hundred bytes in both formats, cut after each of them."""
    for archive in (True, False):
        content = _saved(torch.ones(1), archive).getvalue()
        end = len(content) if archive else len(content) - 1
        for length in range(0, end, 1 if SCALE > 1 else 3):
            with pytest.raises(ValueError, match="the file cannot be read, it is truncated, damaged or no checkpoint of tensors"):
                read_tensors(io.BytesIO(content[:length]))


def _flips(content: bytes, count: int, seed: int) -> List[bytes]:
    """Random ones; every single one where there is time for it."""
    places = [(position, bit) for position in range(len(content)) for bit in range(8)]
    chosen = places if SCALE > 1 else random.Random(seed).sample(places, count)
    return [flipped(content, *place) for place in chosen]


def test_a_flipped_bit_is_told_or_does_not_matter(record_property: Callable[[str, Any], None]) -> None:
    """In an archive, whose records have checksums, what is read is what was written, or an error. torch alone reads others."""
    state = {"weight": torch.arange(100.0), "steps": 3, "name": "QAT"}
    content, expected = _saved(state).getvalue(), str(state)
    told, silent = 0, 0
    damaged = _flips(content, 400, 0)
    # What torch takes for a folder: it reads nothing, and gives what happened to be in memory.
    entry = content.rindex(b"archive/data/0") - 46
    damaged.append(flipped(content, entry + 38, 4))
    for each in damaged:
        try:
            found = read_tensors(io.BytesIO(each))
        except ValueError:
            told += 1
        else:
            assert str(found) == expected
        with contextlib.suppress(Exception):
            silent += str(torch.load(io.BytesIO(each))) != expected
    record_property("trials", len(damaged))
    assert told > len(damaged) // 4
    assert silent > 0


def test_a_file_without_checksums_is_read() -> None:
    """torch can be told not to compute them."""
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this torch always computes them")
    torch.serialization.set_crc32_options(False)
    try:
        held = _saved({"weight": torch.ones(3)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(read_tensors(held)["weight"], torch.ones(3))


def test_a_flipped_bit_in_the_old_format_does_no_harm(record_property: Callable[[str, Any], None]) -> None:
    """There are no checksums: another number is read, or an error is told; nothing else happens."""
    damaged = _flips(_saved({"weight": torch.arange(10.0), "steps": 3}, archive=False).getvalue(), 400, 1)
    for each in damaged:
        with contextlib.suppress(ValueError):
            read_tensors(io.BytesIO(each))
    record_property("trials", len(damaged))
