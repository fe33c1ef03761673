"""The publisher's parts on their own: journal, names, looks at directories, housekeeping, status, budgets."""

from __future__ import annotations

import datetime as dt
import json
import os

import attrs
import pytest

from cwtrain.config import HotLoadConfig
from cwtrain.errors import ConfigError, MirrorLockedError, SnapshotError, SnapshotLayoutError, WaitTimeoutError
from cwtrain.hotload._publish.decide import BaselineStep, Rules, Seen, baseline_step, decide, reload_first
from cwtrain.hotload._publish.epochs import highest_epoch, open_epoch, refuse_if_taken_over
from cwtrain.hotload._publish.housekeeping import read_note, removable, remove_directories
from cwtrain.hotload._publish.journal import Journal
from cwtrain.hotload._publish.look import look_at
from cwtrain.hotload._publish.names import default_run_id, identity_of, parse_identity
from cwtrain.hotload._publish.report import Measures, metrics
from cwtrain.hotload._publish.send import Budget
from cwtrain.hotload._publish.state import Acknowledged, State, WriteKind
from cwtrain.hotload.status import BaselineState, BaselineStatus, read_status, write_status
from cwtrain.models.sync import SnapshotChoice
from cwtrain.storage import Location, MemoryStore
from helpers.fake_service import Clock
from helpers.tiny_checkpoint import tiny_tensors, write_delta_by_hand, write_full
from helpers.toy_trainer import write_empty

# -- the journal ------------------------------------------------------------------------------------------------------


def journal(path, run="run", deployment="d"):
    return Journal(path, run_id=run, deployment_id=deployment)


def test_what_is_saved_is_found_again_by_the_same_run_only(tmp_path):
    first = journal(tmp_path)
    assert not first.found
    saved = first.save(first.state.opened(3).based("run-v000000"))
    first.close()
    again = journal(tmp_path)
    assert again.found
    assert again.state == saved
    again.close()
    other = journal(tmp_path, run="other")
    assert not other.found
    assert other.state == State(run_id="other", deployment_id="d", owner=other.state.owner)
    other.close()


def test_a_journal_has_one_process_at_a_time(tmp_path):
    first = journal(tmp_path)
    with pytest.raises(MirrorLockedError, match="state directory is in use by process"):
        journal(tmp_path)
    first.close()
    first.close()
    journal(tmp_path).close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"schema_version": 2}', "schema_version 2, this cwtrain reads 1"),
        ("{", "cannot be read"),
        ("[]", "schema_version None"),
        ('{"schema_version": 1}', "cannot be read: KeyError"),
    ],
)
def test_a_journal_that_is_none_is_named_and_can_be_got_round(tmp_path, text, says):
    (tmp_path / "journal.json").write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        journal(tmp_path)
    assert "CWTRAIN_HOTLOAD_STATE_DIR" in caught.value.hint
    (tmp_path / "journal.json").unlink()
    journal(tmp_path).close()  # the refusal gave the lock back


def test_a_state_directory_that_cannot_be_made_says_which_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        journal(tmp_path / "file" / "state")
    assert "CWTRAIN_HOTLOAD_STATE_DIR" in caught.value.hint


def test_a_journal_that_cannot_be_written_says_so_and_keeps_the_last_state(tmp_path):
    made = journal(tmp_path)
    saved = made.save(made.state.opened(1))
    (tmp_path / "journal.json.new").mkdir()
    with pytest.raises(ConfigError, match="the journal cannot be written") as caught:
        made.save(saved.opened(2))
    assert caught.value.hint
    assert made.state == saved
    made.close()


def test_a_new_epoch_throws_converted_deltas_away(tmp_path):
    made = journal(tmp_path)
    place = made.staging_path(3, "digest")
    os.makedirs(place)
    assert made.open_epoch(2).epoch == 2
    assert not os.path.exists(place)
    made.close()


# -- names and settings -----------------------------------------------------------------------------------------------


def test_run_ids_become_prefixes_of_identities():
    environ = {"CWTRAIN_HOTLOAD_DEPLOYMENT_ID": "d", "CWTRAIN_HOTLOAD_RUN_ID": " my run/7é "}
    assert HotLoadConfig.from_env(environ).run_id == "my-run-7-"
    assert HotLoadConfig.from_env({**environ, "CWTRAIN_HOTLOAD_RUN_ID": "  "}).run_id is None
    for wrong in ("x" * 97, "..."):
        with pytest.raises(ConfigError, match="CWTRAIN_HOTLOAD_RUN_ID"):
            HotLoadConfig.from_env({**environ, "CWTRAIN_HOTLOAD_RUN_ID": wrong})


def test_a_run_without_an_id_is_called_after_its_directory_and_the_time():
    assert default_run_id("/ckpt/my updates/", dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)) == (
        "my-updates-20260102T030405"
    )


def test_identities_of_other_runs_are_not_ours():
    assert identity_of("run", 1, 7) == "run-v000007"
    assert identity_of("run", 2, 1234567, "full") == "run.2-v1234567-full"
    for other in ("run2-v000001", "run-v00001", "run.x-v000001", "run.2.3-v000001", "a-run-v000001", "run-v000001-x y"):
        assert parse_identity("run", other) is None


# -- directories ------------------------------------------------------------------------------------------------------


def test_a_directory_is_told_by_its_content(tmp_path):
    old, new = tiny_tensors(0), tiny_tensors(1)
    delta = write_delta_by_hand(tmp_path / "weight_v000002", old, new, version="000002", base_version="000001")
    full = write_full(tmp_path / "weight_v000003")
    empty = write_empty(tmp_path / "weight_v000004", version="000004", base_version="000003")
    found = [look_at(place, disk_dir=tmp_path) for place in (tmp_path, delta, full, empty)]
    assert [(one.kind, one.number, one.base_number) for one in found] == [
        (WriteKind.BASELINE, None, None),
        (WriteKind.DELTA, 2, 1),
        (WriteKind.FULL, 3, None),
        (WriteKind.EMPTY, 4, 3),
    ]
    again = write_delta_by_hand(
        tmp_path / "other" / "weight_v000002", old, new, version="000002", base_version="000001"
    )
    assert look_at(again, disk_dir=tmp_path).content == found[1].content


def test_what_a_name_and_an_index_say_must_agree(tmp_path):
    place = write_delta_by_hand(tmp_path / "weight_v000005", tiny_tensors(0), tiny_tensors(1), version="000004")
    with pytest.raises(SnapshotLayoutError, match="version 5 by its name, and version 4 by its index"):
        look_at(place, disk_dir=tmp_path)
    named = write_delta_by_hand(tmp_path / "x", tiny_tensors(0), tiny_tensors(1), version="a", base_version="b")
    with pytest.raises(SnapshotLayoutError, match="not a number in digits"):
        look_at(named, disk_dir=tmp_path)


def test_shards_without_an_index_are_no_version(tmp_path):
    """The index is what says that a version is complete: shards alone are a writer at work."""
    place = write_delta_by_hand(tmp_path / "weight_v000001", tiny_tensors(0), tiny_tensors(1))
    os.unlink(os.path.join(place, "model.safetensors.index.json"))
    with pytest.raises(SnapshotLayoutError, match=r"model\.safetensors\.index\.json"):
        look_at(place, disk_dir=tmp_path)


# -- housekeeping -----------------------------------------------------------------------------------------------------


def test_only_directories_that_are_acknowledged_and_behind_a_full_snapshot_can_go(tmp_path):
    paths = {}
    for number in range(1, 6):
        place = tmp_path / f"weight_v{number:06d}"
        place.mkdir()
        paths[str(place)] = number
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    state = State(run_id="run", deployment_id="d", owner="o", directories={**paths, str(elsewhere): 1}, full_number=4)
    assert removable(state) == {}
    known = Acknowledged(identity="run-v000004", number=4, through=4)
    found = removable(attrs.evolve(state, acknowledged=known))
    assert sorted(set(found.values())) == [1, 2, 3]
    gone = remove_directories(found, tmp_path)
    assert sorted(gone.values()) == [1, 2, 3]
    assert elsewhere.is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weight_v000004", "weight_v000005"]


def test_a_note_that_is_none_is_said_to_be(tmp_path):
    assert read_note(tmp_path) is None
    (tmp_path / "cwtrain_published.json").write_text('{"schema_version": 9}')
    with pytest.raises(SnapshotError, match="cannot be read"):
        read_note(tmp_path)


# -- epochs and status ------------------------------------------------------------------------------------------------

LOCATION = Location("weights", "p")


def test_an_epoch_has_one_opener_and_who_opens_a_later_one_takes_the_run_over():
    """B47: two live publishers of one run are told apart by the bucket."""
    store = MemoryStore("weights")
    assert highest_epoch(store, LOCATION, "run", []) == 0
    assert open_epoch(store, LOCATION, "run", first=1, owner="a", directory="/a") == 1
    assert open_epoch(store, LOCATION, "run", first=1, owner="b", directory="/b") == 2
    assert open_epoch(store, LOCATION, "run.2", first=1, owner="c", directory="/c") == 1
    assert highest_epoch(store, LOCATION, "run", []) == 2
    store.put(LOCATION.claim_key("run.7-v000003"), b"{}")
    assert highest_epoch(store, LOCATION, "run", []) == 7
    refuse_if_taken_over(store, LOCATION, "run", epoch=2, owner="b")
    with pytest.raises(SnapshotError, match="its epoch 2 belongs to run 'run' from /b"):
        refuse_if_taken_over(store, LOCATION, "run", epoch=1, owner="a")
    with pytest.raises(SnapshotError, match="its epoch 1 belongs"):
        refuse_if_taken_over(store, LOCATION, "run", epoch=1, owner="b")


def test_the_status_of_a_base_is_overwritten_and_read_by_others():
    store = MemoryStore("weights")
    assert read_status(store, LOCATION, "d") is None
    for state in BaselineState:
        status = BaselineStatus(deployment_id="d", run_id="run", identity="run-v000000", state=state, error="why")
        write_status(store, LOCATION, status)
        assert read_status(store, LOCATION, "d") == status
    assert json.loads(store.get("p/_manifests/d.status"))["state"] == "failed"
    store.put("p/_manifests/d.status", b'{"schema_version": 7}')
    with pytest.raises(SnapshotError, match="schema_version 7"):
        read_status(store, LOCATION, "d")


# -- small decisions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("published", "completed", "served", "step"),
    [
        (False, False, None, BaselineStep.PUBLISH),
        (True, False, None, BaselineStep.HOT_LOAD),
        (True, True, "run-v000017", BaselineStep.NOTHING),
        (True, True, "run.3-v000001", BaselineStep.NOTHING),
        (True, True, "rival-v000001", BaselineStep.HOT_LOAD),
        (True, True, None, BaselineStep.HOT_LOAD),
    ],
)
def test_what_the_base_needs(published, completed, served, step):
    assert baseline_step("run", published=published, completed=completed, served=served) is step


def test_the_predecessor_is_loaded_again_only_where_a_deployment_refused_the_chain():
    assert not reload_first("run-v000000", "run-v000017", refused=False)
    assert reload_first("run-v000000", "run-v000017", refused=True)
    assert not reload_first("run-v000000", "run-v000000", refused=True)
    assert not reload_first(None, "run-v000017", refused=True)


def test_a_chain_that_is_never_cut_is_warned_about_and_has_an_end():
    """B29: past what a cold replica replays, and at what the service takes."""
    known = Acknowledged(identity="run-v000009", number=9, through=9)
    state = State(run_id="run", deployment_id="d", owner="o", epoch=1, acknowledged=known)
    seen = Seen(kind=WriteKind.DELTA, number=10, base_number=9)
    rules = Rules(full_every=0, full_possible=False)
    assert decide(state, seen, rules, deltas=62).warning is None
    assert "64 deltas" in (decide(state, seen, rules, deltas=63).warning or "")
    assert decide(state, seen, rules, deltas=127).choice is SnapshotChoice.DELTA
    with pytest.raises(SnapshotError, match="delta number 129") as caught:
        decide(state, seen, rules, deltas=128)
    assert "CWTRAIN_HOTLOAD_FULL_EVERY" in (caught.value.hint or "")


@pytest.mark.parametrize("kind", [WriteKind.DELTA, WriteKind.FULL])
def test_an_opinion_that_cannot_be_followed_is_refused(kind):
    state = State(run_id="run", deployment_id="d", owner="o", epoch=1)
    seen = Seen(kind=kind, number=10, base_number=9)
    with pytest.raises(ConfigError, match="a plugin wants version 10 as a delta"):
        decide(state, seen, Rules(full_every=20, full_possible=True), deltas=0, opinion=SnapshotChoice.DELTA)


def test_a_budget_says_what_was_going_on_when_it_ended():
    clock = Clock()
    budget = Budget(5.0, clock)
    budget.check("sending")
    assert budget.at_most(60.0) == 5.0
    clock.sleep(6.0)
    with pytest.raises(WaitTimeoutError, match="5 s of this call are over; it was sending") as caught:
        budget.check("sending")
    assert "CWTRAIN_HOTLOAD_DEADLINE" in caught.value.hint
    assert Budget(None, clock).at_most(60.0) == 60.0


def test_metrics_leave_out_what_is_not_known():
    assert metrics(Measures()) == {"hotload/total_seconds": 0.0, "hotload/chain_cut": 0.0}
    measures = Measures(changed_bytes=10, total_bytes=100, timings={"bytes": 20.0, "upload_seconds": 1.5})
    assert metrics(measures)["hotload/density"] == 0.1
    assert metrics(measures)["hotload/ratio"] == 5.0
    assert metrics(measures)["hotload/upload_seconds"] == 1.5
