"""The package's folder appears whole or not at all, and never in another's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimum_phi4mm.errors import ExportError
from optimum_phi4mm.exporter.package import check_output, check_space, staged


def fill(output: Path) -> None:
    with staged(output) as folder:
        for name in ("config.json", "model.onnx"):
            (folder / name).write_text(name)


def entries(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


WHOLE = {"config.json": "config.json", "model.onnx": "model.onnx"}


@pytest.mark.parametrize("output", ["new", "a/b/new", "empty"])
def test_a_whole_folder_is_moved_into_place(tmp_path, output):
    (tmp_path / "empty").mkdir(mode=0o750)
    fill(tmp_path / output)
    assert entries(tmp_path / output) == WHOLE
    assert not list(tmp_path.rglob("*.partial"))
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o750


def test_the_folder_a_shell_stands_in_is_filled_from_within(tmp_path, monkeypatch):
    output = tmp_path / "here"
    output.mkdir()
    monkeypatch.chdir(output)
    before = output.stat().st_ino
    with staged(Path(".")) as folder:
        assert folder.parent == output  # where nothing needs to cross to another file system
        (folder / "config.json").write_text("{}")
    assert entries(output) == {"config.json": "{}"}
    assert output.stat().st_ino == before
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_volume_is_filled_from_within(tmp_path, monkeypatch):
    output = tmp_path / "volume"
    output.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == output)
    before = output.stat().st_ino
    fill(output)
    assert entries(output) == WHOLE
    assert output.stat().st_ino == before


@pytest.mark.parametrize("here", [False, True], ids=["beside", "within"])
def test_after_an_error_nothing_is_left(tmp_path, monkeypatch, here):
    output = tmp_path / "a" / "b"
    if here:
        output.mkdir(parents=True)
        monkeypatch.chdir(output)
    with pytest.raises(KeyboardInterrupt), staged(output) as folder:
        (folder / "model.onnx").write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.rglob("*")) == ([tmp_path / "a", output] if here else [])


def test_what_the_system_says_comes_out_as_one_sentence(tmp_path):
    told = r"out can't be written.*No space left on device"
    with pytest.raises(ExportError, match=told), staged(tmp_path / "out"):
        raise OSError(28, "No space left on device", "model.onnx_data")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("here", [False, True], ids=["beside", "within"])
def test_what_appears_at_the_target_meanwhile_is_kept(tmp_path, monkeypatch, here):
    output = tmp_path / "out"
    output.mkdir()
    if here:
        monkeypatch.chdir(output)
    with pytest.raises(ExportError, match=r"config\.json"), staged(output) as folder:
        (folder / "config.json").write_text("ours")
        (output / "config.json").write_text("theirs")
    assert entries(output) == {"config.json": "theirs"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_target_under_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="not a folder"):
        check_output(tmp_path / "file" / "out")


def test_a_target_that_holds_something_is_refused(tmp_path):
    (tmp_path / "kept").write_text("")
    with pytest.raises(ExportError, match="already holds kept"):
        check_output(tmp_path)
    with pytest.raises(ExportError, match="not a folder"):
        check_output(tmp_path / "kept")


def test_a_name_that_no_file_system_takes_is_refused(tmp_path):
    with pytest.raises(ExportError, match="too long"):
        check_output(tmp_path / ("x" * 300))


def test_a_long_name_is_taken(tmp_path):
    fill(tmp_path / ("ü" * 127))  # 254 of 255 bytes
    assert entries(tmp_path / ("ü" * 127)) == WHOLE


def test_too_little_space_is_refused_with_both_numbers(tmp_path):
    with pytest.raises(ExportError, match=r"needs 1000000000\.00 GB .* free"):
        check_space(tmp_path, 10**18)
