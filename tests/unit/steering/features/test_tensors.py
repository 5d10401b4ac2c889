"""Files of tensors: read by parts, never executed, and refused where they hold anything else."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.steering.features.tensors import FeatureFileError, open_tensors
from tests.fakes.sparse_coders import save

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4) / 7


class Harmful:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.write_text, (self.path, "run")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tensors_of_pytorch_are_read_in_every_type_and_layout(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.from_numpy(VALUES).to(dtype)
    torch.save(
        {"a": tensor, "b": tensor.T, "c": torch.nn.Parameter(tensor)[1:], "k": 3, "name": "x"}, tmp_path / "x.pt"
    )

    file = open_tensors(tmp_path / "x.pt")

    expected = tensor.double().numpy()
    np.testing.assert_array_equal(file["a"].read(), expected)
    np.testing.assert_array_equal(file["b"].read(), expected.T)
    np.testing.assert_array_equal(file["b"].transposed.rows(np.asarray([2, 0])), expected[[2, 0]])
    np.testing.assert_array_equal(file["c"].read(np.float64), expected[1:])
    assert (file.number("k"), file.texts) == (3, {"name": "x"})


def test_pickles_are_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save({"a": torch.zeros(2), "b": Harmful(mark)}, tmp_path / "nested.pt")
    torch.save({"a": torch.zeros(2), "b": Harmful(mark)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Harmful(mark)))
    np.savez(tmp_path / "x.npz", a=np.asarray([Harmful(mark)], object))
    torch.save({"a": np.zeros(2)}, tmp_path / "numpy.pt")
    torch.save(Harmful(mark), tmp_path / "whole.pt")

    for name, why in (
        ("nested.pt", "holds more than tensors .* so it is not loaded.*Convert it where it was made"),
        ("old.pt", "not a zip archive of PyTorch"),
        ("plain.pth", "not a zip archive of PyTorch"),
        ("x.npz", "holds pickled objects, which are not loaded"),
        ("numpy.pt", "holds more than tensors"),
        ("whole.pt", "holds more than tensors"),
    ):
        with pytest.raises(FeatureFileError, match=why):
            open_tensors(tmp_path / name)
    assert not mark.exists()


@pytest.mark.parametrize("alignment", ["0", "-64", "x", "9" * 15, "0" * 30, ""])
def test_a_file_of_pytorch_that_ends_the_process_is_refused(alignment: str, tmp_path: Path) -> None:
    """PyTorch divides by the alignment that a file gives, outside of Python."""
    torch.save({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
        for info in old.infolist():
            is_changed = info.filename.endswith(".storage_alignment")
            new.writestr(info.filename, alignment if is_changed else old.read(info))

    with pytest.raises(FeatureFileError, match=r"y\.pt: .*its storages are aligned to"):
        open_tensors(tmp_path / "y.pt")


def test_other_content_of_pytorch_files_is_refused(tmp_path: Path) -> None:
    torch.save([torch.zeros(2)], tmp_path / "list.pt")
    torch.save({"optimizer": {"lr": 1}}, tmp_path / "nested.pt")
    torch.save({"a": torch.zeros(2, 2).to_sparse()}, tmp_path / "sparse.pt")

    for name, why in (
        ("list.pt", "expected a dictionary of tensors, got list"),
        ("nested.pt", "'optimizer': expected a dense tensor or a number, got dict"),
        ("sparse.pt", "'a': expected a dense tensor"),
    ):
        with pytest.raises(FeatureFileError, match=why):
            open_tensors(tmp_path / name)


@pytest.mark.parametrize("packs", [False, True])
def test_npz_members_are_read_packed_or_not(packs: bool, tmp_path: Path) -> None:
    arrays = {"a": VALUES, "b": np.asfortranarray(VALUES), "c": np.zeros((0, 3)), "n": np.asarray(5)}
    (np.savez_compressed if packs else np.savez)(tmp_path / "x.npz", **arrays)

    file = open_tensors(tmp_path / "x.npz")

    for name, values in arrays.items():
        np.testing.assert_array_equal(file[name].read(), values)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "x.safetensors", {"a": VALUES})
    np.savez(tmp_path / "x.npz", a=VALUES)
    torch.save({"a": torch.zeros(1000)}, tmp_path / "x.pt")

    for path in sorted(tmp_path.iterdir()):
        whole = path.read_bytes()
        for length in (0, 5, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            with pytest.raises(FeatureFileError, match=path.name):
                open_tensors(path)
    with pytest.raises(FeatureFileError, match="no such file"):
        open_tensors(tmp_path / "y.npz")
    (tmp_path / "y.bin").write_bytes(b"")
    with pytest.raises(FeatureFileError, match=r"unknown suffix '.bin'; known: .safetensors, .npz, .npy, .pt, .pth"):
        open_tensors(tmp_path / "y.bin")


def test_an_array_of_text_and_a_missing_tensor_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.asarray(["x"]))
    with pytest.raises(FeatureFileError, match="'a': expected numbers, got elements of type <U1"):
        open_tensors(tmp_path / "x.npz")

    buffer = io.BytesIO()
    np.savez(buffer, a=VALUES, b=VALUES)
    (tmp_path / "y.npz").write_bytes(buffer.getvalue())
    with pytest.raises(FeatureFileError, match="expected a tensor 'W_enc', found a, b"):
        open_tensors(tmp_path / "y.npz")["W_enc"]
    with pytest.raises(FeatureFileError, match="expected one number, got the shape"):
        open_tensors(tmp_path / "y.npz").number("a")


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt", ".npy"])
@pytest.mark.parametrize("change", ["cut", "rewritten", "replaced", "gone"])
def test_a_file_that_changes_while_it_is_open_is_an_error_and_no_other_rows(
    suffix: str, change: str, tmp_path: Path
) -> None:
    """A mapped file that is cut off kills the process that reads it, with SIGBUS."""
    path, large = tmp_path / f"x{suffix}", np.ones((512, 64), np.float32)
    write_tensors(path, large)
    tensor = next(iter(open_tensors(path).tensors.values()))

    if change == "cut":
        os.truncate(path, 4096)
    elif change == "rewritten":
        before = path.stat()
        path.write_bytes(path.read_bytes().replace(b"\0\0\x80\x3f", b"\0\0\0\x40"))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    elif change == "replaced":
        write_tensors(tmp_path / f"y{suffix}", 2 * large)
        (tmp_path / f"y{suffix}").replace(path)
    else:
        path.unlink()

    with pytest.raises(FeatureFileError, match=rf"x\{suffix}: the file (has changed|is gone).*; register it again"):
        tensor.read()


def write_tensors(path: Path, values: np.ndarray[Any, Any]) -> None:
    if path.suffix == ".pt":
        torch.save({"a": torch.from_numpy(values)}, path)
    elif path.suffix == ".npy":
        np.save(path, values)
    elif path.suffix == ".npz":
        np.savez_compressed(path, a=values)
    else:
        save(path, {"a": values})


def test_only_wanted_members_of_an_archive_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, small=VALUES, large=np.zeros((1 << 12, 1 << 12), np.float32))
    unpacked, unpack = [], zipfile.ZipExtFile.read

    def read(self: zipfile.ZipExtFile, count: int | None = -1) -> bytes:
        content = unpack(self, count)
        unpacked.append(len(content))
        return content

    monkeypatch.setattr(zipfile.ZipExtFile, "read", read)

    file = open_tensors(path)
    np.testing.assert_array_equal(file["small"].read(), VALUES)

    assert file["large"].shape == (1 << 12, 1 << 12)
    assert sum(unpacked) < 1 << 18, "of 64 MiB that the other member has"


def test_a_member_of_another_size_than_its_header_says_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (3, 4)})
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", header.getvalue() + bytes(1 << 20))

    with pytest.raises(
        FeatureFileError, match=r"'a': cut off or damaged: 1048704 bytes, and its header says float32 of"
    ):
        open_tensors(tmp_path / "x.npz")
