"""The command line against a real server: output, exit codes, and errors of one line without a traceback."""

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from outrider.v1 import generate_pb2, info_pb2

from client import cli
from shared.errors import InvalidRequest
from tests.support.scripted_server import WHOLE, ScriptedServer, output, scripted_server


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with scripted_server() as scripted:
        yield scripted


class Run:
    """Runs the command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        self._monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        out, err = self._capsys.readouterr()
        assert "Traceback" not in out + err
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(capsys, monkeypatch)


def test_generate_streams_the_text_and_sums_up_on_standard_error(run: Run, server: ScriptedServer) -> None:
    code, out, err = run("generate", "Hi", "--address", server.address)
    assert (code, out) == (0, "Hello")
    assert "4 tokens (stop_string)" in err
    assert "acceptance 0.50 (2/4) · mean accepted length 2.00" in err
    assert server.requests[0].text == "Hi"


def test_generate_reads_the_prompt_from_standard_input(run: Run, server: ScriptedServer) -> None:
    run("generate", "--address", server.address, stdin="one\ntwo\n")
    run("generate", "-", "--address", server.address, stdin="three")
    assert [request.text for request in server.requests] == ["one\ntwo", "three"]


def test_generate_prints_json_lines(run: Run, server: ScriptedServer) -> None:
    code, out, err = run("generate", "Hi", "--json", "--address", server.address)
    parts = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [part["type"] for part in parts] == ["part", "part", "result"]
    assert (parts[0]["token_ids"], parts[2]["text"], parts[2]["usage"]["rounds"]) == ([10, 11], "Hello", 2)


def test_generate_sends_what_its_flags_say(run: Run, server: ScriptedServer) -> None:
    flags = (
        "--temperature 0 --top-k 3 --top-p 0.5 --min-p 0.25 --repetition-penalty 2 --presence-penalty 1 --frequency-penalty -1 "
        "--logit-bias 7=-5 --seed 9 --max-tokens 5 --min-tokens 1 --stop a --stop b --stop-token-id 4 --ignore-eos "
        "--mode rejection --no-speculation --drafter d --request-id r"
    )
    run("generate", "Hi", *flags.split(), "--address", server.address)
    expected = generate_pb2.GenerateRequest(
        text="Hi",
        sampling=generate_pb2.Sampling(
            temperature=0, top_k=3, top_p=0.5, min_p=0.25, repetition_penalty=2, presence_penalty=1, frequency_penalty=-1, logit_bias={7: -5}, seed=9
        ),
        stopping=generate_pb2.Stopping(max_tokens=5, min_tokens=1, stop=["a", "b"], stop_token_ids=[4], ignore_eos=True),
        speculation=generate_pb2.Speculation(max_draft_tokens=0, preferred_drafter="d"),
        mode=generate_pb2.VERIFICATION_MODE_REJECTION,
        request_id="r",
    )
    assert server.requests == [expected]


def test_generate_without_flags_leaves_everything_but_the_length_to_the_server(run: Run, server: ScriptedServer) -> None:
    run("generate", "Hi", "--address", server.address)
    assert server.requests == [generate_pb2.GenerateRequest(text="Hi", stopping=generate_pb2.Stopping(max_tokens=256))]


def test_generate_as_chat_sends_messages(run: Run, server: ScriptedServer) -> None:
    run("generate", "Hi", "--chat", "--system", "Be brief", "--max-tokens", "0", "--address", server.address)
    messages = [generate_pb2.ChatMessage(role="system", content="Be brief"), generate_pb2.ChatMessage(role="user", content="Hi")]
    assert server.requests == [generate_pb2.GenerateRequest(chat=generate_pb2.ChatMessages(messages=messages))]


def test_the_address_may_stand_in_the_environment(run: Run, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_ADDRESS", server.address)
    assert run("generate", "Hi")[0] == 0


def test_what_the_server_refuses_is_one_line_with_the_requests_id(run: Run, server: ScriptedServer) -> None:
    server.script = [InvalidRequest("sampling.top_p", "must be above 0; it is 0")]
    assert run("generate", "Hi", "--top-p", "0", "--address", server.address) == (
        1,
        "",
        "outrider: sampling.top_p: must be above 0; it is 0 (request r-1)\n",
    )


def test_a_deadline_that_passes_is_one_line(run: Run, server: ScriptedServer) -> None:
    server.script, server.hangs = WHOLE[:2], True
    code, out, err = run("generate", "Hi", "--deadline-s", "0.3", "--address", server.address)
    assert (code, out) == (1, "Hel")
    assert err == "outrider: the deadline passed before the answer was complete\n"


@pytest.mark.parametrize("command", [["generate", "Hi"], ["info"], ["health"], ["chat"]])
def test_where_nothing_answers_a_sentence_says_what_to_do(run: Run, command: list[str]) -> None:
    code, out, err = run(*command, "--address", "127.0.0.1:1", stdin="Hi\n")
    assert (code, out) == (1, "")
    assert err == "outrider: nothing answers at 127.0.0.1:1. Is a service running there? `outrider up` starts both on this machine.\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "a", "b"], "unexpected extra argument"),
        (["generate", "a", "--temprature", "1"], "No such option: --temprature"),
        (["generate", "a", "--seed", "x"], "--seed"),
        (["generate", "a", "--logit-bias", "x"], "--logit-bias must be ID=VALUE"),
        (["generate", "a", "--no-speculation", "--max-draft-tokens", "3"], "contradict"),
        (["nonsense"], "No such command"),
        (["verifier", "--block-size", "0"], "--block-size must be a whole number from 1 to 256; it is '0'"),
        (["draft", "--blok-size", "1"], "unknown flag --blok-size; did you mean --block-size?"),
        (["up", "--set", "quux=1"], "neither service has a setting quux"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(run: Run, arguments: list[str], words: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("outrider: ")
    assert words in err


def test_every_mistake_in_a_services_flags_has_its_line(run: Run) -> None:
    code, _, err = run("verifier", "--block-size", "0", "--nonsense", "--link", "0.0.0.0:5")
    assert (code, err.count("outrider: ")) == (2, 3)


def test_info_is_a_table_or_json(run: Run, server: ScriptedServer) -> None:
    server.info = info_pb2.GetInfoResponse(version="1.2", model=info_pb2.ModelInfo(name="some/model"))
    code, out, _ = run("info", "--address", server.address)
    assert code == 0
    assert "some/model" in out
    assert json.loads(run("info", "--json", "--address", server.address)[1])["version"] == "1.2"


def test_health_is_an_exit_code(run: Run, server: ScriptedServer) -> None:
    server.states.set("outrider.v1.LinkService", 2)
    assert run("health", "--address", server.address) == (0, "SERVING\n", "")
    assert run("health", "--address", server.address, "--service", "outrider.v1.LinkService") == (1, "NOT_SERVING\n", "")
    assert run("health", "--address", server.address, "--service", "nobody") == (1, "SERVICE_UNKNOWN\n", "")


def test_chat_keeps_the_history_until_it_is_cleared(run: Run, server: ScriptedServer) -> None:
    code, out, _ = run("chat", "--system", "S", "--address", server.address, stdin="one\n\ntwo\n/clear\nthree\n/exit\nfour\n")
    assert (code, out) == (0, "Hello\n" * 3)
    said = [[(message.role, message.content) for message in request.chat.messages] for request in server.requests]
    opening = ("system", "S")
    assert said == [
        [opening, ("user", "one")],
        [opening, ("user", "one"), ("assistant", "Hello"), ("user", "two")],
        [opening, ("user", "three")],
    ]


def test_a_turn_that_is_refused_leaves_no_trace_in_the_history(run: Run, server: ScriptedServer) -> None:
    server.script = [InvalidRequest("chat", "too long")]
    code, _, err = run("chat", "--address", server.address, stdin="one\n/nonsense\ntwo\n")
    assert code == 0
    assert "chat: too long" in err
    assert "unknown command /nonsense" in err
    assert [len(request.chat.messages) for request in server.requests] == [1, 1]


def test_no_arguments_show_the_help(run: Run) -> None:
    code, out, _ = run()
    assert code == 0
    assert all(command in out for command in ("verifier", "draft", "up", "generate", "chat", "info", "health", "demo"))


@pytest.mark.parametrize(("service", "flag"), [("verifier", "--max-draft-tokens"), ("draft", "--ngram-max")])
def test_a_services_help_lists_its_settings(run: Run, service: str, flag: str) -> None:
    code, out, _ = run(service, "--block-size", "0", "--help")
    assert code == 0
    assert flag in out


def test_a_reader_that_goes_away_leaves_no_traceback(server: ScriptedServer) -> None:
    server.script = [WHOLE[0], *[output("word " * 200, 1)] * 2000, WHOLE[-1]]
    # A shell's background jobs, and all that they start, ignore SIGINT; a terminal's do not.
    attended = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from client.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", attended, "generate", "Hi", "--address", server.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline(10)
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_an_interrupt_cancels_the_call_and_is_exit_code_130(server: ScriptedServer) -> None:
    server.script, server.hangs = WHOLE[:2], True
    # A shell's background jobs, and all that they start, ignore SIGINT; a terminal's do not.
    attended = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from client.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", attended, "generate", "Hi", "--address", server.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(3) == "Hel"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "")
    assert server.cancelled.wait(10)
