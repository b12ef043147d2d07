"""What a terminal and a program get to see."""

import io
import json

from rich.console import Console

from client.completion import Completion, DrafterInfo, DraftServiceInfo, ModelInfo, Part, RefusedDrafter, ServiceInfo, Timings, Usage
from client.demo import metrics_table
from client.render import completion_to_json, info_table, info_to_json, part_to_json, printable, settings_help, summarise
from client.scrape import read_samples
from shared.config import settings
from shared.sampling import Mode
from verifier_service.config import VerifierConfig

MODEL = ModelInfo("m", 100, 64, "f" * 64, "float32", "cpu")


def completion(usage: Usage) -> Completion:
    return Completion("r-1", "Hü", (1, 2), (3,), 42, "eos", 2, usage, Timings(ttft_s=0.25, total_s=2.0, received_tokens=2))


def shown(renderable: object, width: int = 100) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(renderable)
    return stream.getvalue()


def test_the_summary_tells_speed_and_acceptance() -> None:
    line = summarise(completion(Usage(1, 2, 2, 4, 3)))
    assert line == "2 tokens (eos) · 1.0 tok/s · TTFT 250 ms · acceptance 0.75 (3/4) · mean accepted length 2.50"


def test_the_summary_without_drafts_says_so() -> None:
    assert summarise(completion(Usage(1, 2, 0, 0, 0))).endswith("TTFT 250 ms · no drafts")


def test_json_has_every_field_and_the_derived_figures() -> None:
    assert json.loads(part_to_json(Part("ü\n", (1,), 1))) == {"type": "part", "text": "ü\n", "token_ids": [1], "accepted": 1}
    record = json.loads(completion_to_json(completion(Usage(1, 2, 2, 4, 3))))
    assert (record["type"], record["text"], record["seed"], record["matched"]) == ("result", "Hü", 42, 2)
    assert (record["usage"]["acceptance_rate"], record["usage"]["mean_accepted_length"], record["timings"]["tokens_per_s"]) == (0.75, 2.5, 1.0)


def test_info_shows_drafters_refusals_and_the_draft_service_itself() -> None:
    drafter = DrafterInfo("i", "alpha", 4, 1, True)
    refused = RefusedDrafter("j", "beta", "wrong tokenizer")
    draft = DraftServiceInfo("i", "alpha", "ngram", "l:1", False, "no route")
    info = ServiceInfo("1.2", 1, MODEL, (Mode.COUPLED,), {"max_draft_tokens": 8}, (drafter,), (refused,), draft)
    text = shown(info_table(info, "h:1"))
    for part in ("h:1", "m (float32 on cpu)", "1 of 4 sequences, suspended", "beta (j): wrong tokenizer", "not attached: no route"):
        assert part in text
    assert json.loads(info_to_json(info))["drafters"][0]["name"] == "alpha"
    assert "none attached" in shown(info_table(ServiceInfo("1", 1, MODEL, ()), "h:1"))


def test_text_of_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\rc\x07\x9b\td\n") == "a[2Jbc\td\n"
    assert printable("naïve 日本 👍") == "naïve 日本 👍"


def test_help_shows_every_setting_whole_in_eighty_columns() -> None:
    text = shown(settings_help("outrider verifier", "Serves.", settings(VerifierConfig)), width=80)
    assert max(map(len, text.splitlines())) <= 80
    for row in settings(VerifierConfig):
        for part in (row.flag, row.accepts, row.variable, row.group):
            assert part in text
        assert "".join(row.description.split()) in "".join(text.split())


def test_samples_are_added_up_over_labels_and_buckets_left_out() -> None:
    text = 'a_total{x="1"} 2\na_total{x="2"} 3\nh_bucket{le="+Inf"} 4\nh_sum 8\nh_count 4\n'
    assert read_samples(text) == {"a_total": 5.0, "h_sum": 8.0, "h_count": 4.0}


def test_the_demo_shows_means_and_says_what_is_missing() -> None:
    samples = {
        "outrider_spec_decode_num_accepted_tokens_total": 30.0,
        "outrider_spec_decode_num_draft_tokens_total": 40.0,
        "outrider_spec_decode_num_drafts_total": 10.0,
        "outrider_verify_step_seconds_sum": 0.5,
        "outrider_verify_step_seconds_count": 10.0,
    }
    text = shown(metrics_table(samples, {}))
    for part in ("0.750", "4.00", "50.0", "not reported"):
        assert part in text
