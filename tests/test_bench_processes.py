"""`outrider bench` as a user runs it: real services, real gRPC, stand-ins for the models."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from client.bench.delay_proxy import DelayProxy
from tests.support.processes import ROOT, Services

PNG = b"\x89PNG"


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OUTRIDER_")} | {"COLUMNS": "160"}
    command = [sys.executable, "-P", "-m", "client.cli", "bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240, check=False)


def drafts(arm: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = arm["summary"]["drafts"]
    return found


@pytest.mark.slow
def test_a_simulated_sweep_gives_every_figure_and_its_pictures(tmp_path: Path) -> None:
    """Two round trips, two K, plain decoding beside them and a verifier without a drafter; tiny times."""
    out = tmp_path / "out" / "figures.json"
    sizes = ("--concurrency", "2", "--requests", "4", "--pairs", "2", "--input-tokens", "2:6", "--output-tokens", "40", "--seed", "3")
    files = ("--json", out, "--texts", "--plots", tmp_path / "plots")
    done = bench("--simulate", "target-ms=6,draft-ms=0.5,acceptance=0.9,rtt-ms=1:3", "--k", "1", "4", "--no-drafter", *sizes, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "k=4 / plain" in done.stdout
    assert "claim nothing" in done.stdout

    record = json.loads(out.read_text())
    assert {"date", "command", "settings", "environment", "intervals", "cells"} == record.keys()
    assert "--simulate" in record["command"]
    assert [cell["rtt_ms"] for cell in record["cells"]] == [1.0, 3.0]
    for cell in record["cells"]:
        arms = cell["arms"]
        assert set(arms) == {"plain", "no-drafter", "k=1", "k=4"}
        for arm in arms.values():
            assert arm["summary"]["errors"] == {}
            assert len(arm["runs"]) == 2
            assert all(len(text) == 40 for run in arm["runs"] for text in run["texts"])
            assert arm["summary"]["ttft"]["count"] == arm["summary"]["e2e"]["count"] == 8
            assert arm["summary"]["tpot"]["p99"] >= arm["summary"]["tpot"]["median"] > 0
            assert arm["summary"]["total_per_s"] > arm["summary"]["output_per_s"]
        assert drafts(arms["plain"])["drafted"] == drafts(arms["no-drafter"])["drafted"] == 0
        assert drafts(arms["k=1"])["drafted_at"][1:] == [0, 0, 0]
        of_four = drafts(arms["k=4"])
        assert of_four["drafted"] == sum(of_four["drafted_at"]) > 0
        assert of_four["accepted"] == sum(of_four["accepted_at"])
        assert 0.7 < of_four["accepted_at"][0] / of_four["drafted_at"][0] <= 1.0
        compared = {(each["arm"], each["against"]): each for each in cell["comparisons"]}
        assert set(compared) == {("plain", "no-drafter"), *((arm, other) for arm in ("k=1", "k=4") for other in ("plain", "no-drafter"))}
        assert all((each["num_same"], each["num_texts"]) == (8, 8) for each in compared.values())
        assert compared["k=4", "plain"]["ratios"]["steady_per_s"]["num_pairs"] == 2

    pictures = {path.stem: path.read_bytes() for path in (tmp_path / "plots").iterdir()}
    names = {"throughput_by_concurrency", "latency_by_throughput", "acceptance_by_position", "speedup_by_k", "speedup_by_round_trip"}
    assert set(pictures) == names
    assert all(picture.startswith(PNG) and len(picture) > 5_000 for picture in pictures.values())


@pytest.mark.slow
def test_a_running_service_is_measured_in_an_open_loop_and_failures_are_shown(tmp_path: Path) -> None:
    """Every request is longer than the service takes in the second half: the figures say so and so does the exit code."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "short"}\n{"messages": [{"role": "user", "content": "' + "long " * 100 + '"}]}\n')
    out = tmp_path / "figures.json"
    with Services() as services:
        settings = ("--simulate", "target-ms=3", "--max-model-len", "120")
        verifier = services.launch_verifier(Path("stand-in"), *settings).serving()
        address = ("--address", verifier.address, "--metrics-address", verifier.metrics)
        load = ("--rate", "40", "--burstiness", "0.5", "--requests", "6", "--pairs", "2", "--prompts", prompts, "--output-tokens", "10")
        done = bench(*address, *load, "--temperature", "1", "--json", out)
    assert done.returncode == 1
    assert "INVALID_REQUEST" in done.stdout
    (cell,) = json.loads(out.read_text())["cells"]
    for arm in cell["arms"].values():
        assert arm["summary"]["errors"] == {"INVALID_REQUEST": 6}
        assert arm["summary"]["e2e"]["count"] == 6
        assert "texts" not in arm["runs"][0]
    assert cell["comparisons"][0]["num_same"] == cell["comparisons"][0]["num_texts"] == 6
    assert "inverse_tpot" in cell["comparisons"][0]["ratios"]


@pytest.mark.slow
def test_a_service_that_does_not_start_ends_the_benchmark_with_its_log() -> None:
    done = bench("--target", "/nowhere/at/all", "--set", "kv-blocks=10")
    assert done.returncode == 1
    assert "verifier of the pair exited with code" in done.stderr
    assert "/nowhere/at/all" in done.stderr


@pytest.mark.slow
def test_a_benchmark_that_is_terminated_leaves_no_process_behind() -> None:
    command = [sys.executable, "-P", "-m", "client.cli", "bench", "--simulate", "rtt-ms=1", "--output-tokens", "5000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT) as running:
        parent = psutil.Process(running.pid)
        while len(started := parent.children(recursive=True)) < 3:
            assert running.poll() is None
        running.terminate()
        assert running.wait(60) == 143
    assert psutil.wait_procs(started, timeout=30)[1] == []


def test_the_relay_keeps_every_byte_and_its_order_both_ways_and_ends_with_either_end() -> None:
    import socket
    import threading

    sent = [os.urandom(1 << 20) for _ in range(2)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        with DelayProxy(f"{host}:{port}", delay_s=0.002) as relay:
            near_host, near_port = relay.address.rsplit(":", 1)
            with socket.create_connection((near_host, int(near_port))) as near, server.accept()[0] as far:
                writers = [threading.Thread(target=end.sendall, args=(data,)) for end, data in ((near, sent[0]), (far, sent[1]))]
                for writer in writers:
                    writer.start()
                assert read_exactly(far, len(sent[0])) == sent[0]
                assert read_exactly(near, len(sent[1])) == sent[1]
                for writer in writers:
                    writer.join()
                far.close()
                assert near.recv(1) == b""


def read_exactly(connection: Any, size: int) -> bytes:
    received = b""
    while len(received) < size:
        received += connection.recv(size - len(received))
    return received
