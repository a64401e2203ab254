"""Progress while a model loads: a bar, but only for what takes long."""

import time

from edgellm.loading import weights_progress


def test_a_quick_load_says_nothing_and_a_slow_one_draws_a_bar(monkeypatch):
    now, said = [100.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    progress = weights_progress(said.append)
    now[0] = 100.9
    progress(50, 100)
    assert said == []
    now[0] = 101.1
    progress(50, 100)
    progress(51, 100)  # too soon after the last
    assert said == ["loading weights [###############...............] 50 %"]
    now[0] = 102
    progress(100, 100)
    assert said[1] == f"loading weights [{'#' * 30}] 100 %"
