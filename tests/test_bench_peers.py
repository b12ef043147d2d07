import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.peers.cases import CASES, PROMPTS, Figures, Pair, common_share, compare, from_record, missing_pairs, pick_prompts, to_record
from bench.peers.lines import Arrivals, Job, to_answer, to_job, to_line
from bench.peers.run import Saved, summarise
from bench.peers.worker import Worker

_JOB = Job(prompts=((1, 2), (3,)), max_tokens=3, temperature=1.0, seed=7)

_STAND_IN = """
from bench.peers.lines import Arrivals, serve, take_stdout
output = take_stdout()
print("this goes to the log")

def run(job):
    if job.max_tokens == 13:
        raise ValueError("thirteen")
    arrivals = Arrivals(len(job.prompts))
    for _ in range(job.max_tokens):
        for index, prompt in enumerate(job.prompts):
            arrivals.add(index, [prompt[0] + job.seed])
    return arrivals.to_answer()

serve(output, {"engine": "stand-in"}, run)
"""


def _clock(*times: float) -> Iterator[float]:
    return iter(times)


def _pair(index: int, ours: float, peer: float) -> Pair:
    return Pair(index, 0.01, Figures(ours, 2 * ours, 3.5), Figures(peer, peer, None), 0.75)


def test_decoding_is_timed_from_the_moment_at_which_every_prompt_has_a_token() -> None:
    times = _clock(10.0, 11.0, 12.0, 13.0, 15.0)
    arrivals = Arrivals(2, lambda: next(times))
    arrivals.add(0, [5])
    arrivals.add(0, [6, 7])
    arrivals.add(1, [8])
    arrivals.add(1, [])  # takes no time
    arrivals.add(0, [9])
    answer = arrivals.to_answer()
    assert answer.token_ids == ((5, 6, 7, 9), (8,))
    assert (answer.wall_s, answer.tokens_per_s) == (5.0, 1.0)
    assert (answer.decode_tokens, answer.decode_s, answer.decode_per_s) == (1, 2.0, 0.5)


def test_answer_without_a_token_of_every_prompt_or_with_first_tokens_only_is_none() -> None:
    arrivals = Arrivals(2)
    arrivals.add(0, [1])
    with pytest.raises(ValueError, match="1 of 2 prompts"):
        arrivals.to_answer()
    arrivals.add(1, [1])
    with pytest.raises(ValueError, match="no token came after"):
        arrivals.to_answer()


def test_job_and_answer_survive_the_way() -> None:
    assert to_job(json.loads(to_line(_JOB))) == _JOB
    arrivals = Arrivals(1)
    arrivals.add(0, [1])
    arrivals.add(0, [2, 3])
    answer = arrivals.to_answer(accepted_per_round=1.5)
    assert to_answer(json.loads(to_line(answer))) == answer


async def test_worker_answers_and_stands_still_between_jobs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with Worker([sys.executable, "-c", _STAND_IN], log) as worker:
        assert worker.description == {"engine": "stand-in"}
        for _ in range(2):
            assert (await worker.ask(_JOB)).token_ids == ((8, 8, 8), (10, 10, 10))
            assert worker.pid is not None
            stopped = await asyncio.to_thread(os.waitid, os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
            assert stopped is not None
            assert stopped.si_code == os.CLD_STOPPED
    assert log.read_text() == "this goes to the log\n"


async def test_job_that_fails_is_reported_and_the_worker_goes_on(tmp_path: Path) -> None:
    async with Worker([sys.executable, "-c", _STAND_IN], tmp_path / "log") as worker:
        with pytest.raises(RuntimeError, match="ValueError: thirteen"):
            await worker.ask(Job(((1,),), 13, 0.0, 0))
        assert (await worker.ask(Job(((1,),), 2, 0.0, 0))).num_tokens == 2


async def test_worker_that_ends_while_it_loads_is_reported_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="log"):
        async with Worker([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "log"):
            raise AssertionError("it has not loaded")
    assert "no such model" in (tmp_path / "log").read_text()


def test_no_batch_has_a_prompt_twice_and_pairs_move_on() -> None:
    assert len(set(PROMPTS)) == len(PROMPTS)
    for case in CASES.values():
        for index in range(20):
            chosen = pick_prompts(index, case.num_requests)
            assert len(set(chosen)) == case.num_requests
            assert chosen != pick_prompts(index + 1, case.num_requests)


def test_common_share_counts_to_the_first_difference() -> None:
    assert common_share([(1, 2, 3, 4), (5, 6)], [(1, 2, 9, 4), (5, 6)]) == 0.75
    assert common_share([(1, 2)], [(3, 2)]) == 0.0


def test_measuring_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    saved = Saved(path)
    assert missing_pairs(saved.pairs("a"), 3) == [0, 1, 2]
    saved.add("a", {"set": []}, _pair(0, 3.0, 2.0))
    saved.add("a", {"set": []}, _pair(2, 4.0, 2.0))
    saved.add("b", {"set": ["threads=1"]}, _pair(0, 1.0, 1.0))
    again = Saved(path)
    assert again.pairs("a") == [_pair(0, 3.0, 2.0), _pair(2, 4.0, 2.0)]
    assert missing_pairs(again.pairs("a"), 3) == [1]
    assert summarise(again).row_count == 2 * 5


def test_ratio_is_ours_over_the_peers() -> None:
    pairs = [_pair(index, ours, 2.0) for index, ours in enumerate((3.0, 4.0, 5.0))]
    assert compare(pairs, "tokens_per_s").median == 2.0
    assert compare(pairs, "decode_per_s").median == 4.0
    assert from_record(json.loads(json.dumps(to_record(pairs[0])))) == pairs[0]
