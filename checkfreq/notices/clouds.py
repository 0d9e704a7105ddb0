"""Spot notices: AWS, Google Cloud and Azure tell a machine that they will take it away.

Each asks the metadata service of the machine (`metadata.py`), and tells apart "no notice", which
takes one back, from "no answer".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from checkfreq.notices.metadata import MetadataService
from checkfreq.notices.source import CLOCK, Clock, EndsAt, NoAnswerError

#: Google: a preempted machine gets 30 s, and one that is stopped for maintenance at least 60 s.
#: (With a GPU it gets an hour, but nothing tells how much of it is over.)
_PREEMPTION_S = 30.0
_MAINTENANCE_S = 60.0


class _Cloud:
    """What the three share."""

    name = ""
    #: A notice leaves 30 s to two minutes, and the services are made to be polled so.
    pause_s = 5.0

    def __init__(self, service: MetadataService, *, clock: Clock = CLOCK) -> None:
        self._service = service
        self._clock = clock
        self._ends: EndsAt | None = None

    def poll(self) -> EndsAt | None:
        """See NoticeSource."""
        self._ends = self._look()
        return self._ends

    def _look(self) -> EndsAt | None:
        """Ask; raises like ``poll``."""
        raise NotImplementedError


class AwsSpot(_Cloud):
    """EC2: two minutes' notice, from the instance metadata service version 2."""

    name = "aws"
    _TOKEN_S = "21600"

    def __init__(self, service: MetadataService, *, clock: Clock = CLOCK) -> None:
        super().__init__(service, clock=clock)
        self._token = ""

    def _look(self) -> EndsAt | None:
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            why = f"the spot instance will be interrupted: {action['action']}"
            return EndsAt(self.name, _iso_unix_s(action["time"]), why)
        if self._get("/latest/meta-data/events/recommendations/rebalance") is not None:
            why = "AWS recommends to rebalance: the spot instance is likely to be interrupted"
            return EndsAt(self.name, None, why)
        return None

    def _get(self, path: str) -> dict[str, Any] | None:
        """What is there; None if the service says that nothing is."""
        if not self._token:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": self._TOKEN_S}
            self._token = self._service.ask("/latest/api/token", headers, method="PUT").body()
        answer = self._service.ask(path, {"X-aws-ec2-metadata-token": self._token})
        if answer.status == 401:  # it has expired: take another one the next time
            self._token = ""
        return None if answer.status == 404 else _object(answer.body())


class GcpPreemption(_Cloud):
    """Compute Engine: preemption, and maintenance that stops the machine."""

    name = "gcp"
    _ROOT = "/computeMetadata/v1/instance/"

    def _look(self) -> EndsAt | None:
        if self._get("preempted") == "TRUE":
            return self._within(_PREEMPTION_S, "the machine is being preempted")
        if self._get("maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            return self._within(_MAINTENANCE_S, "the machine will be stopped for maintenance")
        return None

    def _get(self, name: str) -> str:
        answer = self._service.ask(self._ROOT + name, {"Metadata-Flavor": "Google"})
        if answer.headers.get("metadata-flavor") != "Google":
            raise NoAnswerError("somebody else's server")
        return answer.body()

    def _within(self, seconds: float, why: str) -> EndsAt:
        """The end so long after it was first heard of: the service names no time."""
        known = self._ends
        if known is not None and known.why == why:
            return known
        return EndsAt(self.name, self._clock.unix_s() + seconds, why)


class AzureScheduledEvents(_Cloud):
    """Azure: events that end this machine, at least 30 s (Preempt) to minutes before."""

    name = "azure"
    _ENDING = ("Preempt", "Terminate", "Reboot", "Redeploy")
    _HEADERS: Mapping[str, str] = {"Metadata": "true"}

    def __init__(self, service: MetadataService, *, clock: Clock = CLOCK) -> None:
        super().__init__(service, clock=clock)
        self._machine = ""

    def _look(self) -> EndsAt | None:
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        found = _object(self._service.ask(path, self._HEADERS).body())
        ends = [self._ends_at(event) for event in self._own(found["Events"])]
        return min(ends, key=lambda end: end.at_unix_s or 0.0, default=None)

    def _own(self, events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Those that end this machine: a scale set hears of the events of all its machines."""
        ending = [event for event in events if event["EventType"] in self._ENDING]
        if ending and not self._machine:
            self._machine = self._own_name()
        for event in ending:
            # Nothing tells whose it is: an end too many costs less than one that is missed.
            if not self._machine or self._machine in event["Resources"]:
                yield event

    def _own_name(self) -> str:
        path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
        try:
            return self._service.ask(path, self._HEADERS).body()
        except NoAnswerError:
            return ""

    def _ends_at(self, event: dict[str, Any]) -> EndsAt:
        why = f"Azure has scheduled an event for this machine: {event['EventType']}"
        if event.get("NotBefore"):
            return EndsAt(self.name, parsedate_to_datetime(event["NotBefore"]).timestamp(), why)
        # It has begun. The time at which that was first seen stays.
        known = self._ends
        is_known = known is not None and known.at_unix_s is not None and known.why == why
        now_s = self._clock.unix_s()
        at_s = known.at_unix_s if known is not None and is_known else now_s
        return EndsAt(self.name, min(now_s, at_s or now_s), why)


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise NoAnswerError("expected a JSON object")
    return found


def _iso_unix_s(text: str) -> float:
    at = datetime.fromisoformat(text.removesuffix("Z"))  # which Python 3.10 does not read
    return (at if at.tzinfo else at.replace(tzinfo=timezone.utc)).timestamp()
