"""What `outrider bench` is told, and the prompts it makes of that."""

from random import Random
from statistics import median
from typing import Any

import pytest

from client.bench.cell import Load, Plan, Request
from client.bench.options import BadOptions, Options, to_loads, to_models, whole_numbers
from client.bench.prompts import BadPrompts, Lengths, Prompts, read_prompts
from client.bench.services import Models
from client.cli import main

TEN = Lengths("fixed", 10)


def options(**changes: Any) -> Options:
    given: dict[str, Any] = {
        "address": "",
        "metrics_address": "",
        "models": (Models(None, None, "", None),),
        "assignments": (),
        "loads": (Load(concurrency=4),),
        "request": Request(0.0, None, True, 60.0),
        "plan": Plan(0, 7, 0, 0),
        "prompts": None,
        "as_chat": False,
        "input_tokens": TEN,
        "output_tokens": TEN,
        "k": (),
        "run_ahead": None,
        "alone": False,
    }
    return Options(**(given | changes))


def test_a_simulation_is_run_once_for_each_round_trip():
    assert to_models(None, None, "target-ms=5,rtt-ms=1:10") == tuple(Models(None, None, "target-ms=5", rtt) for rtt in (1.0, 10.0))
    assert to_models("a", "b", None) == (Models("a", "b", "", None),)
    (only,) = to_models(None, None, "rtt-ms=3")
    assert only.rtt_ms == 3.0
    assert only.simulate  # all defaults are still a simulation


@pytest.mark.parametrize(
    "text", ["rtt-ms=fast", "rtt-ms=-1", "target=3", "acceptance=1.2", "acceptance=0.9:0.5", "target-ms", "draft-ms=1,draft-ms=2"]
)
def test_a_simulation_that_cannot_be_read_is_refused(text):
    with pytest.raises(BadOptions, match="--simulate: "):
        to_models(None, None, text)


def test_loads_are_a_closed_loop_or_an_open_one():
    assert to_loads((), (), 1.0) == (Load(concurrency=1),)
    assert to_loads(("1,4", "16"), (), 1.0) == tuple(Load(concurrency=value) for value in (1, 4, 16))
    assert to_loads((), ("0.5",), 2.0) == (Load(rate=0.5, burstiness=2.0),)
    for concurrency, rate, burstiness in ((("1",), ("2",), 1.0), (("0",), (), 1.0), (("1.5",), (), 1.0), ((), ("0",), 1.0), ((), ("1",), 0.0)):
        with pytest.raises(BadOptions):
            to_loads(concurrency, rate, burstiness)
    assert whole_numbers("--k", ("0,2",), 0) == [0, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"address": "a:1", "alone": True},
        {"address": "a:1", "run_ahead": 0},
        {"address": "a:1", "assignments": ("window=3",)},
        {"address": "a:1", "models": (Models("m", None, "", None),)},
        {"metrics_address": "a:1"},
        {"models": (Models("m", None, "target-ms=5", None),)},
    ],
)
def test_options_that_contradict_each_other_are_refused(changes):
    with pytest.raises(BadOptions):
        options(**changes)


def test_a_run_is_two_rounds_of_a_closed_loop_unless_told_otherwise():
    assert options().plan_for(Load(concurrency=16)) == Plan(32, 7, 16, 0)
    assert options().plan_for(Load(concurrency=1)) == Plan(8, 7, 2, 0)
    assert options().plan_for(Load(rate=1.0)).num_requests == 32
    assert options(plan=Plan(3, 9, 5, 1)).plan_for(Load(concurrency=16)) == Plan(3, 9, 3, 1)


@pytest.mark.parametrize("text", ["0", "x", "5:4", "lognormal:0:1", "lognormal:5", "1:2:3", "-3", "2:nan", "lognormal:nan:1"])
def test_lengths_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="must be"):
        Lengths.parse(text)


def test_lengths_follow_their_distribution():
    random = Random(3)
    assert {Lengths.parse("12").draw(random) for _ in range(20)} == {12}
    assert {Lengths.parse("3:5").draw(random) for _ in range(200)} == {3, 4, 5}
    drawn = [Lengths.parse("lognormal:200:0.5").draw(random) for _ in range(4000)]
    # The median of 4,000 has a standard error of 1.25 * 0.5 / sqrt(4000) = 1% of it: five of them, p < 1e-6.
    assert median(drawn) == pytest.approx(200, rel=0.05)
    assert sum(length > 200 * 2.718**0.5 for length in drawn) / len(drawn) == pytest.approx(0.159, abs=0.03)


def test_requests_of_the_same_number_are_the_same_and_others_are_not():
    prompts = Prompts((), Lengths("uniform", 5, 50), Lengths("uniform", 5, 50), vocab_size=300, seed=4)
    assert prompts.asks(10, 20)[3:] == prompts.asks(7, 23)
    assert len({(ask.prompt, ask.max_tokens) for ask in prompts.asks(50, 0)}) > 45
    assert [ask.seed for ask in prompts.asks(3, 5)] == [9, 10, 11]
    assert replaced_seed(prompts).asks(5, 0) != prompts.asks(5, 0)
    assert all(0 <= token_id < 300 for ask in prompts.asks(20, 0) for token_id in ask.prompt)


def replaced_seed(prompts: Prompts) -> Prompts:
    return Prompts(prompts.file, prompts.input_tokens, prompts.output_tokens, prompts.vocab_size, prompts.seed + 1)


def test_prompts_of_a_file_come_in_their_order_and_again(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"messages": [{"role": "user", "content": "two"}]}\n', encoding="utf-8")
    read = read_prompts(path, as_chat=False)
    assert read == ["one", [{"role": "user", "content": "two"}]]
    assert [ask.prompt for ask in Prompts(read, TEN, TEN, 10, 0).asks(3, 1)] == [read[1], read[0], read[1]]
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\ntwo\n", encoding="utf-8")
    assert read_prompts(lines, as_chat=False) == ["one", "two"]
    assert read_prompts(lines, as_chat=True)[1] == [{"role": "user", "content": "two"}]


@pytest.mark.parametrize("line", ["{", "[1]", '{"prompt": 3}', '{"text": "x"}', '{"messages": [{"role": "user"}]}', ""])
def test_a_prompt_file_that_cannot_be_used_is_refused_with_its_line(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(BadPrompts, match=r"line 1|no prompts"):
        read_prompts(path, as_chat=False)


def test_the_command_refuses_before_it_starts_anything(capsys):
    for arguments, words in (
        (["--concurrency", "1", "4", "16", "--rate", "2"], "choose one"),
        (["--concurrency", "1", "four"], "takes numbers from 1 on"),
        (["--simulate", "acceptance=2"], "acceptance must be a number from 0 to 1"),
        (["--output-tokens", "many"], "must be N, LOW:HIGH"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["bench", *arguments])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
