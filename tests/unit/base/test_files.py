from __future__ import annotations

from pathlib import Path

import pytest

from bidmatch.base.errors import BidmatchError
from bidmatch.base.files import (
    PARTIAL_SUFFIX,
    atomic_dir,
    atomic_file,
    locked,
    refuse_inside,
    remove_partials,
    sha256_file,
)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "sub" / "out.txt"
    with pytest.raises(RuntimeError), atomic_file(target) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert list(target.parent.iterdir()) == []
    with atomic_file(target) as partial:
        partial.write_text("whole")
        assert not target.exists()
    assert target.read_text() == "whole"
    assert list(target.parent.iterdir()) == [target]


def test_a_folder_is_swapped_and_the_old_one_goes(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    with atomic_dir(target) as partial:
        (partial / "a").write_text("old")
    with atomic_dir(target, overwrite=True) as partial:
        (partial / "b").write_text("new")
        assert (target / "a").read_text() == "old"
    assert [entry.name for entry in target.iterdir()] == ["b"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_overwrite_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    with atomic_dir(target) as partial:
        (partial / "a").write_text("old")
    with pytest.raises(RuntimeError), atomic_dir(target, overwrite=True):
        raise RuntimeError
    assert (target / "a").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_an_existing_folder_is_refused_even_when_it_came_meanwhile(tmp_path: Path) -> None:
    target = tmp_path / "bundle"
    with pytest.raises(BidmatchError, match="already exists"), atomic_dir(target) as partial:
        (partial / "a").write_text("mine")
        target.mkdir()
        (target / "theirs").write_text("theirs")
    assert (target / "theirs").read_text() == "theirs"
    with pytest.raises(BidmatchError, match="already exists"), atomic_dir(target):
        pass


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "out"
    (tmp_path / f".out.0123abcd{PARTIAL_SUFFIX}").mkdir()
    (tmp_path / f".out.4567abcd{PARTIAL_SUFFIX}").write_text("half")
    (tmp_path / f".other.0123abcd{PARTIAL_SUFFIX}").write_text("of another")
    remove_partials(target)
    assert [entry.name for entry in tmp_path.iterdir()] == [f".other.0123abcd{PARTIAL_SUFFIX}"]


def test_a_new_folder_clears_what_was_left_unless_another_writer_is_there(tmp_path: Path) -> None:
    left = tmp_path / f".out.0123abcd{PARTIAL_SUFFIX}"
    left.mkdir()
    with atomic_dir(tmp_path / "other"), atomic_dir(tmp_path / "out"):
        assert left.exists()
    with atomic_dir(tmp_path / "out", overwrite=True):
        assert not left.exists()


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    with (
        locked(tmp_path / ".lock", "taken"),
        pytest.raises(BidmatchError, match="taken"),
        locked(tmp_path / ".lock", "taken"),
    ):
        pass
    with locked(tmp_path / ".lock", "taken"):
        pass


@pytest.mark.parametrize("inside", ["a", "sub/a", "../folder/a", "../link/a"])
def test_an_output_inside_a_sealed_folder_is_refused(tmp_path: Path, inside: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(BidmatchError, match="a bundle holds nothing but its own files"):
        refuse_inside(folder / inside, folder, "bundle")
    refuse_inside(tmp_path / "folder2", folder, "bundle")


def test_sha256_is_the_published_one(tmp_path: Path) -> None:
    file = tmp_path / "abc"
    file.write_bytes(b"abc")
    assert sha256_file(file) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
