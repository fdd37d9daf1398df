"""The demo's parts that need no cluster: its chats, its client, its numbers and its table."""

from __future__ import annotations

import io
import json
import statistics
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cluster.chat import ChatError, ask, parse_cached
from cluster.config import ClusterConfig
from cluster.conversation import conversations, in_turns
from cluster.demo import AFFINITY_CHATS, CONFIG, DAYS, ROUND_ROBIN_CHATS, SEED, TURNS, kept, with_policy
from cluster.demo_report import Measured, Run, closing_lines, short_names, table

# Chats


def test_equal_arguments_give_equal_texts_and_other_seeds_give_others() -> None:
    first = conversations(["bakery"], 3, 20, seed=1)
    assert first == conversations(["bakery"], 3, 20, seed=1)
    assert first[0].text != conversations(["bakery"], 3, 20, seed=2)[0].text


def test_both_runs_of_the_demo_are_of_one_size_and_share_nothing() -> None:
    runs = [conversations(names, TURNS, DAYS, SEED) for names in (AFFINITY_CHATS, ROUND_ROBIN_CHATS)]
    texts = [chat.text for run in runs for chat in run]
    sizes = [sum(len(chat.text) for chat in run) for run in runs]
    assert abs(sizes[0] - sizes[1]) < 0.01 * sizes[0]
    assert len({text[:24] for text in texts}) == len(texts)
    assert [[chat.turns for chat in run] for run in runs] == [[TURNS] * len(runs[0])] * 2


def test_every_question_is_about_a_day_that_the_text_has() -> None:
    for chat in conversations(AFFINITY_CHATS, 4, 10, seed=7):
        for question in chat.questions:
            day = question.rstrip("?").rsplit(" ", 1)[1]
            assert f"\nDay {day}: " in chat.text


def test_round_robin_over_two_replicas_moves_every_chat_at_every_turn() -> None:
    order = [(chat.name, turn) for turn, chat in in_turns(conversations(ROUND_ROBIN_CHATS, TURNS, 5, SEED))]
    replica = {request: number % 2 for number, request in enumerate(order)}
    for name in ROUND_ROBIN_CHATS:
        assert all(replica[name, turn] != replica[name, turn + 1] for turn in range(TURNS - 1))


# Client


class Server:
    """Answers every chat with the given bytes."""

    def __init__(self, status: int, body: bytes, cached: str = "hbm=512,dram=64,computed=98") -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(status)
                self.send_header("x-manta-replica", "unified-abc")
                self.send_header("x-manta-cached", cached)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    servers: list[Server] = []

    def start(status: int, body: bytes, **options: str) -> str:
        servers.append(Server(status, body, **options))
        return servers[-1].endpoint

    yield start
    for server in servers:
        server.close()


def event(content: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": content}}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
HELLO = [{"role": "user", "content": "hello"}]


def test_an_answer_is_its_text_and_what_the_headers_say(serve: Callable[..., str]) -> None:
    endpoint = serve(200, event("") + event("Good ") + b": comment\n\n" + event("day") + DONE)
    answer = ask(endpoint, "m", HELLO, 5)
    assert (answer.text, answer.replica, answer.cached, answer.computed) == (
        "Good day",
        "unified-abc",
        576,
        98,
    )
    assert answer.ttft_s > 0


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (503, b'{"error": {"message": "no replica is ready"}}', "answered 503: no replica is ready"),
        (500, b"oops", "answered 500: oops"),
        (200, event("half") + b'data: {"error": {"message": "engine died"}}\n\n', "broke off: engine died"),
        (200, event("half"), "ended before its"),
        (200, DONE, "with no text"),
    ],
)
def test_anything_but_a_whole_answer_is_an_error_that_says_what_came(
    serve: Callable[..., str], status: int, body: bytes, said: str
) -> None:
    with pytest.raises(ChatError, match=said):
        ask(serve(status, body), "m", HELLO, 5)


def test_an_endpoint_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ChatError, match="gave no whole answer"):
        ask("http://127.0.0.1:1", "m", HELLO, 5)


@given(
    st.dictionaries(st.sampled_from(["hbm", "dram", "disk", "remote"]), st.integers(0, 10**6)),
    st.integers(0, 10**6),
)
def test_tiers_add_up(tiers: dict[str, int], computed: int) -> None:
    header = ",".join(f"{tier}={count}" for tier, count in [*tiers.items(), ("computed", computed)])
    assert parse_cached(header) == (sum(tiers.values()), computed)


@pytest.mark.parametrize("header", ["", "hbm=1", "hbm=x,computed=2", "computed"])
def test_a_header_that_does_not_say_what_was_computed_is_an_error(header: str) -> None:
    with pytest.raises(ChatError, match="x-manta-cached"):
        parse_cached(header)


# Numbers and table


def runs() -> tuple[Run, Run]:
    affinity = [Measured("bakery", 1, "r1", 0, 700, 2.0), Measured("bakery", 2, "r1", 704, 96, 0.25)]
    round_robin = [Measured("airport", 1, "r2", 0, 700, 2.0), Measured("airport", 2, "r1", 0, 800, 2.2)]
    return Run("prefix affinity", affinity), Run("round robin", round_robin)


PLANNED = [[("bakery", 1), ("bakery", 2)], [("airport", 1), ("airport", 2)]]
NAMES = {"r1": "A", "r2": "B"}


def text_of(
    runs: tuple[Run, Run], width: int = 80, planned: list[list[tuple[str, int]]] = PLANNED
) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table(runs, planned, NAMES))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_hit_ratio_is_cached_over_prompt_tokens() -> None:
    affinity, round_robin = runs()
    assert affinity.hit_ratio == 704 / 1500
    assert round_robin.hit_ratio == 0
    assert Run("nothing yet").hit_ratio == 0


def test_medians_are_taken_apart_for_new_and_repeated_prefixes() -> None:
    turns = [(1, 2.0), (1, 4.0), (1, 3.0), (2, 0.5), (3, 0.1), (2, 0.2)]
    run = Run("any", [Measured("c", turn, "r", 0, 1, ttft) for turn, ttft in turns])
    assert (run.median_ttft_s(repeated=False), run.median_ttft_s(repeated=True)) == (3.0, 0.2)
    with pytest.raises(statistics.StatisticsError):
        Run("nothing").median_ttft_s(repeated=True)


def test_the_closing_lines_say_what_was_measured() -> None:
    ttft, ratio = closing_lines(*runs())
    assert "2,000 ms for a new prefix, 250 ms for a repeated one (2,200 ms with round robin)" in ttft
    assert "47% with prefix affinity, 0% with round robin (704 of 1,500" in ratio


def test_a_row_has_the_request_of_each_run() -> None:
    rows = [line.split() for line in text_of(runs())]
    assert [
        "bakery",
        "1",
        "A",
        "0",
        "700",
        "2000",
        "ms",
        "airport",
        "1",
        "B",
        "0",
        "700",
        "2000",
        "ms",
    ] in rows
    assert [
        "bakery",
        "2",
        "A",
        "704",
        "96",
        "250",
        "ms",
        "airport",
        "2",
        "A",
        "0",
        "800",
        "2200",
        "ms",
    ] in rows


def test_requests_that_are_still_to_come_have_empty_cells() -> None:
    done, _ = runs()
    rows = [line.split() for line in text_of((done, Run("round robin")))]
    assert ["bakery", "1", "A", "0", "700", "2000", "ms", "airport", "1"] in rows


def test_the_demos_table_fits_80_columns_and_24_lines() -> None:
    chats = [
        [(name, turn + 1) for turn in range(TURNS) for name in names]
        for names in (AFFINITY_CHATS, ROUND_ROBIN_CHATS)
    ]
    full = tuple(
        Run(policy, [Measured(name, turn, "r1", 1234, 1234, 12.345) for name, turn in planned])
        for policy, planned in zip(("prefix affinity", "round robin"), chats, strict=True)
    )
    lines = text_of((full[0], full[1]), planned=chats)
    assert all("…" not in line for line in lines)
    assert sum("1234" in line and line.count("12345 ms") == 2 for line in lines) == len(chats[0])
    assert len(lines) <= 22


def test_replicas_get_letters_in_order_and_after_z_their_ids() -> None:
    assert short_names(["r7", "r2", "r7"]) == {"r7": "A", "r2": "B"}
    many = [f"r{number}" for number in range(27)]
    assert (short_names(many)["r25"], short_names(many)["r26"]) == ("Z", "r26")


# Configuration


def test_only_the_routers_policy_differs_between_the_runs() -> None:
    config = ClusterConfig.load(CONFIG)
    other = with_policy(config, "round_robin")
    assert other.router.policy.kind == "round_robin"
    assert with_policy(other, config.router.policy.kind) == config


def test_a_kept_cluster_is_explained_with_a_curl_that_is_valid_json() -> None:
    config = ClusterConfig.load(CONFIG)
    text = kept(config)
    body = text.split("-d '", 1)[1].split("'\n", 1)[0]
    assert json.loads(body)["model"] == config.served_name
    assert f"curl {config.endpoint}/v1/chat/completions" in text
