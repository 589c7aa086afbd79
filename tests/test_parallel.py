"""`flashzoo.parallel` on gloo, 2 and 4 processes of one spawn: outputs, LSE and gradients are the whole's."""

from __future__ import annotations

import pytest
from parallel_ranks import CASES, in_processes


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What each case raised, of all ranks, by its name."""
    return in_processes(tmp_path_factory.mktemp("parallel"))


@pytest.mark.parametrize("case", CASES)
def test_ranks(case, failures):
    assert not failures[case]
