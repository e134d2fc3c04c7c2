"""Every setting changed on one side: refused by its name, with both values, and nothing accepted.

The coordinator's side is the real server in this process; where a coordinator has to say what none
of this release would, an HTTP server of the test answers in its place.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from atoll import canonical
from atoll.clock import SystemClock
from atoll.codecs import registry as codecs
from atoll.errors import (
    CoordinatorUnreachable,
    LayoutMismatch,
    ManifestMismatch,
    ProtocolError,
    VersionMismatch,
)
from atoll.island.link.network import NetworkLink
from atoll.protocol.manifest import FIXED, Difference, Manifest
from atoll.protocol.messages import Info
from tests import served as kit
from tests.links import Driven
from tests.settings import ALONE, CHOICES, ROOMY, Change, changes, leaves, without
from tests.unit.test_manifest import BASE

LIMIT_SECONDS = 10.0
OTHER_SHA256 = "9" * 64
# The values of a run differ from run to run; the names do not, and a test's id needs only those.
NAMES = [name for name, _ in leaves(Manifest.model_validate(BASE).model_dump(mode="json"))]
INFO_NAMES = [*NAMES, "run_id", "manifest_sha256", "model_hash", "version", "transfer_port"]
# The fields of the codecs and of the outer optimizer that the run above does not have.
OTHER_SECTIONS: dict[str, Any] = {
    "upload": {"codec": "int8"},
    "download": {"codec": "bf16"},
    "outer": {"optimizer": "delayed_nesterov"},
    "mode": "async",
    "membership": {"min_workers": 2},
}
OTHER_BASE = Manifest.model_validate({**BASE, **OTHER_SECTIONS}).model_dump(mode="json")
OTHER_NAMES = [
    name for name, _ in leaves(OTHER_BASE) if name not in NAMES and name.partition(".")[1]
]
SETTINGS = [name for name in NAMES if not name.startswith("manifest_")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kit.Served]:
    with kit.serving(tmp_path_factory.mktemp("matrix"), **ROOMY) as made:
        yield made


@pytest.fixture(scope="module")
def other_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kit.Served]:
    sections = {**ROOMY, **OTHER_SECTIONS}
    with kit.serving(tmp_path_factory.mktemp("other"), **sections) as made:
        yield made


@pytest.fixture(scope="module")
def info(served: kit.Served) -> dict[str, Any]:
    """What the real coordinator says, as JSON."""
    return served.coordinator.info().model_dump(mode="json")


def settings_of(info: dict[str, Any]) -> dict[str, Any]:
    return {name: info[name] for name in Manifest.model_fields}


def change_of(info: dict[str, Any], name: str) -> Change:
    return next(change for change in changes(settings_of(info)) if change.name == name)


@contextmanager
def within_limit() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < LIMIT_SECONDS


# A worker whose settings differ


def attempt(served: kit.Served, settings: dict[str, Any], **changed: Any) -> None:
    worker = kit.Worker(served, "differing")
    request = worker.registration(
        settings=settings, manifest_sha256=canonical.sha256(settings), **changed
    )
    worker.link.send(request)


def test_worker_with_the_settings_of_the_run_is_taken(served, info):
    """The control: it is the change that is refused."""
    worker = kit.Worker(served, "agreeing")

    reply = worker.link.send(
        worker.registration(settings=settings_of(info), codec_versions=codecs.versions())
    )

    assert reply.incarnation == 1


@pytest.mark.parametrize("name", NAMES)
def test_worker_with_another_setting_is_refused_by_its_name(served, info, name):
    change = change_of(info, name)
    before = served.coordinator.state_hash()

    with within_limit(), pytest.raises(ManifestMismatch) as refused:
        attempt(served, change.applied(settings_of(info)))

    assert named(refused.value, name)
    assert told(refused.value, change)
    assert served.coordinator.state_hash() == before


@pytest.mark.parametrize("name", NAMES)
def test_worker_that_lacks_a_setting_is_refused_by_its_name(served, info, name):
    with within_limit(), pytest.raises(ManifestMismatch) as refused:
        attempt(served, without(settings_of(info), name))

    assert named(refused.value, name)


def test_worker_with_a_setting_that_the_run_does_not_know_is_refused_by_its_name(served, info):
    with pytest.raises(ManifestMismatch, match=r"^tomorrow of worker_id='differing' is 1, "):
        attempt(served, {**settings_of(info), "tomorrow": 1})


@pytest.mark.parametrize("depth", [20, 200])  # the client itself writes no deeper
def test_settings_nested_without_end_are_refused_in_a_sentence(served, info, depth):
    nested: dict[str, Any] = {}
    for _ in range(depth):
        nested = {"a": nested, "b" * 500: "c" * 500}  # as long as a registration may be

    with pytest.raises(ProtocolError) as refused:
        attempt(served, {**settings_of(info), "sync_every": nested})

    assert "sync_every" in str(refused.value)
    assert len(str(refused.value)) < 5000


def test_first_of_several_differing_settings_is_named(served, info):
    settings = settings_of(info)
    for name in ("sync_every", "seed"):
        settings = change_of(info, name).applied(settings)

    with pytest.raises(ManifestMismatch, match=r"^seed of "):
        attempt(served, settings)


def test_settings_that_belie_the_hash_are_refused(served, info):
    settings = change_of(info, "outer.lr").applied(settings_of(info))
    worker = kit.Worker(served, "differing")

    with pytest.raises(ManifestMismatch, match=r"^outer\.lr of "):
        worker.link.send(worker.registration(settings=settings))


def test_hash_alone_is_refused_when_it_differs(served):
    worker = kit.Worker(served, "differing")

    with pytest.raises(ManifestMismatch, match=OTHER_SHA256):
        worker.link.send(worker.registration(manifest_sha256=OTHER_SHA256))


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_worker_with_another_codec_version_is_refused_with_both(served, info, codec):
    worker = kit.Worker(served, "differing")
    versions = {**codecs.versions(), codec: 7}

    with pytest.raises(VersionMismatch, match=rf"^codec_versions\.{codec} .* is 7, .* is 1;"):
        worker.link.send(worker.registration(codec_versions=versions))


def test_version_of_a_codec_that_the_run_does_not_use_is_no_matter(served):
    worker = kit.Worker(served, "unused")

    reply = worker.link.send(worker.registration(codec_versions={"int4": 7}))

    assert reply.incarnation == 1


def test_worker_with_another_model_is_refused_with_both_digests(served, info):
    worker = kit.Worker(served, "differing")

    with pytest.raises(LayoutMismatch) as refused:
        worker.link.send(worker.registration(layout_digest=OTHER_SHA256))

    assert "layout_digest of worker_id=" in str(refused.value)
    assert repr(OTHER_SHA256) in str(refused.value)
    assert info["model_hash"] in str(refused.value)


@pytest.mark.parametrize("field", ["block", "held_out_rows", "kind", "rows", "seed"])
def test_worker_with_other_data_is_refused_with_the_field_and_both_values(served, info, field):
    identity = info["data"]["identity"]
    changed = {**identity, field: "another"}
    worker = kit.Worker(served, "differing")

    with pytest.raises(ManifestMismatch) as refused:
        worker.link.send(worker.registration(data_identity=changed))

    assert str(refused.value).startswith(f"data.{field} of ")
    assert "'another'" in str(refused.value)
    assert repr(identity[field]) in str(refused.value)


# A coordinator whose settings differ from what the worker joined with


class Answers:
    """An HTTP server that answers /info with a body of the test's choosing."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.body = body
        answers = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = json.dumps(answers.body).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.link = NetworkLink(
            f"http://127.0.0.1:{self._server.server_address[1]}", token="token-of-the-tests"
        )

    def close(self) -> None:
        self.link.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture(scope="module")
def answers() -> Iterator[Answers]:
    made = Answers({})
    yield made
    made.close()


def joined(answers: Answers, info: dict[str, Any]) -> Driven:
    """A worker that adopted `info`."""
    answers.body = info
    return Driven(answers.link, clock=SystemClock(), seed=1)


def stated(info: dict[str, Any], change: Change, **fields: Any) -> dict[str, Any]:
    return {**info, **change.applied(settings_of(info)), "manifest_sha256": OTHER_SHA256, **fields}


def named(error: Exception, name: str) -> bool:
    """Whether the sentence is about `name`; of a definition or identity, about a part of it."""
    text = str(error)
    return text.startswith(name) or repr(name) in text or f"{name.rpartition('.')[2]}=" in text


def told(error: Exception, change: Change) -> bool:
    """Whether both values are in the sentence; of a definition, what it has more."""
    if isinstance(change.old, dict):
        return "another" in str(error) and "1" in str(error)
    old = "protocol_version" if change.name == "protocol_version" else repr(change.old)
    return old in str(error) and repr(change.new) in str(error)


def test_worker_that_finds_the_same_settings_goes_on(answers, info):
    """The control, of both matrices below."""
    session = joined(answers, info)

    assert session.refresh() is False


@pytest.mark.parametrize("name", SETTINGS)
def test_coordinator_that_says_otherwise_is_refused_by_the_setting(answers, info, name):
    """A change that is no recorded version."""
    change = change_of(info, name)
    session = joined(answers, info)
    answers.body = stated(info, change)

    with within_limit(), pytest.raises(ProtocolError) as refused:
        session.refresh()

    assert named(refused.value, name)
    assert told(refused.value, change)
    assert session.standing.info == Info.model_validate(info)


def is_fixed(name: str) -> bool:
    return any(name == field or name.startswith(f"{field}.") for field in FIXED)


@pytest.mark.parametrize("name", [n for n in SETTINGS if not is_fixed(n)])
def test_recorded_version_with_another_setting_is_adopted(answers, info, name):
    session = joined(answers, info)
    answers.body = stated(info, change_of(info, name), manifest_version=2)

    assert session.refresh() is True
    assert session.standing.identity().manifest_sha256 == OTHER_SHA256


@pytest.mark.parametrize("name", [n for n in SETTINGS if is_fixed(n) and n not in ALONE])
def test_recorded_version_with_another_fixed_setting_is_refused(answers, info, name):
    session = joined(answers, info)
    answers.body = stated(info, change_of(info, name), manifest_version=2)

    with pytest.raises(ManifestMismatch) as refused:
        session.refresh()

    assert str(refused.value).startswith(name)


def test_same_hash_over_other_settings_is_refused(answers, info):
    session = joined(answers, info)
    change = change_of(info, "outer.lr")
    answers.body = stated(info, change, manifest_sha256=info["manifest_sha256"], manifest_version=2)

    with pytest.raises(ManifestMismatch, match=r"^outer\.lr was "):
        session.refresh()


def test_version_that_goes_back_is_refused(answers, info):
    session = joined(answers, {**info, "manifest_version": 3})
    answers.body = {**info, "manifest_version": 2, "manifest_sha256": OTHER_SHA256}

    with pytest.raises(ManifestMismatch, match=r"^manifest_version was 3 .* now says 2"):
        session.refresh()


def test_another_run_is_refused_with_both_names(answers, info):
    session = joined(answers, info)
    answers.body = {**info, "run_id": "another-run"}

    with pytest.raises(ManifestMismatch, match=r"run_id was 'run-of-the-tests' .*'another-run'"):
        session.refresh()


def test_worker_that_comes_back_looks_at_the_settings_again_before_it_goes_on(answers, info):
    session = joined(answers, info)
    tries = []

    def work() -> None:
        tries.append(1)
        answers.body = stated(info, change_of(info, "sync_every"))
        raise CoordinatorUnreachable

    with pytest.raises(ManifestMismatch, match=r"^sync_every was 1 .* says 2"):
        session.call(work)

    assert len(tries) == 1


def test_worker_that_comes_back_to_a_recorded_version_goes_on_with_its_work(answers, info):
    session = joined(answers, info)
    known = []

    def work() -> str:
        known.append(session.standing.identity().manifest_sha256)
        if len(known) == 1:
            answers.body = stated(info, change_of(info, "outer.lr"), manifest_version=2)
            raise CoordinatorUnreachable
        return "done"

    assert session.call(work) == "done"
    assert known == [info["manifest_sha256"], OTHER_SHA256]


def test_refusal_under_the_settings_in_force_is_final(answers, info):
    session = joined(answers, info)

    def work() -> None:
        raise ManifestMismatch("for good")

    with pytest.raises(ManifestMismatch, match="for good"):
        session.call(work)


@pytest.mark.parametrize("name", INFO_NAMES)
def test_coordinator_that_leaves_a_setting_out_is_fatal_with_its_name(answers, info, name):
    with within_limit(), pytest.raises(VersionMismatch, match=f"leaves out '{name}'"):
        joined(answers, without(info, name))


@pytest.mark.parametrize("section", ["upload", "inner", "inner.schedule", "stop", "model"])
def test_coordinator_that_leaves_a_section_out_is_fatal_with_its_name(answers, info, section):
    with pytest.raises(VersionMismatch, match=f"leaves out '{section}'"):
        joined(answers, without(info, section))


@pytest.mark.parametrize("name", SETTINGS)
def test_null_is_no_setting(answers, info, name):
    empty = replace(change_of(info, name), new=None)

    with pytest.raises(VersionMismatch):
        joined(answers, stated(info, empty))


def test_retention_does_not_go_back_to_what_may_be_gone():
    back = Difference("storage.retain", "snapshots", "all")

    assert back.is_fixed
    assert not Difference("storage.retain", "all", "snapshots").is_fixed


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_settings_of_other_classes_are_held_to_the_same(other_served, answers, name):
    """Refused by name: changed by a worker, changed by a coordinator, and left out."""
    info = other_served.coordinator.info().model_dump(mode="json")
    change = change_of(info, name)

    with pytest.raises(ManifestMismatch) as refused:
        attempt(other_served, change.applied(settings_of(info)))
    session = joined(answers, info)
    answers.body = stated(info, change)
    with pytest.raises(ProtocolError) as said:
        session.refresh()
    with pytest.raises(VersionMismatch, match=f"leaves out '{name}'"):
        joined(answers, without(info, name))

    assert all(named(error.value, name) and told(error.value, change) for error in (refused, said))


@pytest.mark.parametrize(("key", "choice"), CHOICES.items())
def test_matrix_is_over_every_class_that_can_be_chosen(key, choice):
    section = key.partition(".")[0]
    fields = {
        f"{section}.{field}" for known in choice.known.values() for field in known.model_fields
    }

    assert fields <= {*NAMES, *OTHER_NAMES}


def test_matrix_is_over_every_setting_of_a_manifest(info):
    assert [name for name, _ in leaves(settings_of(info))] == NAMES
    assert len(NAMES) > 50
