"""Training a speculator, on a target so small that it takes seconds: what it learns from, that it learns, that an interruption costs nothing."""

import io
import json
from dataclasses import replace
from itertools import chain, islice

import pytest
import torch
from rich.console import Console

from draft_service.mlp_speculator import SpeculatorConfig
from draft_service.speculator_loader import load_proposer
from draft_service.training.corpus import Recording, batches, most_frequent, questions, record
from draft_service.training.objective import places, score
from draft_service.training.run import CannotTrain, Plan, train
from draft_service.training.trainer import Schedule, Trainer
from draft_service.training.writing import answer
from shared.default_model import DEFAULT_TARGET
from shared.engine.block_allocator import BlockAllocator
from shared.engine.forward_batch import Span
from shared.engine.head_input import head_input
from shared.engine.model_runner import ModelRunner
from tests.support.tiny_models import tiny_llama
from tests.support.tiny_speculators import tiny_speculator

TARGET = tiny_llama()
HEAD = TARGET.model.get_output_embeddings().weight


def written(seed: int = 0, num_prompts: int = 6, max_tokens: int = 20, eos_ids: frozenset[int] = frozenset()) -> Recording:
    asked = questions([(1 + index, 2, 3) for index in range(num_prompts)], seed)
    return record(answer(ModelRunner(TARGET, 96, 4), BlockAllocator(96, 4), asked, max_tokens, TARGET.vocab_size, eos_ids))


def test_a_recording_has_what_the_head_read_for_every_token():
    recorded = written()
    assert recorded.lengths == (20,) * 6
    first = 0
    for index, length in enumerate(recorded.lengths):
        said = recorded.token_ids[first : first + length].tolist()
        text = [1 + index, 2, 3, *said]
        with head_input(TARGET.model) as read:
            logits = ModelRunner(TARGET, 64, 4).forward([Span(text[:-1], 0, range(64), length)])
        torch.testing.assert_close(recorded.hidden[first : first + length], read[0], rtol=0, atol=1e-10)
        if index % 3 == 0:  # the temperatures go round: 0 is the first
            assert said == logits.argmax(-1).tolist()
        first += length


def test_a_text_ends_with_its_last_token():
    eos_id = int(written().token_ids[4])
    recorded = written(eos_ids=frozenset({eos_id}))
    for text in recorded.token_ids.split(list(recorded.lengths)):
        assert eos_id not in text[:-1]
        assert len(text) == 20 or int(text[-1]) == eos_id
    assert min(recorded.lengths) < 20


def test_recordings_are_read_as_they_were_written(tmp_path):
    recorded = written()
    recorded.save(tmp_path / "a.safetensors")
    again = Recording.load(tmp_path / "a.safetensors")
    assert torch.equal(again.hidden, recorded.hidden)
    assert torch.equal(again.token_ids, recorded.token_ids)
    assert again.lengths == recorded.lengths


def test_all_prompts_come_up_before_one_comes_again():
    seen = list(chain.from_iterable(islice(batches([(number,) for number in range(7)], 3, seed=1), 7)))
    assert sorted(seen[:7]) == sorted(seen[7:14]) == [(number,) for number in range(7)]
    assert seen[:7] != seen[7:14]


def test_the_most_frequent_ids_are_chosen():
    recordings = [Recording(torch.zeros(4, 1), torch.tensor([7, 7, 2, 5]), (4,)), Recording(torch.zeros(3, 1), torch.tensor([5, 7, 9]), (3,))]
    assert most_frequent(recordings, 2, 10).tolist() == [5, 7]
    assert most_frequent(recordings, 5, 10).tolist() == [0, 2, 5, 7, 9], "those that occur, then the lowest"
    assert most_frequent(recordings, 0, 10) is most_frequent(recordings, 10, 10) is None


def test_places_are_those_with_enough_of_their_own_text_behind_them():
    assert places(torch.tensor([5, 2, 3]), 2).tolist() == [0, 1, 2, 7]
    assert places(torch.tensor([1, 2]), 3).tolist() == []


@pytest.mark.parametrize("head_ids", [None, torch.tensor([3, 5, 8, 13, 21, 34, 40, 41, 42, 63])], ids=["all", "some"])
def test_the_objective_is_what_it_says(head_ids):
    """Row by row and head by head, by the definitions."""
    recorded, speculator = written(), tiny_speculator(inner_dim=64, tied=True)
    speculator.head_ids = head_ids
    for head in speculator.head:
        head.weight = torch.nn.Parameter(HEAD.clone() if head_ids is None else HEAD[head_ids], requires_grad=False)
    speculator.float()
    rows = places(torch.tensor(recorded.lengths), 3)[:9]
    found = score(speculator, recorded.hidden, recorded.token_ids, rows, HEAD.float())
    expected = torch.zeros(3, 3)
    for row in rows.tolist():
        state = speculator.begin(recorded.hidden[row : row + 1].float())
        for index in range(3):
            state = speculator.advance(index, state, recorded.token_ids[row + index : row + index + 1])
            foreseen = speculator.logits(index, state)[0].softmax(-1)
            said = (HEAD.float() @ recorded.hidden[row + 1 + index].float()).softmax(-1)
            expected[0, index] -= sum(said[token] * foreseen[token].log() for token in (range(64) if head_ids is None else head_ids)) / len(rows)
            expected[1, index] += float(foreseen.argmax() == said.argmax()) / len(rows)
            expected[2, index] += torch.minimum(foreseen, said).sum() / len(rows)
    torch.testing.assert_close(torch.stack([found.loss, found.greedy, found.overlap]), expected, rtol=1e-4, atol=1e-5)


def trainer_in(directory, num_steps: int = 60) -> Trainer:
    directory.mkdir(exist_ok=True)
    config = SpeculatorConfig(3, 32, 64, 64, True, True, True)
    schedule = Schedule(num_steps, rate=1e-2, seed=0, batch_rows=128, evaluate_every=20)
    embedding = next(TARGET.model.get_input_embeddings().parameters()).float()
    return Trainer(config, embedding, HEAD.float(), None, schedule, directory)


def test_training_learns_and_an_interruption_changes_nothing(tmp_path):
    training, held_out = [written(seed, 12) for seed in range(6)], written(99, 12)
    whole = trainer_in(tmp_path / "whole")
    whole.run(training, held_out)
    assert [point.step for point in whole.points] == [20, 40, 60]
    first, last = whole.points[0].score, whole.points[-1].score
    assert bool((last.loss < first.loss).all())
    assert float(last.greedy[0]) > 3 / 64, "three times what a guess at random would reach"

    class Interrupted(Exception):
        pass

    def interrupt(step: int, loss: float) -> None:
        if step == 50:
            raise Interrupted

    with pytest.raises(Interrupted):
        trainer_in(tmp_path / "parts").run(training, held_out, interrupt)
    again = trainer_in(tmp_path / "parts")
    assert again.step == 40
    again.run(training, held_out)
    for name, tensor in whole.own_tensors().items():
        assert torch.equal(again.own_tensors()[name], tensor), name
    assert [point.step for point in again.points] == [20, 40, 60]


@pytest.mark.real_model
def test_the_command_trains_exports_and_goes_on(tmp_path):
    plan = Plan(DEFAULT_TARGET, ("Tell me about the sea.", "What is a lighthouse?"), True, 60, 24, 2, 2, 32, 100, 0.5, 2e-3, 0, 0)
    console = Console(file=io.StringIO())
    train(plan, tmp_path / "out", console)
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {"plan.json", "corpus", "checkpoint.pt", "model.safetensors", "config.json", "README.md", "training.png"}
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["n_predict"], said["draft_vocab_size"]) == (2, 100)
    before = (tmp_path / "out" / "corpus" / "training-00000.safetensors").stat().st_mtime_ns
    train(plan, tmp_path / "out", console)
    assert (tmp_path / "out" / "corpus" / "training-00000.safetensors").stat().st_mtime_ns == before
    with pytest.raises(CannotTrain, match="another plan"):
        train(replace(plan, seed=1), tmp_path / "out", console)
    proposer, fingerprint = load_proposer(str(tmp_path / "out"), "", "auto", "cpu", 1, "native")
    assert proposer.name == str(tmp_path / "out")
    assert len(fingerprint) == 64
