"""Spot notices, from a real server that answers as each cloud's metadata service does."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from email.utils import formatdate

import pytest

from checkfreq.notices.clouds import AwsSpot, AzureScheduledEvents, GcpPreemption
from checkfreq.notices.metadata import MetadataService
from checkfreq.notices.source import NoAnswerError
from checkfreq.notices.watch import News, NoticeWatch
from tests.notices.conftest import Server, SetClock, end_of

SOON = '{"action": "stop", "time": "2026-11-23T15:00:00Z"}'
TOKEN = "PUT /latest/api/token"
ACTION = "GET /latest/meta-data/spot/instance-action"
REBALANCE = "GET /latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "GET /computeMetadata/v1/instance/preempted"
MAINTENANCE = "GET /computeMetadata/v1/instance/maintenance-event"
EVENTS = "GET /metadata/scheduledevents?api-version=2020-07-01"
NAME = "GET /metadata/instance/compute/name?api-version=2021-02-01&format=text"


# ---- AWS


@pytest.fixture
def aws(server: Server) -> AwsSpot:
    server.answers[TOKEN] = (200, "t0ken")
    return AwsSpot(MetadataService(server.url))


def test_aws_tells_action_and_time(server: Server, aws: AwsSpot) -> None:
    server.answers[ACTION] = (200, '{"action": "terminate", "time": "2026-11-23T15:00:00Z"}')
    ends = end_of(aws)
    assert (ends.source, ends.at_unix_s) == ("aws", 1795446000.0)
    assert ends.why == "the spot instance will be interrupted: terminate"
    (token, token_headers), (action, headers) = server.asked
    assert (token, action) == (TOKEN, ACTION)
    assert int(token_headers["x-aws-ec2-metadata-token-ttl-seconds"]) > 0
    assert headers["x-aws-ec2-metadata-token"] == "t0ken"


def test_aws_says_nothing_with_404_and_keeps_its_token(server: Server, aws: AwsSpot) -> None:
    assert aws.poll() is None
    assert aws.poll() is None
    assert server.paths() == [TOKEN, ACTION, REBALANCE, ACTION, REBALANCE]
    server.answers[REBALANCE] = (200, '{"noticeTime": "2026-11-23T15:00:00Z"}')
    assert end_of(aws).at_unix_s is None  # it is only information
    assert aws.pause_s == 5.0


def test_aws_renews_a_token_that_expired(server: Server, aws: AwsSpot) -> None:
    aws.poll()
    server.answers[ACTION] = (401, "")
    with pytest.raises(NoAnswerError, match="instance-action: status 401"):
        aws.poll()
    server.answers[ACTION] = (200, '{"action": "stop", "time": "2026-11-23T15:00:00Z"}')
    assert aws.poll() is not None
    assert server.paths().count(TOKEN) == 2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"action": "stop", "time": "soon"}'])
def test_an_answer_of_aws_that_makes_no_sense_is_none(
    server: Server, aws: AwsSpot, text: str
) -> None:
    server.answers[ACTION] = (200, text)
    with pytest.raises((NoAnswerError, ValueError, KeyError)):
        aws.poll()


# ---- Google


@pytest.fixture
def gcp(server: Server, clock: SetClock) -> GcpPreemption:
    server.headers["Metadata-Flavor"] = "Google"
    server.answers |= {PREEMPTED: (200, "FALSE"), MAINTENANCE: (200, "NONE")}
    return GcpPreemption(MetadataService(server.url), clock=clock.clock())


def test_google_gives_30_s_from_when_it_is_first_seen(
    server: Server, gcp: GcpPreemption, clock: SetClock
) -> None:
    assert gcp.poll() is None
    assert server.asked[0][1]["metadata-flavor"] == "Google"
    server.answers[PREEMPTED] = (200, "TRUE")
    at_unix_s = []
    for _ in range(3):
        ends = end_of(gcp)
        at_unix_s.append(ends.at_unix_s)
        clock.pass_(5.0)
    assert at_unix_s == [1_000_030.0] * 3


@pytest.mark.parametrize(
    ("event", "left_s"),
    [("TERMINATE_ON_HOST_MAINTENANCE", 60.0), ("MIGRATE_ON_HOST_MAINTENANCE", None)],
)
def test_maintenance_ends_the_run_only_if_it_stops_the_machine(
    server: Server, gcp: GcpPreemption, clock: SetClock, event: str, left_s: float | None
) -> None:
    server.answers[MAINTENANCE] = (200, event)
    ends = gcp.poll()
    assert (ends and ends.at_unix_s) == (left_s and clock.unix_s + left_s)
    server.answers[MAINTENANCE] = (200, "NONE")
    assert gcp.poll() is None


def test_an_answer_that_is_not_googles_is_none(server: Server, gcp: GcpPreemption) -> None:
    server.headers.clear()
    server.answers[PREEMPTED] = (200, "TRUE")
    with pytest.raises(NoAnswerError, match="somebody else's server"):
        gcp.poll()


# ---- Azure


@pytest.fixture
def azure(server: Server, clock: SetClock) -> AzureScheduledEvents:
    server.answers |= {NAME: (200, "vm_0"), EVENTS: events()}
    return AzureScheduledEvents(MetadataService(server.url), clock=clock.clock())


def events(*found: dict[str, object]) -> tuple[int, str]:
    return 200, json.dumps({"DocumentIncarnation": 1, "Events": found})


def event(kind: str, *, machine: str = "vm_0", at_unix_s: float | None = None) -> dict[str, object]:
    not_before = "" if at_unix_s is None else formatdate(at_unix_s, usegmt=True)
    return {"EventType": kind, "Resources": [machine], "NotBefore": not_before}


def test_azure_tells_the_earliest_event_of_this_machine(
    server: Server, azure: AzureScheduledEvents
) -> None:
    assert azure.poll() is None
    assert server.asked[0][1]["metadata"] == "true"
    server.answers[EVENTS] = events(
        event("Preempt", machine="vm_1", at_unix_s=1_000_010.0),
        event("Freeze", at_unix_s=1_000_020.0),
        event("Terminate", at_unix_s=1_000_300.0),
        event("Preempt", at_unix_s=1_000_030.0),
    )
    ends = end_of(azure)
    assert (ends.source, ends.at_unix_s) == ("azure", 1_000_030.0)
    assert "Preempt" in ends.why
    server.answers[EVENTS] = events()
    assert azure.poll() is None  # they were withdrawn


# ---- services that do not answer


def watch(aws: AwsSpot, clock: SetClock) -> tuple[NoticeWatch, list[News]]:
    told: list[News] = []
    return NoticeWatch([aws], tell=told.append, clock=clock.clock()), told


def test_a_token_that_is_refused_is_asked_for_every_few_seconds_and_told_of_once(
    server: Server, aws: AwsSpot, clock: SetClock
) -> None:
    server.answers[TOKEN] = (403, "")
    looking, told = watch(aws, clock)
    for _ in range(20):
        assert 0.0 < looking.look() <= 10.0
        clock.pass_(5.0)
    assert len(server.asked) == 20
    (news,) = told
    assert (news.source, news.ends) == ("aws", None)
    assert news.unanswered == f"PUT {server.url}/latest/api/token: status 403"
    server.answers |= {TOKEN: (200, "t0ken"), ACTION: (200, SOON)}
    looking.look()
    assert [one.ends and one.ends.why for one in told[1:]] == [
        "the spot instance will be interrupted: stop"
    ]


def test_a_service_that_fails_takes_no_notice_back(
    server: Server, aws: AwsSpot, clock: SetClock
) -> None:
    server.answers[ACTION] = (200, SOON)
    looking, told = watch(aws, clock)
    for server.refuses in (False, *[True] * 6, False):
        assert looking.look() <= 10.0
        clock.pass_(10.0)
    assert [bool(news.ends) for news in told] == [True, False]
    assert "status 500" in told[1].unanswered
    del server.answers[ACTION]
    looking.look()
    assert told[2] == News("aws", None)


def test_no_proxy_is_asked(server: Server, aws: AwsSpot, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    aws.poll()
    assert server.paths() == [TOKEN, ACTION, REBALANCE]


@pytest.fixture
def dripping() -> Iterator[str]:
    """The address of a server that sends a byte now and then, and never ends."""
    is_over = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not is_over.wait(0.02):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        is_over.set()
        thread.join(60.0)


def test_an_answer_that_never_ends_is_cut_off(dripping: str) -> None:
    try:
        answer = MetadataService(dripping, timeout_s=0.3).ask("/")
    except NoAnswerError:
        return
    assert set(answer.text) == {"x"}
