"""Engines that share the cores compute one step at a time, in the order of asking."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm import SamplingParams
from edgellm.engine import AsyncLLM
from edgellm.request import Request
from edgellm.turns import Turns


def test_one_at_a_time_and_nobody_is_passed_over() -> None:
    turns, inside, order = Turns(), [], []
    go_on = threading.Event()

    def work(name: int) -> None:
        for _ in range(3):
            with turns:
                inside.append(name)
                assert len(inside) == 1
                go_on.wait(10)
                order.append(name)
                inside.pop()

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)  # so that they ask in this order
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert order[:4] == [0, 1, 2, 3] and len(order) == 12


def test_who_keeps_the_turn_too_long_loses_it() -> None:
    turns, go_on, done = Turns(0.1), threading.Event(), []

    def stuck() -> None:
        with turns:
            go_on.wait(10)

    def work() -> None:
        for _ in range(50):
            with turns:
                done.append(1)

    holder = threading.Thread(target=stuck)
    holder.start()
    time.sleep(0.02)
    others = [threading.Thread(target=work) for _ in range(3)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join(5)  # one wait in all, not one for each step
    assert len(done) == 150
    go_on.set()
    holder.join(10)
    with turns:
        pass


def test_an_exception_gives_the_turn_on() -> None:
    turns = Turns()
    for _ in range(2):
        with pytest.raises(KeyError), turns:
            raise KeyError
    with turns:
        pass


def tokens(request: Request) -> list[int]:
    assert request.wait(30)
    return request.choices[0].output


def test_two_engines_at_once_say_what_each_says_alone(tiny_model: Callable[..., Path]) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    paths = [tiny_model("llama"), tiny_model("qwen2")]
    alone = []
    for path in paths:
        with AsyncLLM(path, n_threads=2) as engine:
            alone.append(tokens(engine.submit("abc", params)))
    turns = Turns()
    one, two = (AsyncLLM(path, n_threads=2, turns=turns) for path in paths)
    with one, two:
        requests = [e.submit("abc", params) for _ in range(3) for e in (one, two)]
        assert [tokens(request) for request in requests] == 3 * alone
