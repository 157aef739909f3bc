"""The first run of the README, whole: it reads digits it has not seen, and knows its text better than counting does."""

import re

import pytest

from omnijax.metrics import read_metrics
from tests import runs


@pytest.mark.full
def test_the_quick_start_reads_digits_and_beats_a_trigram(tmp_path):
    done = runs.finish(
        runs.start(runs.HOME, "-m", "omnijax.train", "configs/quickstart.gin", f"Run.dir='{tmp_path}'"), seconds=1500
    )
    said = done.stdout
    assert done.returncode == 0, done.stderr
    metrics = read_metrics(tmp_path)
    assert metrics[-1]["heldout/answers_right"] >= 0.93
    trigram = float(re.search(r"3-gram model, ([\d.]+) held-out bits per byte", said)[1])
    assert metrics[-1]["heldout/bits_per_byte"] < trigram
    assert (tmp_path / "answers.png").stat().st_size > 10_000
