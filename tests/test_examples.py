"""The examples run as they stand."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest


EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "lines"),
    [("describe_image", 1), ("transcribe_audio", 1), ("image_and_audio", 1), ("batch_mixed", 4)],
)
def test_an_example_answers(package, monkeypatch, capsys, name, lines):
    monkeypatch.setattr(sys, "argv", [name, str(package.path)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    told = capsys.readouterr().out.strip().splitlines()
    assert len(told) == lines and all(line.strip() for line in told)
